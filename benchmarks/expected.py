"""What a row's results should be: the formula in fp64, and beside it what plain PyTorch gives at the row's dtype.

Where a whole row does not fit in fp64, a piece of it that does not depend on the rest is compared: some rows of the
logits, one sequence and one group of heads of attention, the two ends of each parameter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peers.base import Call, leaves_of, same
from peers.torch_optim import HYPERPARAMETERS
from rows import SPEC_OF, Row
from timing import tensors_of

from fuselm.kernels.numerics import UNIT_ROUNDOFF, check_budget, measure

PIECE = 2**27  # elements that are handled at a time in fp64, 1 GiB
END = 4096  # elements compared at each end of a parameter
PEER_FACTOR, PEER_ROUNDINGS = 3.0, 4.0  # a peer's error may be 3 times the plain op's, and 4 roundings more

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """One result of a row.

    Attributes:
        name: "output 0", "gradient of x".
        exact: fp64.
        plain: the plain op's at the row's dtype.
        select: a whole result -> the piece that `exact` and `plain` are.
    """

    name: str
    exact: torch.Tensor
    plain: torch.Tensor
    select: Callable[[torch.Tensor], torch.Tensor] = same


def gradients(outputs: Any, leaves: Mapping[str, torch.Tensor], upstream: Any, **options: Any) -> Results:
    """Gradients of `leaves` by name; `upstream` has one tensor for each output that requires a gradient."""
    found = [o for o in tensors_of(outputs) if o is not None and o.requires_grad]
    return dict(zip(leaves, torch.autograd.grad(found, list(leaves.values()), upstream, **options), strict=True))


def results_of(outputs: list[torch.Tensor], gradient: Mapping[str, torch.Tensor]) -> Results:
    """Outputs and gradients under their names."""
    named = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    return named | {f"gradient of {name}": g for name, g in gradient.items()}


def run_call(call: Call, upstream: list[torch.Tensor]) -> Results:
    """A provider's outputs and gradients in our shapes; of an optimizer the ends of what it stepped."""
    if call.reset is not None:
        call.reset()
    with contextlib.nullcontext() if call.context is None else call.context():
        outputs = tensors_of(call.function())
        if not call.leaves:
            return _optimizer_results(list(call.outputs(outputs)))
        # copies: a backward pass in place may write over the outputs
        kept = [o.detach().clone() for o in call.outputs(outputs)]
        return results_of(kept, call.gradients(gradients(outputs, call.leaves, call.upstream(upstream))))


