"""Vocab-parallel cross-entropy, alone and with the linear layer, on 2 and 3 gloo processes: as the whole vocabulary.

Run as a script with a folder, this file forks the processes, which write what they saw; the tests read it.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROWS, DIM, VOCAB = 6, 8, 43
SLICES = {2: (22, 21), 3: (1, 39, 3)}  # world size -> classes of each process
EVERYTHING: dict[str, Any] = {"z_loss": 1e-2, "label_smoothing": 0.1, "softcap": 5.0}
CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum, scaled": {"reduction": "sum", "upstream": 0.3},
    "none with lse": {"reduction": "none", "return_lse": True} | EVERYTHING,
    "smoothing": {"label_smoothing": 0.2, "z_loss": 1e-3, "return_lse": True},
    "softcap": {"softcap": 3.0, "reduction": "sum"},
    "ignore_index in a slice": {"ignore_index": 30, "label_smoothing": 0.1},
    "all ignored": {"ignored": 1.0, "z_loss": 0.1},
    "confident": {"confident": True, "reduction": "none"},
    # fp16, not bf16: Triton's interpreter truncates to bf16 where a GPU rounds
    "fp16": {"dtype": torch.float16, "confident": True, "upstream": 1024.0},
    "masked slices": {"masked": True, "reduction": "sum"},
    "impossible target": {"impossible": True, "reduction": "none"},
}
OPTIONS = ("reduction", "return_lse", "z_loss", "label_smoothing", "softcap", "ignore_index")


def make(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """x, weight (for the linear form), logits and targets; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    dtype = case.get("dtype", torch.float32)
    x = torch.randn((ROWS, DIM), generator=generator)
    weight = torch.randn((VOCAB, DIM), generator=generator) * DIM**-0.5
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    logits = torch.randn((ROWS, VOCAB), generator=generator)
    if case.get("confident"):
        logits[torch.arange(ROWS), targets] += torch.linspace(4, 12, ROWS)
    if case.get("masked"):
        logits[0, :22] = logits[1, 1:40] = logits[2, 22:] = -math.inf
        targets[:3] = torch.tensor([40, 42, 3])
    targets[torch.rand(ROWS, generator=generator) < case.get("ignored", 0.2)] = case.get("ignore_index", -100)
    if case.get("impossible"):
        targets[1], targets[4] = VOCAB, -3
    lse_upstream = torch.rand(ROWS, generator=generator)
    upstream = torch.rand(ROWS, generator=generator)
    if case.get("reduction") != "none":
        upstream = torch.tensor(case.get("upstream", 1.0))
    tensors = {"x": x.to(dtype), "weight": weight.to(dtype), "logits": logits.to(dtype), "targets": targets}
    return tensors | {"upstream": upstream, "lse_upstream": lse_upstream}


def gradients(outputs: Any, leaves: list[torch.Tensor], t: dict[str, torch.Tensor], **keep: Any) -> list[torch.Tensor]:
    """Outputs (loss, perhaps lse) and the gradients for the case's upstream gradients."""
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    upstream = [g.to(o.dtype) for g, o in zip((t["upstream"], t["lse_upstream"]), outputs, strict=False)]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(outputs, leaves, upstream, **keep))


# What follows runs in the forked processes.


def _run(case: dict[str, Any], group: Any, sizes: tuple[int, ...], rank: int, backend: str) -> dict[str, Any]:
    import torch.distributed as dist

    from fuselm.kernels.vocab_parallel import vocab_parallel_cross_entropy
    from fuselm.kernels.vocab_parallel_linear import vocab_parallel_linear_cross_entropy

    t = make(case)
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    options: dict[str, Any] = {name: case[name] for name in OPTIONS if name in case}
    options |= {"group": group, "vocab_start": start, "vocab_size": VOCAB, "backend": backend}
    logits = t["logits"][:, mine].requires_grad_()  # rows of a view start anywhere
    seen: dict[str, Any] = {}
    seen["loss"] = gradients(vocab_parallel_cross_entropy(logits, t["targets"], **options), [logits], t)

    x, weight = t["x"].requires_grad_(), t["weight"][mine].requires_grad_()
    counted = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: (counted.append(tuple(tensor.shape)), all_reduce(tensor, *a, **k))[1]
    try:
        outputs = vocab_parallel_linear_cross_entropy(x, weight, t["targets"], chunk_size=2, **options)
        seen["linear"] = gradients(outputs, [x, weight], t, retain_graph=True)
        seen["collectives"] = counted.copy()
        seen["linear again"] = gradients(outputs, [x, weight], t)
    finally:
        dist.all_reduce = all_reduce
    if not case:
        frozen = vocab_parallel_linear_cross_entropy(x.detach(), weight, t["targets"], memory_budget=500, **options)
        seen["only weight"] = gradients(frozen, [weight], t)
    return seen


