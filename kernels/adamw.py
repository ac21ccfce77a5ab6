"""AdamW with global-norm clipping (Loshchilov and Hutter 2019, arXiv:1711.05101; Pascanu et al. 2013, arXiv:1211.5063).

With n the norm over all gradients of all groups and processes, c = min(1, max_grad_norm / (n + 1e-6)), and t the step:

    g ← c · g
    m ← β1 · m + (1 - β1) · g              v ← β2 · v + (1 - β2) · g²
    p ← p - lr · λ · p - lr / (1 - β1^t) · m / (√v / √(1 - β2^t) + ε)

which is torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW in one. Gradients are read, never written. If n is not
finite, nothing of this happens: parameters, moments and step counters stay as they are, on every process, and
`skipped_steps` goes up. So it is at a `veto`.

Bytes that must move, everything in fp32: p, g, m, v in, p, m, v out, 28 a parameter, and 4 to read g for the norm. bf16
parameters and gradients with fp32 moments and master: 28 (g 2, m, v, master 4 in; p 2, m, v, master 4 out) and 2.
Everything in bf16: 14 and 2.

How far each mode strays
------------------------
from the exact p_t, given the same gradients. With û_t the update's last factor, u = 2^-24 and μ the roundoff of the
stored moments (2^-24; bf16 2^-8, rounded stochastically 2^-7), one step's roundings, carried on, are at most

    m: (μ + 3u) Σ_k β1^k |m_{t-k}|, relative to √v̂ after the bias correction (μ + 3u) A_t
    v: (μ + 3u) Σ_k β2^k v_{t-k} / v_t = (μ + 3u) B_t =: ρ_t, relative; so 1/√v is off by σ_t = 1/√(1 - ρ_t) - 1
    û: δ_t = (μ + 3u) A_t (1 + σ_t) + |û_t| (σ_t + 10u)
    p: D_t = Σ_{s<=t} lr_s δ_s + 3u |p_s|, for what is stepped in fp32: the parameter, or its master copy

A_t <= 15 and B_t about 1 / (1 - β2) = 20 for (0.9, 0.95) while gradients keep their size (|m_s| <= 1.17 √v_s by Cauchy
and Schwarz). So:

- all fp32, or with a master copy: D_t, after 2,000 steps at 1e-3 not above 4e-4 |p| + 2e-5. The parameter is the master
  copy rounded, within 2^-8 |p|.
- bf16 moments: the same with μ = 2^-8: about a tenth of the way that p travels at most. Where nearest rounding is used
  v stops following g² once a step's change, (1 - β2) |g² - v|, is below 2^-9 v: β2 must be well below 1 - 2^-8 (0.996),
  and a larger one draws a warning.
- bf16 parameters rounded stochastically: D_t and a sum of t errors of mean 0, none larger than 2^-7 |p|: at most
  2^-7 |p| √(t ln(2/q) / 2) with probability 1 - q (Hoeffding, Azuma), and √n times less for the mean of n parameters.
- bf16 parameters rounded to nearest have no bound: updates below 2^-9 |p| are lost, all of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

import torch

from fuselm.kernels._triton import Backend, compute_dtype, select_backend
from fuselm.kernels.adamw_reference import reference_step
from fuselm.kernels.adamw_sharding import NormReduction, is_dtensor, like, local, peek_gradient
from fuselm.kernels.adamw_slots import Slot, check_copies, misfit
from fuselm.kernels.adamw_step import KERNEL_DTYPES, TritonStep
from fuselm.kernels.adamw_tables import Entry, Hyper
from fuselm.kernels.adamw_veto import Veto

_STATE_DTYPES = (torch.float32, torch.bfloat16)
_F = TypeVar("_F", bound=Callable[..., Any])
_OWN_ATTRIBUTES = (
    "max_grad_norm",
    "master_weights",
    "stochastic_rounding",
    "copies",
    "state_dtype",
    "backend",
    "grad_norm",
    "skipped_steps",
)


def _check_number(name: str, value: Any, *, below: float = math.inf) -> None:
    if not isinstance(value, (int, float)) or not 0.0 <= value < below:
        allowed = "a finite number >= 0" if below == math.inf else f"a number in [0, {below:g})"
        raise ValueError(f"{name}={value!r}: expected {allowed}")


def _check_group(group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr has shape {tuple(lr.shape)}: expected a float or a tensor of one element")
        if lr.device.type == "cpu":
            _check_number("lr", lr.item())
    else:
        _check_number("lr", lr)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: expected two numbers")
    for i, beta in enumerate(betas):
        _check_number(f"betas[{i}]", beta, below=1.0)
    _check_number("eps", group["eps"])
    _check_number("weight_decay", group["weight_decay"])
    seed = group.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: expected an integer in [0, 2^63)")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"{name}={group[name]!r}: not supported")


def _never_traced(function: _F) -> _F:
    return cast(Any, torch.compiler.disable(function))


class _Held:
    """Carries a tensor through Optimizer.load_state_dict, which would cast moments and master to the parameter's
    dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class AdamW(torch.optim.Optimizer):
    """AdamW as in torch, with the global gradient norm, its clipping and the check for non-finite gradients built in.

    On CUDA a step is three launches (one more for each further combination of dtypes), whatever the number of
    parameters and groups, and never waits for the device: it can be captured in a CUDA graph (after an eager step; a
    float lr is then fixed, a tensor lr is read). Once tables exist, the host only looks whether tensors lie where they
    lay. The state (`step`, `exp_avg`, `exp_avg_sq`) loads into torch.optim.AdamW and back. With DTensor parameters
    (FSDP2, tensor parallel) every process updates its shards, and the norm costs one small all-reduce a sharded mesh
    dimension (FSDP2 alone: of one number); all processes must call step() together. The results have the same bits in
    every run.

    Args:
        params: parameters (fp32, bf16, fp16; fp64 runs the reference), or groups as dictionaries, on one device.
        lr: float or one-element tensor. Changing group["lr"] recompiles nothing and waits for nothing.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator after the bias correction.
        weight_decay: decoupled.
        max_grad_norm: gradients count as if scaled to at most this global norm; None: no clipping.
        master_weights: keep an fp32 copy of every bf16 or fp16 parameter in state["master"], step that, and round it
            to the parameter. Without it a 16-bit parameter loses updates smaller than half its last bit. Write to
            such a parameter from outside before the first step, or drop its state.
        stochastic_rounding: round bf16 parameters and bf16 moments up or down at random, with the probabilities that
            keep the expected value: no update is lost on average, without a master copy. fp32 parameters among them
            are stepped as ever. The random bits are a function of (seed, step, parameter, element), whatever the
            sharding (DTensors cut in their first and one other dimension), so that a run can be repeated and resumed
            bit by bit.
        seed: of those bits, 0 to 2^63 - 1; kept in the groups, and so in state_dict(). Ranks must agree on it.
        state_dtype: of the moments, fp32 or bf16; None: fp32 (fp64 for fp64 parameters).
        copies: fp32 parameter -> the bf16 or fp16 copy that the model computes with. A step takes the copy's gradient
            (the parameter's own where the copy has none) and writes both: master_weights seen from the other side, for
            a model whose state dict holds the fp32 parameters.
        backend: "auto", "triton" or "reference".

    Attributes:
        grad_norm: () fp32 on the parameters' device: the norm that the last step saw, before clipping, over all
            groups and processes. Each step makes a new tensor; 0 before the first.
        skipped_steps: () int64 on the parameters' device: steps not taken: the norm was not finite, or a veto.
        max_grad_norm: may be changed between steps.
        veto: None, or a function that decides on each step once its norm is known, set at any time. Every step calls
            it once, after the norm's all-reduce, with the norm before clipping: a new () fp64 tensor on the parameters'
            device, NaN where a rank's gradient is not finite. It returns a () bool tensor on that device, on every rank
            the same: True, and the step changes nothing but skipped_steps; grad_norm says the norm all the same. The
            host waits for none of it; a captured graph contains what it does. Pickles and deep copies go
            without. It costs two launches, one where parameters are sharded.

    Raises:
        ValueError: an argument out of range (it is named), a parameter given twice, parameters on several devices,
            stochastic rounding with master weights, fp16 parameters, or nothing in bf16.
        TypeError: a parameter that is not real floating point, or fp64 with backend="triton".
    """

    grad_norm: torch.Tensor
    skipped_steps: torch.Tensor
    veto: Veto | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        state_dtype: torch.dtype | None = None,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
        backend: Backend = "auto",
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, get_args(Backend)))}")
        if state_dtype is not None and state_dtype not in _STATE_DTYPES:
            raise ValueError(f"state_dtype={state_dtype}: expected torch.float32, torch.bfloat16 or None")
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.state_dtype = state_dtype
        self.backend: Backend = backend
        self.stochastic_rounding = stochastic_rounding
        if master_weights and stochastic_rounding:
            raise ValueError(
                "master_weights=True, stochastic_rounding=True: a master copy makes stochastic rounding needless; "
                "choose one"
            )
        self.copies = dict(copies or {})
        self._check_max_grad_norm()
        self._loading = False
        self._forget()
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "seed": seed} if stochastic_rounding else defaults)
        dtypes = {p.dtype for p in self._params()}
        if stochastic_rounding and torch.bfloat16 not in {*dtypes, state_dtype}:
            raise ValueError(
                f"stochastic_rounding=True: rounds to bfloat16, but parameters are {', '.join(map(str, dtypes))} and "
                "moments float32; leave it out, or make either bfloat16"
            )
        slowest = max(float(group["betas"][1]) for group in self.param_groups)
        if state_dtype == torch.bfloat16 and not stochastic_rounding and slowest > 1.0 - 2.0**-8:
            warnings.warn(
                f"betas[1]={slowest:g} with state_dtype=torch.bfloat16: the second moment stalls; keep it below "
                "0.996, or use stochastic_rounding=True or fp32 moments",
                stacklevel=2,
            )
        device = self._params()[0].device
        check_copies(self.copies, self._params())
        if backend == "triton":
            select_backend(backend, device)  # says at once if it cannot run
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)

    def _forget(self) -> None:
        self._triton = TritonStep()
        self._reduction: NormReduction | None = None
        self._slots: list[Slot] | None = None

    def _check_max_grad_norm(self) -> float:
        limit = self.max_grad_norm
        if limit is None:
            return math.inf
        if not isinstance(limit, (int, float)) or not limit > 0.0:
            raise ValueError(f"max_grad_norm={limit!r}: expected a number > 0, or None")
        return float(limit)

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; see torch.optim.Optimizer.add_param_group. Options not given are the optimizer's own."""
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            self._check_params(self.param_groups[-1]["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._slots = None

    def _check_params(self, params: Sequence[torch.Tensor]) -> None:
        if len(set(params)) != len(params):
            raise ValueError("params: the same parameter appears twice in a group")
        first = self._params()[0] if self._params() else None
        for p in params:
            if not p.is_floating_point() or p.layout != torch.strided:
                raise TypeError(f"params: a {p.dtype} {p.layout} tensor of shape {tuple(p.shape)} cannot be optimized")
            if self.stochastic_rounding and p.dtype == torch.float16:
                raise ValueError(
                    "stochastic_rounding=True: takes bfloat16 and float32 parameters, one is float16; use "
                    "master_weights=True"
                )
            if self.backend == "triton" and p.dtype not in KERNEL_DTYPES:
                raise TypeError(f"params: backend='triton' takes fp32, bf16 and fp16 parameters, one is {p.dtype}")
            if first is not None and p.device != first.device:
                raise ValueError(f"params: expected one device, got {first.device} and {p.device}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; the gradients of `copies` go too, or a step that is left out would add to the next."""
        super().zero_grad(set_to_none)
        for copy in self.copies.values():
            copy.grad = None

    @_never_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over every parameter that has a gradient. A compiled function that calls it breaks its graph there:
        the launches are few already, and a traced learning rate would be a constant to compile for.

        Args:
            closure: computes the loss with gradients; called first.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient; state to be initialised, or sizes that changed, under graph capture.
            ValueError: a partial DTensor gradient; state that does not fit its parameter; what a veto returned.
            TypeError: what a veto returned is no bool tensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        device = self._params()[0].device
        limit = self._check_max_grad_norm()
        if self._slots is None or self._reduction is None:
            self._reduction, self._slots = self._make_slots(device)
        if self.skipped_steps.device != device:  # made on the meta device, materialised since
            self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.grad_norm = torch.empty((), dtype=torch.float32, device=device)
        entries, grads = self._gather(self._slots)
        backend = select_backend(self.backend, device)
        if backend == "triton" and not (
            {g.dtype for g in grads} <= KERNEL_DTYPES and all([e.dtypes <= KERNEL_DTYPES for e in entries])
        ):
            backend = "reference"
        run = self._triton.run if backend == "triton" else reference_step
        run(
            entries,
            grads,
            [_hyper(group, device) for group in self.param_groups],
            num_classes=self._reduction.num_classes,
            all_reduce=self._reduction.all_reduce if self._reduction.groups else None,
            veto=self.veto,
            max_grad_norm=limit,
            grad_norm=self.grad_norm,
            skipped_steps=self.skipped_steps,
            stochastic=self.stochastic_rounding,
        )

    def _make_slots(self, device: torch.device) -> tuple[NormReduction, list[Slot]]:
        reduction = NormReduction(self._params(), device)
        classes = iter(reduction.classes)
        groups = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"]]
        placed = self.stochastic_rounding
        copies = self.copies
        return reduction, [
            Slot(p, group, next(classes), n, placed, copies.get(p)) for n, (p, group) in enumerate(groups)
        ]

    def _gather(self, slots: list[Slot]) -> tuple[list[Entry], list[torch.Tensor]]:
        """What has a gradient, and the gradients. Runs in every step for every parameter: entries are kept."""
        entries, grads = [], []
        device = self.grad_norm.device
        for slot in slots:
            param = slot.param
            copy = slot.copy
            grad = param.grad if copy is None or copy.grad is None else copy.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError("AdamW does not support sparse gradients")
            state = self.state[param]
            entry = slot.entry
            if entry is None or not slot.is_bound_to(state):
                self._initialize(param, local(param), state)
                entry = slot.bind(state)
            if slot.sharded:
                grad = peek_gradient(param, grad)
            # torch compares shapes where a gradient is set; the kernels must not read past what was swapped in since.
            if grad.numel() != entry.numel or grad.device != device:
                raise ValueError(misfit("gradient", grad, entry.param))
            entries.append(entry)
            grads.append(grad)
        return entries, grads

    def _initialize(self, param: torch.Tensor, part: torch.Tensor, state: dict[str, Any]) -> None:
        """Adds what is missing of a parameter's state."""
        wants_master = self._wants_master(param)
        if "step" in state and "exp_avg" in state and "exp_avg_sq" in state and wants_master == ("master" in state):
            return
        if part.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("optimizer state must exist before a CUDA graph is captured: run an eager step first")
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        dtype = self._moment_dtype(param)
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = like(param, torch.zeros_like(part, dtype=dtype))
        if wants_master:
            state["master"] = like(param, part.to(torch.float32, copy=True))
        else:
            state.pop("master", None)

    def _wants_master(self, param: torch.Tensor) -> bool:
        return self.master_weights and param.dtype.itemsize < 4

    def _moment_dtype(self, param: torch.Tensor) -> torch.dtype:
        return self.state_dtype or compute_dtype(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads state_dict() of this class or of torch.optim.AdamW.

        Moments take this optimizer's dtype, steps may differ between parameters, and tensors that exist are written in
        place (captured graphs stay valid); nothing is shared with `state_dict`. A master copy that is missing is made
        from the parameter at the next step.

        Raises:
            ValueError: other groups, sizes or placements than this optimizer has, or an option that it lacks (amsgrad).
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = cast("dict[str, Any] | None", hook(self, state_dict))
            state_dict = state_dict if result is None else result
        held = {
            key: {n: _Held(v) if isinstance(v, torch.Tensor) else v for n, v in value.items()}
            if isinstance(value, Mapping)
            else value
            for key, value in state_dict["state"].items()
        }
        for group in state_dict["param_groups"]:
            _check_group({**self.defaults, **group})
        hooks, self._optimizer_load_state_dict_pre_hooks = (
            self._optimizer_load_state_dict_pre_hooks,
            type(self._optimizer_load_state_dict_pre_hooks)(),
        )  # they have run
        self._loading = True
        try:
            super().load_state_dict({**state_dict, "state": held})
        finally:
            self._loading = False
            self._optimizer_load_state_dict_pre_hooks = hooks

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN_ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self.__dict__.get("_loading"):
            state["state"] = self._adopt(state["state"])
            for group in state["param_groups"]:
                for name, value in self.defaults.items():
                    group.setdefault(name, value)
        else:
            state = {"stochastic_rounding": False, "copies": {}, **state}
            self._loading = False
            self._forget()
        super().__setstate__(state)

    def _adopt(self, loaded: dict[Any, Any]) -> dict[Any, Any]:
        """The new self.state from one whose tensors are held; checks everything before it writes anything."""
        for param, values in loaded.items():
            for name, value in values.items() if isinstance(param, torch.Tensor) else ():
                if not isinstance(value, _Held) or name == "step":
                    continue
                tensor = value.tensor
                if tensor.shape != param.shape:
                    raise ValueError(
                        f"state[{name!r}] has shape {tuple(tensor.shape)}, its parameter {tuple(param.shape)}"
                    )
                if is_dtensor(tensor) != is_dtensor(param):
                    raise ValueError(f"state[{name!r}] and its parameter must both be DTensors, or neither")
        with torch.no_grad():
            for param, values in loaded.items():
                if isinstance(param, torch.Tensor):
                    self._adopt_one(param, values)
        return loaded

    def _adopt_one(self, param: torch.Tensor, values: dict[str, Any]) -> None:
        present = self.state.get(param, {})
        if not self._wants_master(param):
            values.pop("master", None)
        part = local(param)

        def target(name: str, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
            """The present tensor if it fits, otherwise a new one."""
            tensor = present.get(name)
            if isinstance(tensor, torch.Tensor) and local(tensor).shape == shape and tensor.dtype == dtype:
                return tensor
            if name == "step":
                return torch.empty((), dtype=dtype, device=part.device)
            return like(param, torch.empty_like(part, dtype=dtype))

        for name, value in list(values.items()):
            if name == "step":
                step = value.tensor if isinstance(value, _Held) else torch.tensor(float(value))
                values[name] = target(name, torch.float32, torch.Size(())).copy_(step.reshape(()))
            elif isinstance(value, _Held):
                source: Any = value.tensor
                if is_dtensor(param):
                    p: Any = param
                    if source.placements != p.placements:
                        source = source.redistribute(p.device_mesh, p.placements)
                    source = local(source)
                dtype = torch.float32 if name == "master" else self._moment_dtype(param)
                values[name] = target(name, dtype, part.shape)
                local(values[name]).copy_(source)


def _hyper(group: Mapping[str, Any], device: torch.device) -> Hyper:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor):
        if lr.device.type == "cpu" and device.type != "cpu":
            lr = lr.item()  # on the host already: nobody waits
        elif lr.device != device:
            raise ValueError(f"lr is on {lr.device}: expected {device}, the CPU, or a float")
        elif lr.dtype not in (torch.float32, torch.float64):
            lr = lr.float()
    beta1, beta2 = group["betas"]
    return Hyper(
        lr.detach().reshape(()) if isinstance(lr, torch.Tensor) else float(lr),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        int(group.get("seed", 0)),
    )
