"""fuselm.patch: the fused kernels inside a Hugging Face Llama, in place, and out again.

Weights, state dict and interface stay as they are; only what runs changes. Each module gets a forward method of its
own, and `unpatch` deletes these. Attention layers run the source of their class with two names in it replaced, RoPE and
(from transformers 4.48 on) the table of attention functions, so that caches and keywords of any version keep working.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from fuselm.kernels._triton import Backend, select_backend
from fuselm.kernels.arguments import autocast_dtype
from fuselm.kernels.attention.api import MAX_HEAD_DIM, MIN_HEAD_DIM, attention
from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.decode_attention import decode_attention
from fuselm.kernels.linear_cross_entropy import linear_cross_entropy
from fuselm.kernels.rms_norm import add_rms_norm, rms_norm
from fuselm.kernels.rope import rope
from fuselm.kernels.swiglu import swiglu

Model = TypeVar("Model", bound=nn.Module)

_MODULE, _CLASS = "transformers.models.llama.modeling_llama", "LlamaForCausalLM"
_OURS = "_fuselm_patch"  # marks functions that were put in by `patch`
_IGNORED = -100
# Keywords of the loss, which transformers hands down with all others.
_LOSS_KEYWORDS = ("num_items_in_batch", "shift_labels", "ignore_index")
# Those that speak of logits or of the output's form and are none of the decoder's.
_HEAD_KEYWORDS = ("labels", "logits_to_keep", "num_logits_to_keep", "return_dict")


def patch(model: Model, *, backend: Backend = "auto") -> Model:
    """Puts fused RMSNorm, RoPE, SwiGLU, attention and loss into a LlamaForCausalLM of transformers, in place.

    Logits, loss and gradients are those of before, to rounding. With `labels`, a model in training mode computes the
    loss in chunks and returns no logits (`logits=None`); in eval mode it returns both. Attention runs in the kernel
    where the model uses "sdpa" and nothing but the causal mask applies; padding masks, dropout and static caches that
    are filled take PyTorch's.

    Args:
        model: a LlamaForCausalLM, transformers 4.45 or later; on any device, also before it is moved or sharded.
        backend: of every op: "auto" (kernels where they can run), "triton" or "reference".

    Returns:
        The same model. A second call changes the backend.

    Raises:
        TypeError: the model is of another class; the message names it.
        ValueError: its configuration asks for what the kernels do not compute, or a module's forward was replaced by
            somebody else.
    """
    if not any(c.__module__ == _MODULE and c.__name__ == _CLASS for c in type(model).__mro__):
        raise TypeError(
            f"model is a {type(model).__name__}: fuselm.patch takes a LlamaForCausalLM of transformers, not what wraps "
            "it (for a PeftModel, pass its base_model.model)"
        )
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}: expected one of {get_args(Backend)}")
    hf: Any = model
    config = hf.config
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config.hidden_act!r}: fuselm.patch takes models with 'silu'")
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"pretraining_tp={config.pretraining_tp}: expected 1")
    replaced = [(hf, _model_forward(type(model), backend)), (hf.model.rotary_emb, _tables)]
    for module in hf.model.modules():
        kind = type(module).__name__
        if kind == "LlamaRMSNorm":
            replaced.append((module, _norm_forward(backend)))
        elif kind == "LlamaMLP":
            replaced.append((module, _mlp_forward(backend)))
        elif kind == "LlamaDecoderLayer" and _returns_tensor(type(module)):
            replaced.append((module, _layer_forward(backend)))
        elif kind.startswith("Llama") and kind.endswith("Attention"):
            replaced.append((module, _attention_forward(type(module), config, backend)))
    for module, _ in replaced:
        forward = vars(module).get("forward")
        # transformers itself leaves the class's own method there after it has recorded hidden states.
        if forward is not None and not _is_ours(module) and getattr(forward, "__func__", None) != type(module).forward:
            raise ValueError(
                f"the {type(module).__name__} has a forward method that is not its class's: call fuselm.patch before "
                "anything else that replaces it, such as accelerate's hooks"
            )
    for module, function in replaced:
        setattr(function, _OURS, True)
        module.forward = types.MethodType(function, module)
    return model


def unpatch(model: Model) -> Model:
    """Takes back what `patch` did, in place; a model that was not patched stays as it is."""
    for module in model.modules():
        if _is_ours(module):
            del module.forward
    return model


def _is_ours(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), _OURS)


# --- Norm, MLP ------------------------------------------------------------------------------------------------------


def _norm_forward(backend: Backend) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, backend=backend)

    return forward


class _GateUp(torch.autograd.Function):
    """[x·gateᵀ | x·upᵀ] in one buffer, as the swiglu kernel reads it: both products are written where they belong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ffn = gate.shape[0]
        out = x.new_empty(x.shape[0], 2 * ffn)
        torch.mm(x, gate.t(), out=out[:, :ffn])
        torch.mm(x, up.t(), out=out[:, ffn:])
        ctx.save_for_backward(x, gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, up = ctx.saved_tensors
        dgate, dup = grads[0].chunk(2, dim=-1)
        need_x, need_gate, need_up = ctx.needs_input_grad
        return (
            torch.addmm(torch.mm(dgate, gate), dup, up) if need_x else None,
            torch.mm(dgate.t(), x) if need_gate else None,
            torch.mm(dup.t(), x) if need_up else None,
        )


def _mlp_forward(backend: Backend) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj, self.up_proj
        if all(type(linear) is nn.Linear and linear.bias is None for linear in (gate, up)):
            tensors = (x.reshape(-1, x.shape[-1]), gate.weight, up.weight)
            if (dtype := autocast_dtype(x.device)) is not None:
                tensors = (t.to(dtype) for t in tensors)
            packed: Any = _GateUp.apply(*tensors)
            packed = packed.view(*x.shape[:-1], -1)
        else:  # with a bias, or an adapter around them
            packed = torch.cat((gate(x), up(x)), dim=-1)
        return self.down_proj(swiglu(packed, backend=backend))

    return forward


def _returns_tensor(cls: type) -> bool:
    """Whether a decoder layer of this version gives its hidden states alone; earlier ones give tuples of many forms."""
    return inspect.signature(inspect.unwrap(cls.forward)).return_annotation in (torch.Tensor, "torch.Tensor")  # type: ignore[attr-defined]


def _layer_forward(backend: Backend) -> Callable[..., torch.Tensor]:
    """The layer with the addition of its attention part to the residual stream inside the second norm."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:  # by position, which only the class can name
            return type(self).forward(self, hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        norm = self.post_attention_layernorm
        normed, residual = add_rms_norm(
            attended, hidden_states, norm.weight, eps=norm.variance_epsilon, backend=backend
        )
        return residual + self.mlp(normed)

    return forward


# --- Attention ------------------------------------------------------------------------------------------------------


def _tables(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """RoPE's tables in fp32 whatever the model's dtype: of x, its class's forward takes only the device and dtype."""
    return type(self).forward(self, x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32)), *args, **kwargs)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE of q and k (batch, heads, seq, head_dim) by tables (1 or batch, seq, head_dim), whose halves are equal."""
    batch, _, seq, head_dim = q.shape
    cos, sin = (table[..., : head_dim // 2].reshape(-1, head_dim // 2) for table in (cos, sin))
    if cos.dtype not in (torch.float32, torch.float64):
        cos, sin = cos.float(), sin.float()
    positions = None if cos.shape[0] == seq else torch.arange(batch * seq, device=q.device).view(batch, seq)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, positions=positions, backend=backend)
    return q.transpose(1, 2), k.transpose(1, 2)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    otherwise: Callable[..., Any],
    backend: Backend,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A function of transformers' attention interface: the kernel where it can, `otherwise` where it cannot."""
    queries, keys = query.shape[2], key.shape[2]
    plain = attention_mask is None and not dropout and kwargs.get("position_bias") is None
    # More keys than several queries, without a mask: a static cache of which only the first part counts.
    plain = plain and queries in (1, keys) and MIN_HEAD_DIM <= query.shape[-1] <= MAX_HEAD_DIM
    if not plain or query.dtype == torch.float64 or select_backend(backend, query.device) == "reference":
        return otherwise(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if queries == 1 and not torch.is_grad_enabled():
        lengths = torch.full((q.shape[0],), keys, device=q.device)
        return decode_attention(q[:, 0], k, v, lengths, scale=scaling, backend=backend)[:, None], None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return attention(q, k, v, causal=causal, scale=scaling, backend=backend), None


class _AttentionTable:
    """Stands for transformers' ALL_ATTENTION_FUNCTIONS in a patched layer: "sdpa" is ours."""

    def __init__(self, functions: Any, backend: Backend) -> None:
        self._functions = functions
        self._ours = functools.partial(_attend, otherwise=functions["sdpa"], backend=backend)

    def __getitem__(self, name: str) -> Any:
        return self._ours if name == "sdpa" else self._functions[name]

    def get_interface(self, name: str, default: Any) -> Any:
        return self._ours if name == "sdpa" else self._functions.get_interface(name, default)


def _attention_forward(cls: type, config: Any, backend: Backend) -> Callable[..., Any]:
    """The class's own forward, with RoPE and the table of attention functions replaced in it."""
    # Beneath decorators, which only translate the names that keywords had in older versions.
    source: Any = inspect.unwrap(cls.forward)
    names: dict[str, Any] = {
        "apply_rotary_pos_emb": lambda q, k, cos, sin, *_, **__: _rotate(q, k, cos, sin, backend=backend)
    }
    for name in names:
        if name not in source.__globals__:
            raise ValueError(f"{cls.__name__} of this version of transformers has no {name}; use 4.45 to 5")
    table = source.__globals__.get("ALL_ATTENTION_FUNCTIONS")
    if table is not None:
        names["ALL_ATTENTION_FUNCTIONS"] = _AttentionTable(table, backend)
    forward = types.FunctionType(
        source.__code__, {**source.__globals__, **names}, source.__name__, source.__defaults__, source.__closure__
    )
    forward.__kwdefaults__ = source.__kwdefaults__
    return functools.wraps(cls.forward)(forward)


# --- The whole model ------------------------------------------------------------------------------------------------


def _model_forward(cls: type, backend: Backend) -> Callable[..., Any]:
    original: Any = cls.forward
    signature = inspect.signature(original)
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    @functools.wraps(original)  # its signature is asked for, by generate() and by Trainer
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        given |= given.pop(extra, {}) if extra else {}
        labels = given.get("labels")
        if labels is None:
            return original(self, *args, **kwargs)
        if not self.training or type(self.lm_head) is not nn.Linear or self.lm_head.bias is not None:
            outputs = original(self, **(given | {"labels": None}))
            loss = _loss(given, lambda targets, **how: cross_entropy(_logits(outputs), targets, backend=backend, **how))
            if isinstance(outputs, tuple):
                return (loss, *outputs)
            outputs.loss = loss
            return outputs
        inner = {name: value for name, value in given.items() if name not in (*_HEAD_KEYWORDS, *_LOSS_KEYWORDS)}
        outputs = (
            self.model(**inner, return_dict=True) if "return_dict" in signature.parameters else self.model(**inner)
        )
        hidden = outputs.last_hidden_state
        kept = given.get("logits_to_keep", given.get("num_logits_to_keep", 0))  # the last so many, or their places
        hidden = hidden[:, slice(-kept, None) if isinstance(kept, int) else kept]
        loss = _loss(
            given,
            lambda targets, **how: linear_cross_entropy(hidden, self.lm_head.weight, targets, backend=backend, **how),
        )
        output_class = importlib.import_module("transformers.modeling_outputs").CausalLMOutputWithPast
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        result = output_class(loss=loss, logits=None, **rest)
        as_object = given.get("return_dict")
        if as_object is None:
            as_object = getattr(self.config, "return_dict", True)
        return result if as_object else result.to_tuple()

    return forward


def _logits(outputs: Any) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs.logits


def _loss(given: Mapping[str, Any], compute: Callable[..., torch.Tensor]) -> torch.Tensor:
    """transformers' loss of a causal model: labels are shifted here, unless they come shifted."""
    ignored = given.get("ignore_index", _IGNORED)
    targets = given.get("shift_labels")
    if targets is None:
        targets = nn.functional.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
    count = given.get("num_items_in_batch")
    loss = compute(targets, ignore_index=ignored, reduction="mean" if count is None else "sum")
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)