def _alone(group: Any) -> dict[str, Any]:
    """One process: opcheck, torch.compile, and messages."""
    from fuselm.kernels.vocab_parallel import vocab_parallel_cross_entropy
    from fuselm.kernels.vocab_parallel_linear import vocab_parallel_linear_cross_entropy

    ops = torch.ops.fuselm
    t = make({})
    x, weight, logits = (t[name].requires_grad_() for name in ("x", "weight", "logits"))
    numbers = (VOCAB, -100, 0.1, 1e-3, 5.0)
    for reduction, lse in (("mean", False), ("none", True)):
        torch.library.opcheck(
            ops.vocab_parallel_cross_entropy_forward,
            (logits.unsqueeze(0), t["targets"], *numbers, group.group_name, reduction, lse),
        )
        rest = (group.group_name, torch.float32, 4, 0)
        torch.library.opcheck(
            ops.vocab_parallel_linear_cross_entropy_forward,
            (x, weight, t["targets"], *numbers, *rest, reduction, lse, reduction == "mean", reduction == "mean"),
        )
    per_row = [torch.rand(ROWS) for _ in range(4)]
    saved = (logits.detach().unsqueeze(0), t["targets"], *per_row[:3], torch.tensor(0.5))
    for upstream, lse_upstream in ((torch.tensor(2.0), None), (per_row[3], per_row[3])):
        torch.library.opcheck(ops.vocab_parallel_cross_entropy_backward, (*saved, upstream, lse_upstream, *numbers))
        rest = (*numbers, group.group_name, torch.float32, 4, 0, True, True)
        torch.library.opcheck(
            ops.vocab_parallel_linear_cross_entropy_backward,
            (x.detach(), weight.detach(), t["targets"], *per_row, upstream, lse_upstream, *rest),
        )
    where = {"group": group, "vocab_start": 0, "vocab_size": VOCAB}
    seen: dict[str, Any] = {"compiled": [], "eager": [], "errors": []}
    functions: Any = (
        (vocab_parallel_cross_entropy, [logits]),
        (vocab_parallel_linear_cross_entropy, [x, weight]),
    )
    for function, leaves in functions:
        compiled = torch.compile(partial(function, **where), fullgraph=True, backend="aot_eager")
        seen["compiled"] += gradients(compiled(*leaves, t["targets"]), leaves, t)
        seen["eager"] += gradients(function(*leaves, t["targets"], **where), leaves, t)
    for change in (
        {"vocab_start": -1},
        {"vocab_start": 3},
        {"vocab_size": 40},
        {"reduction": "avg"},
        {"softcap": -1.0},
        {"memory_budget": 20},
        {"memory_budget": 10**6, "chunk_size": 4},
    ):
        for function, leaves in functions:
            if "memory_budget" in change and function is vocab_parallel_cross_entropy:
                continue
            try:
                function(*leaves, t["targets"], **(where | change))
                seen["errors"].append((change, "none raised"))
            except ValueError as error:
                seen["errors"].append((change, str(error)))
    return seen