def _wide(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs in fp64, those that were leaves again leaves."""
    wide = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            wide[name] = value.detach().double().requires_grad_(value.requires_grad)
    return wide


def _plain(function: Callable[..., Any], inputs: dict[str, Any], upstream: list[torch.Tensor]) -> Results:
    outputs = function(**inputs)
    upstream = [u.to(o.dtype) for u, o in zip(upstream, tensors_of(outputs), strict=True)]
    gradient = gradients(outputs, leaves_of(inputs), upstream)
    return results_of(tensors_of(outputs), gradient)


def _paired(
    run: Callable[[dict[str, Any]], Results],
    inputs: dict[str, Any],
    selects: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
) -> list[Expected]:
    exact, plain = run(_wide(inputs)), run(inputs)
    return [Expected(name, exact[name], plain[name], selects.get(name, same)) for name in exact]


def _elementwise(row: Row, inputs: dict[str, Any], upstream: list[torch.Tensor]) -> list[Expected]:
    """rms_norm, add_rms_norm, swiglu, rope: whole, or where nothing is shared between rows some of them."""
    function = SPEC_OF[row.op].plain
    largest = max(t.numel() for t in inputs.values() if isinstance(t, torch.Tensor))
    if largest <= 2 * PIECE or row.op != "swiglu":
        return _paired(lambda given: _plain(function, given, upstream), inputs, {})
    step = -(-largest // PIECE)
    piece = {"gate_up": inputs["gate_up"].detach()[::step].clone().requires_grad_()}
    names = ("output 0", "gradient of gate_up")
    some = [u[::step] for u in upstream]
    return _paired(
        lambda given: _plain(function, given, some), piece, dict.fromkeys(names, lambda tensor: tensor[::step])
    )


def _cross_entropy(row: Row, inputs: dict[str, Any], upstream: list[torch.Tensor]) -> list[Expected]:
    """The loss of all rows; the gradient of every n-th, which depends on the others by their number alone."""
    function, targets = SPEC_OF[row.op].plain, inputs["targets"]
    rows, vocab = inputs["logits"].shape
    step = -(-rows * vocab // PIECE)
    valid = int((targets != -100).sum())

    def run(logits: torch.Tensor, wide: torch.dtype) -> Results:
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for part, chosen in zip(logits.detach().chunk(step), targets.chunk(step), strict=True):
            total += function(part.to(wide), chosen, reduction="sum")
        leaf = logits.detach()[::step].to(wide).requires_grad_()
        loss = function(leaf, targets[::step], reduction="sum") / max(valid, 1)
        (gradient,) = torch.autograd.grad(loss, leaf, upstream[0].to(loss.dtype))
        return results_of([total / max(valid, 1)], {"logits": gradient})

    exact, plain = (run(inputs["logits"], wide) for wide in (torch.float64, inputs["logits"].dtype))
    select = {"gradient of logits": lambda tensor: tensor[::step]}
    return [Expected(name, exact[name], plain[name], select.get(name, same)) for name in exact]


def _linear_cross_entropy(row: Row, inputs: dict[str, Any], upstream: list[torch.Tensor]) -> list[Expected]:
    """Everything, in chunks of rows, the gradient of the weight summed over them in fp64."""
    function, targets, rows = SPEC_OF[row.op].plain, inputs["targets"], inputs["x"].shape[0]
    valid = max(int((targets != -100).sum()), 1)
    chunks = min(rows, -(-rows * inputs["weight"].shape[0] // PIECE))

    def run(given: dict[str, Any]) -> Results:
        total = torch.zeros((), dtype=torch.float64, device=targets.device)
        weight = given["weight"]
        dw, dx = torch.zeros_like(weight, dtype=torch.float64), []
        for x, chosen in zip(given["x"].detach().chunk(chunks), targets.chunk(chunks), strict=True):
            leaf = x.clone().requires_grad_()
            loss = function(leaf, weight, chosen, reduction="sum") / valid
            grads = torch.autograd.grad(loss, [leaf, weight], upstream[0].to(loss.dtype))
            total += loss.detach()
            dx.append(grads[0])
            dw += grads[1]
        return results_of([total], {"x": torch.cat(dx), "weight": dw.to(weight.dtype)})

    return _paired(run, inputs, {})


def _attention(row: Row, inputs: dict[str, Any], upstream: list[torch.Tensor]) -> list[Expected]:
    """The last sequence's (or all documents') last key head and the query heads that share it, one after another."""
    options = {name: value for name, value in inputs.items() if name not in ("q", "k", "v")}
    function = partial(SPEC_OF[row.op].plain, **options)
    heads, kv_heads = inputs["q"].shape[-2], inputs["k"].shape[-2]
    group = range(heads - heads // kv_heads, heads)
    piece = slice(None) if "cu_seqlens_q" in inputs else slice(-1, None)  # packed tensors have no batch dimension

    def run(given: dict[str, Any]) -> Results:
        outs, dqs, dk, dv = [], [], 0.0, 0.0
        k, v = (given[name].detach()[piece][..., -1:, :].clone().requires_grad_() for name in "kv")
        for head in group:
            q = given["q"].detach()[piece][..., head : head + 1, :].clone().requires_grad_()
            out = function(q, k, v)
            gradient = upstream[0][piece][..., head : head + 1, :].to(out.dtype)
            dq, this_dk, this_dv = torch.autograd.grad(out, [q, k, v], gradient)
            outs.append(out.detach())
            dqs.append(dq)
            dk, dv = dk + this_dk.double(), dv + this_dv.double()
        named = {"q": torch.cat(dqs, -2), "k": torch.as_tensor(dk).to(k.dtype), "v": torch.as_tensor(dv).to(v.dtype)}
        return results_of([torch.cat(outs, -2)], named)

    def queries(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[piece][..., group.start :, :]

    def keys(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[piece][..., -1:, :]

    selects = {"output 0": queries, "gradient of q": queries, "gradient of k": keys, "gradient of v": keys}
    return _paired(run, inputs, selects)


def _ends(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The first and the last elements of each tensor, copied into one."""
    parts = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        parts += [flat[:END], flat[max(END, flat.numel() - END) :]]
    return torch.cat(parts)


