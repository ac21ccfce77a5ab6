"""Runs groups of cases through the Hopper attention kernels on a GPU; one line of JSON before and after each case.

A process of its own, because a kernel that waits for a barrier in vain never returns: test_attention_hopper.py watches
the lines and ends a process that stays silent.

    python attention_hopper_worker.py forward 128
    python attention_hopper_worker.py backward 64 launch    # only the cases that have a key "launch"
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from fuselm.kernels.attention import dispatch, hopper_backward, hopper_forward
from fuselm.kernels.attention.api import attention, prefer_hopper
from fuselm.kernels.numerics import measure, slack
from fuselm.kernels.specs.attention import plain_attention

_spec = importlib.util.spec_from_file_location("attention_oracle", Path(__file__).parent / "test_attention.py")
assert _spec is not None and _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

DEVICE = torch.device("cuda")
GROUPS = ("forward", "backward")


def cases(head_dim: int) -> list[dict]:
    """The cheap and simple first, so that a hang or a wrong tile shows where it is easiest to understand."""
    lengths = (64, 128, 1, 2, 63, 65, 127, 129, 191, 192, 193, 255, 257, 385, 1023, 1024, 1025)
    plain = [{"lengths": (n, n), "causal": True} for n in lengths]
    full = [{"lengths": (n, n), "causal": False} for n in lengths[::2]]
    uneven = [
        {"lengths": pair, "causal": causal}
        for pair in ((5, 2), (2, 5), (1, 257), (300, 70), (70, 300), (129, 1024))
        for causal in (True, False)
    ]
    heads = [{"lengths": (n, n), "heads": pair, "batch": 2} for n in (130, 520) for pair in ((4, 4), (4, 1), (8, 1))]
    many = [
        {"lengths": (300, 300), "heads": (16, 4), "batch": 5},
        {"lengths": (640, 640), "heads": (12, 12), "batch": 3},
    ]
    window = [
        {"lengths": pair, "window": w}
        for pair in ((128, 128), (300, 300), (1025, 1025), (70, 300), (300, 70))
        for w in (1, 33, 128, 400)
    ]
    documents = [
        {"lengths": (q[-1] + tail, k[-1] + tail), "documents_q": q, "documents_k": k} | option
        for q, k, tail in (
            ((0, 64), (0, 64), 0),
            ((0, 100, 250), (0, 100, 250), 0),
            ((0, 150, 150, 300), (0, 100, 200, 300), 30),
            ((0, 0, 17, 18, 18, 530), (0, 5, 5, 40, 41, 300), 7),
            ((0, 1, 129, 385, 386, 1025), (0, 1, 129, 385, 386, 1025), 100),
        )
        for option in ({}, {"causal": False}, {"window": 40})
    ]
    extreme = [
        {"lengths": (300, 300), "factor": 30.0},
        {"lengths": (300, 300), "factor": 30.0, "causal": False},
        {"lengths": (257, 257), "scale": 1.0, "factor": 50.0},
        {"lengths": (200, 200), "dtype": "float16"},
    ]
    long = [  # head_dim 64 has three consumers here
        {"lengths": (2100, 2100)},
        {"lengths": (200, 2305), "causal": False},
        {"lengths": (2100, 2100), "window": 500},
        {"lengths": (2300, 2300), "documents_q": (0, 700, 701, 2250), "documents_k": (0, 700, 701, 2250)},
    ]
    sections = [  # one group of heads at a time, so that there are many sections
        {"lengths": (900, 900), "heads": pair, "batch": 3, "launch": {"section_bytes": 1}}
        for pair in ((8, 4), (6, 6), (6, 1))
    ]
    borders = (0, 1, 129, 386, 1025)
    rolling = [  # from tile to tile without a pause: few blocks a tile, more tiles than programs
        {"lengths": (130, 130), "heads": (16, 16), "batch": 20},
        {"lengths": (300, 300), "heads": (16, 4), "batch": 20},
        {"lengths": (640, 640), "heads": (12, 12), "batch": 9},
        {"lengths": (300, 1100), "heads": (8, 8), "batch": 10},
        {"lengths": (1100, 300), "heads": (16, 2), "batch": 20},
        {"lengths": (1025, 1025), "heads": (8, 8), "batch": 4, "window": 130},
        {"lengths": (1025, 1025), "heads": (8, 4), "batch": 7, "causal": False},
        {"lengths": (2100, 2100), "heads": (12, 4), "documents_q": borders, "documents_k": borders},
        {
            "lengths": (1225, 1125),
            "heads": (32, 32),
            "documents_q": (0, 5, 5, 900, 901),
            "documents_k": borders[:5],
        },
        # tiles of keys that no query sees, between others, more than programs
        {"lengths": (70, 1100), "heads": (16, 16), "batch": 10, "window": 33},
    ]
    backward = [  # also one group of heads at a time, and short tiles at the end
        {"only": "backward", "launch": launch, **case}
        for launch in ({}, {"section_bytes": 1}, {"held": 0}, {"section_bytes": 1, "held": 4})
        for case in rolling
    ]
    causal = [
        {"lengths": (300, 300)},
        {"lengths": (1025, 1025), "ramp": 40.0},
        {"lengths": (2100, 2100), "batch": 5},
        {"lengths": (300, 1225), "factor": 30.0},
        {"lengths": (1025, 1025), "below": True},  # no score near 0, where the forward kernel's maxima begin
    ]
    masks = [
        {"lengths": (1025, 1025), "window": 400},
        {"lengths": (1025, 1025), "window": 400, "below": True, "factor": 4.0, "ramp": 3.0},
        {"lengths": (1025, 1025), "causal": False, "factor": 30.0},
        {"lengths": (2100, 2100), "dtype": "float16", "ramp": 20.0},
        {"lengths": (300, 1225), "documents_q": (0, 5, 5, 130, 280), "documents_k": (0, 0, 400, 400, 1200)},
    ]
    everything = (*causal, *masks, *plain, *full, *uneven, *window, *documents, *extreme)
    forward_launches = [  # numbers of consumers that the length alone would not give; more tiles than programs
        {"only": "forward", "launch": {"consumers": consumers}, **shape}
        for consumers, shapes in (
            ((2, (*causal, *masks)), (3, everything)) if head_dim == 64 else ((2, everything[:10]),)
        )
        for shape in shapes
    ]
    ordered = [  # tiles of keys that add to dQ in order: many at a time, more than run at once, and few
        {"only": "backward", "deterministic": True, "runs": runs, **shape}
        for runs, shape in (
            (2, {"lengths": (64, 64)}),
            (2, {"lengths": (385, 385)}),
            (10, {"lengths": (1025, 1025), "heads": (8, 2), "batch": 2}),
            (2, {"lengths": (300, 70)}),
            (2, {"lengths": (70, 300), "causal": False}),
            (10, {"lengths": (1025, 1025), "window": 400}),
            (
                10,
                {"lengths": (530, 300), "documents_q": (0, 0, 17, 18, 18, 530), "documents_k": (0, 5, 5, 40, 41, 300)},
            ),
            (10, {"lengths": (2100, 2100), "heads": (4, 1), "batch": 10}),
            (2, {"lengths": (1, 1)}),
            (2, {"lengths": (5, 2), "causal": False}),
            (2, {"lengths": (520, 520), "heads": (8, 1), "batch": 2, "dtype": "float16"}),
            (2, {"lengths": (300, 300), "factor": 30.0}),
        )
    ]
    listed = (
        plain
        + full
        + uneven
        + heads
        + many
        + window
        + documents
        + extreme
        + long
        + sections
        + forward_launches
        + backward
        + ordered
    )
    return [{"head_dim": head_dim, "heads": (4, 2), **case} for case in listed]


def poisoned_views(case: dict, dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """q, k and v as views of one buffer whose other elements are NaN: rows and heads that the kernels must not use."""
    (queries, keys), (heads, kv_heads), head_dim = case["lengths"], case["heads"], case["head_dim"]
    lead = () if "documents_q" in case else (case.get("batch", 1),)
    buffer = torch.full(
        (*lead, max(queries, keys) + 3, heads + 2 * kv_heads + 2, head_dim), float("nan"), device=DEVICE
    )
    buffer = buffer.to(dtype)
    q = buffer.narrow(-3, 1, queries).narrow(-2, 1, heads)
    k = buffer.narrow(-3, 1, keys).narrow(-2, 1 + heads, kv_heads)
    v = buffer.narrow(-3, 1, keys).narrow(-2, 1 + heads + kv_heads, kv_heads)
    for x, factor in ((q, case.get("factor", 1.0)), (k, 1.0), (v, 1.0)):
        x.copy_(torch.randn(x.shape, generator=generator, device=DEVICE) * factor)
    if case.get("below"):
        q.abs_()
        k.abs_().neg_()
    # The kernel meets the last keys first: maxima that grow with every block.
    k.mul_(torch.linspace(case.get("ramp", 1.0), 1.0, keys, device=DEVICE).view(-1, 1, 1).to(dtype))
    return {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}


@contextlib.contextmanager
def poisoned_memory():
    """torch.empty hands out NaN, so that an element which no kernel writes shows."""
    kept = torch.empty, torch.empty_like

    def wrapped(function: Any) -> Any:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = function(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return poisoned

    torch.empty, torch.empty_like = map(wrapped, kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept


@contextlib.contextmanager
def counted_calls():
    """Counts the calls of the Hopper functions, so that a case cannot pass by running another kernel."""
    counts = [0, 0]
    kept = dispatch.KERNELS["hopper"]

    def counting(index: int) -> Any:
        def call(*args: Any) -> Any:
            counts[index] += 1
            return kept[index](*args)

        return call

    dispatch.KERNELS["hopper"] = (counting(0), counting(1))
    try:
        yield counts
    finally:
        dispatch.KERNELS["hopper"] = kept


@contextlib.contextmanager
def replaced_launches(**fields: Any):
    """The launches with other values of the fields that they have of these."""
    functions = {hopper_forward: "hopper_forward_launch", hopper_backward: "hopper_backward_launch"}
    kept = {module: getattr(module, name) for module, name in functions.items()}

    def changed(function: Any) -> Any:
        def call(*args: Any) -> Any:
            launch = function(*args)
            return dataclasses.replace(launch, **{n: value for n, value in fields.items() if hasattr(launch, n)})

        return call

    for module, name in functions.items():
        setattr(module, name, changed(kept[module]))
    try:
        yield
    finally:
        for module, name in functions.items():
            setattr(module, name, kept[module])


def run_case(case: dict, backward: bool) -> list[str]:
    """What is wrong with the kernels' results, an empty list where nothing is."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    inputs: dict[str, Any] = dict(poisoned_views(case, dtype, generator))
    for side in "qk":
        if f"documents_{side}" in case:
            inputs[f"cu_seqlens_{side}"] = torch.tensor(case[f"documents_{side}"], dtype=torch.int32, device=DEVICE)
    inputs |= {name: case[name] for name in ("causal", "window", "scale") if name in case}
    q = inputs["q"]
    dout = torch.randn(q.shape, generator=generator, device=DEVICE).to(dtype)
    dlse = torch.randn((*q.shape[:-3], q.shape[-2], q.shape[-3]), generator=generator, device=DEVICE)
    names = ("out", "lse", "dq", "dk", "dv")

    def results(function: Any, values: dict[str, Any], **options: Any) -> list[torch.Tensor]:
        out, lse = function(**values, return_lse=True, **options)
        if not backward:
            return [out, lse]
        return [
            out,
            lse,
            *torch.autograd.grad([out, lse], [values[n] for n in "qkv"], [dout.to(out.dtype), dlse.to(lse.dtype)]),
        ]

    runs, deterministic = case.get("runs", 2), case.get("deterministic", False)
    wanted = {"backend": "triton", "deterministic": deterministic}
    with (
        prefer_hopper(),
        replaced_launches(**case.get("launch", {})),
        poisoned_memory(),
        counted_calls() as counts,
    ):
        ours, *others = [results(attention, inputs, **wanted) for _ in range(runs)]
        torch.cuda.synchronize()
    wrong = []
    if counts != [runs, runs if backward else 0]:
        wrong.append(f"the Hopper kernels were called {counts} times")
    wrong += [
        f"{n}: another result in run {i} of {runs}"
        for i, again in enumerate(others, 2)
        for n, a, b in zip(names, ours, again, strict=False)
        if (n != "dq" or deterministic) and not torch.equal(a, b)
    ]
    exact = results(plain_attention, oracle.leaves(inputs, torch.float64))
    plain = results(plain_attention, oracle.leaves(inputs, dtype))
    by_delta: list[Any] = [None, None]
    if backward:
        by_delta += oracle.gradients_by_delta(inputs, plain[0], plain[1].float(), dout, dlse)
    for name, a, e, p, d in zip(names, ours, exact, plain, by_delta, strict=False):
        mine, theirs = measure(a, e), measure(p, e)
        if d is not None and measure(d, e).norm > theirs.norm:
            theirs = measure(d, e)
        extra = slack(dtype)
        if not (mine.norm <= theirs.norm + extra and mine.largest <= theirs.largest + 2 * extra):
            bad = ((a.double() - e).abs() > 0.02 * e.abs().max()) | a.isnan()
            where = bad.nonzero()
            wrong.append(
                f"{name}: norm {mine.norm:.2e} (plain {theirs.norm:.2e}), largest {mine.largest:.2e} (plain "
                f"{theirs.largest:.2e}), {len(where)} of {a.numel()} far off, NaN {int(a.isnan().sum())}, from "
                f"{where.min(0).values.tolist() if len(where) else None} to "
                f"{where.max(0).values.tolist() if len(where) else None}"
            )
    return wrong


def main() -> None:
    group, head_dim, *keys = sys.argv[1:]
    for case in cases(int(head_dim)):
        if not all(key in case for key in keys):
            continue
        if case.get("only", group) != group:
            continue
        print(json.dumps({"start": case}), flush=True)
        try:
            wrong = run_case(case, group == "backward")
        except Exception:
            wrong = [traceback.format_exc(limit=-4)[-1500:]]
        print(json.dumps({"done": case, "wrong": wrong}), flush=True)
        if any("CUDA error" in line for line in wrong):
            break


if __name__ == "__main__":
    main()