def _process(rank: int, world: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    group = dist.group.WORLD
    seen: dict[Any, Any] = {}
    if world == 1:
        seen = _alone(group)
    else:
        for name, backend in itertools.product(CASES, ("triton", "reference")):
            seen[name, backend] = _run(CASES[name], group, SLICES[world], rank, backend)
    torch.save(seen, folder / f"seen{world}-{rank}.pt")
    dist.barrier()
    del group
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def _main(folder: Path) -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    importlib.import_module("fast_interpreter").speed_up()
    for module in ("fuselm.kernels.vocab_parallel_linear", "torch._dynamo"):
        importlib.import_module(module)  # the forked processes have it in memory then
    gc.collect()
    gc.freeze()  # their collections then leave the pages shared
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for world in (2, 3, 1):
        processes = [fork.Process(target=_process, args=(rank, world, folder)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        if any(codes):
            raise SystemExit(f"{world} processes exited with {codes}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))


# The tests.


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[tuple[int, int], dict]:
    folder = tmp_path_factory.mktemp("vocab_parallel")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    pairs = [(1, 0), *((world, rank) for world in SLICES for rank in range(world))]
    return {(world, rank): torch.load(folder / f"seen{world}-{rank}.pt") for world, rank in pairs}


def _whole(case: dict[str, Any], linear: bool, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The whole vocabulary in plain PyTorch; fp64, or the case's dtype."""
    from fuselm.kernels.specs.cross_entropy import plain_cross_entropy

    t = make(case)
    leaves = [t[n].to(dtype or t[n].dtype).requires_grad_() for n in (("x", "weight") if linear else ("logits",))]
    options = {name: case[name] for name in OPTIONS if name in case}
    targets = t["targets"]
    logits = F.linear(*leaves) if linear else leaves[0]
    if case.get("impossible"):  # torch's own raises: NaN in these rows' losses, and so in their gradients
        wrong = (targets == VOCAB) | (targets == -3)
        loss = plain_cross_entropy(logits, targets.masked_fill(wrong, 0), **options)
        outputs: Any = loss * torch.where(wrong, math.nan, 1.0)
    else:
        outputs = plain_cross_entropy(logits, targets, **options)
    return gradients(outputs, leaves, t)


def _joined(seen: dict, world: int, key: tuple, part: str) -> list[torch.Tensor]:
    """Outputs, which must be the same bits on every process, and gradients, the last of which is in slices."""
    each = [seen[world, rank][key][part] for rank in range(world)]
    for same in zip(*(numbers[:-1] for numbers in each), strict=True):
        assert all(torch.equal(same[0].nan_to_num(7.0), other.nan_to_num(7.0)) for other in same), part
    cut = -1 if part == "loss" else 0
    return [*each[0][:-1], torch.cat([numbers[-1] for numbers in each], cut)]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", SLICES)
def test_slices_give_what_the_whole_vocabulary_gives(world, name, backend, seen):
    from fuselm.kernels.numerics import check_budget

    case, key = CASES[name], (name, backend)
    dtype = case.get("dtype", torch.float32)
    for part in ("loss", "linear"):
        exact, plain = (_whole(case, part != "loss", d) for d in (torch.float64, None))
        ours = _joined(seen, world, key, part)
        assert len(ours) == len(exact)
        for i, (a, e, p) in enumerate(zip(ours, exact, plain, strict=True)):
            assert torch.equal(a.isnan(), e.isnan()), (part, i)
            assert a.dtype == (torch.float32 if i < 1 + case.get("return_lse", False) else dtype)
            keep = ~e.isnan()
            check_budget(a[keep], e[keep], p[keep], name=f"{part} {i}", dtype=dtype if part != "loss" else None)
    first, again = (_joined(seen, world, key, part) for part in ("linear", "linear again"))
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("world", SLICES)
def test_frozen_input_and_memory_budget(world, seen):
    """Two rows a chunk; nothing is summed over the processes for an x that needs no gradient."""
    key = "mean", "triton"
    only = torch.cat([seen[world, rank][key]["only weight"][-1] for rank in range(world)])
    torch.testing.assert_close(only, _joined(seen, world, key, "linear")[-1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_two_all_reduces_a_chunk_and_one_of_dx(name, seen):
    """Numbers a row, never logits. A gradient of lse that comes later costs the sum of dx once more."""
    shapes = seen[2, 0][name, "triton"]["collectives"]
    twice = "return_lse" in CASES[name] and CASES[name].get("reduction") != "none"
    assert shapes == [(2,), (4, 2)] * 3 + [(ROWS, DIM)] * (1 + twice)


def test_compiled_whole_equals_eager(seen):
    for a, b in zip(seen[1, 0]["compiled"], seen[1, 0]["eager"], strict=True):
        torch.testing.assert_close(a, b)


def test_bad_arguments_are_named(seen):
    errors = seen[1, 0]["errors"]
    assert len(errors) == 12
    for change, message in errors:
        name, value = next(iter(change.items()))
        if name == "vocab_size":
            assert "vocab_size=40" in message and "43 classes" in message
        else:
            assert f"{name}={value!r}" in message, message