def _optimizer_results(outputs: list[torch.Tensor]) -> Results:
    count = len(outputs) // 3
    names = ("parameters", "first moments", "second moments")
    return {name: _ends(outputs[i * count : (i + 1) * count]) for i, name in enumerate(names)}


def _adamw(row: Row, inputs: dict[str, Any], upstream: list[torch.Tensor]) -> list[Expected]:
    """The first step from here with empty moments, by torch.optim.AdamW, in fp64 and at the row's dtypes."""
    params, limit = inputs["params"], inputs["max_grad_norm"]
    norm = math.sqrt(sum(torch.linalg.vector_norm(p.grad, dtype=torch.float64).item() ** 2 for p in params))
    scale = min(1.0, limit / (norm + 1e-6))
    values, grads = _ends(params), _ends([p.grad for p in params])

    def run(wide: torch.dtype) -> Results:
        param = torch.nn.Parameter(values.to(wide))
        param.grad = grads.to(wide) * scale
        optimizer = torch.optim.AdamW([param], **HYPERPARAMETERS, foreach=False)
        optimizer.step()
        state = optimizer.state[param]
        return {
            "parameters": param.detach(),
            "first moments": state["exp_avg"],
            "second moments": state["exp_avg_sq"],
        }

    exact, plain = run(torch.float64), run(torch.bfloat16 if inputs["mode"] == "bf16" else torch.float32)
    plain["parameters"] = plain["parameters"].to(values.dtype)
    return [Expected(name, exact[name], plain[name]) for name in exact]


_OF = {
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "attention": _attention,
    "adamw": _adamw,
}


def expect(row: Row, inputs: dict[str, Any], upstream: list[torch.Tensor]) -> list[Expected]:
    """What the row's outputs and gradients should be, for `upstream` gradients of the outputs.

    Of "adamw" it holds for the next call alone: a step changes the parameters, and some clip in place.
    """
    return _OF.get(row.op, _elementwise)(row, inputs, upstream)


def check_ours(results: Results, expected: list[Expected], dtype: torch.dtype) -> None:
    """Asserts that every result is within the project's error budget (kernels/numerics.py)."""
    for e in expected:
        of = dtype if e.name.startswith(("output", "gradient")) else results[e.name].dtype  # an optimizer has several
        check_budget(e.select(results[e.name]), e.exact, e.plain, name=e.name, dtype=of)


def check_peer(results: Results, expected: list[Expected], dtype: torch.dtype) -> None:
    """Asserts that every result is what was asked for, with room for a peer's own rounding; by the error's norm."""
    for e in expected:
        actual = e.select(results[e.name])
        error, plain = measure(actual, e.exact).norm, measure(e.plain, e.exact).norm
        limit = PEER_FACTOR * plain + PEER_ROUNDINGS * UNIT_ROUNDOFF[dtype]
        if not error <= limit:
            raise AssertionError(f"{e.name}: relative error {error:.2e}, plain PyTorch's {plain:.2e}")
