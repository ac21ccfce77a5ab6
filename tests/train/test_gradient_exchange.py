"""Gradients exchanged in bf16 and summed in fp32, on 2 and 4 gloo processes: the sums of a reduce-scatter in fp32.

Run as a script with a folder, this file forks the processes, which write what they saw; the tests read it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fuselm.train.gradient_exchange import before_backward, exchange_within_machine

WORLDS = (2, 4)


class Net(nn.Module):
    """11 rows do not divide by the ranks; 3 leave the last of 4 with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 11)
        self.head = nn.Linear(11, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=generator) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def batch(rank: int, index: int) -> torch.Tensor:
    """Gradients of very different sizes on the ranks, so that where a sum is rounded shows."""
    generator = torch.Generator().manual_seed(7 * rank + index)
    return torch.randn((5, 8), generator=generator) * 3.0**rank


def gradients(exchange: bool, micro_batches: int) -> tuple[list[torch.Tensor], list[tuple[str, str]]]:
    """This rank's parts of the gradients, and what was called with which dtype."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (net.hidden, net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model: Any = net
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if exchange:
        exchange_within_machine(model, torch.bfloat16, ranks)
    calls: list[tuple[str, str]] = []
    kept = {name: getattr(dist, name) for name in ("all_to_all_single", "reduce_scatter_tensor")}

    def recording(name: str) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, str(given.dtype)))
            return kept[name](output, given, *args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, recording(name))
    try:
        for index in range(micro_batches):
            last = index == micro_batches - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            before_backward(model, last=last)
            model(batch(rank, index)).float().square().sum().backward()
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return [p.grad.to_local().clone() for p in net.parameters()], calls


def process(folder: Path, ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    store = dist.FileStore(str(folder / f"store-{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    seen: dict[str, Any] = {}
    for micro_batches in (1, 2):
        for exchange in (False, True):
            seen[f"{exchange} {micro_batches}"] = gradients(exchange, micro_batches)
    alone = Net().to(torch.bfloat16)
    alone(batch(rank, 0).bfloat16()).float().square().sum().backward()
    seen["alone"] = [p.grad for p in alone.parameters()]
    torch.save(seen, folder / f"{ranks}-{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads would end a process that still has meshes with SIGABRT


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("exchange")
    subprocess.run([sys.executable, __file__, str(folder)], check=True, timeout=120, capture_output=True)
    return {(n, rank): torch.load(folder / f"{n}-{rank}.pt") for n in WORLDS for rank in range(n)}


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_single_micro_batch_goes_in_bf16_and_is_summed_in_fp32(seen, ranks):
    """The exact sum of what the ranks' backward passes gave, rounded once."""
    names = [name for name, _ in Net().named_parameters()]
    for index, name in enumerate(names):
        parts = [seen[ranks, rank]["True 1"][0][index] for rank in range(ranks)]
        assert all(part.dtype == torch.float32 for part in parts), name
        whole = torch.cat(parts)
        exact = sum(seen[ranks, rank]["alone"][index].double() for rank in range(ranks))
        assert isinstance(exact, torch.Tensor) and whole.shape == exact.shape
        bound = sum(seen[ranks, rank]["alone"][index].double().abs() for rank in range(ranks)) * 2.0**-24 * (ranks - 1)
        assert ((whole.double() - exact).abs() <= bound).all(), name
    for rank in range(ranks):
        assert set(seen[ranks, rank]["True 1"][1]) == {("all_to_all_single", "torch.bfloat16")}


def test_two_ranks_have_the_bits_of_a_reduce_scatter(seen):
    for rank in range(2):
        for ours, theirs in zip(seen[2, rank]["True 1"][0], seen[2, rank]["False 1"][0], strict=True):
            assert ours.numel() == theirs.numel() and torch.equal(ours, theirs)


@pytest.mark.parametrize("ranks", WORLDS)
def test_gradients_summed_over_micro_batches_stay_fp32(seen, ranks):
    for rank in range(ranks):
        ours, calls = seen[ranks, rank]["True 2"]
        assert set(calls) == {("reduce_scatter_tensor", "torch.float32")}
        assert all(torch.equal(a, b) for a, b in zip(ours, seen[ranks, rank]["False 2"][0], strict=True))


@pytest.mark.parametrize(
    ("dtype", "ranks", "local"), [(torch.float32, 4, "4"), (torch.bfloat16, 4, "2"), (torch.bfloat16, 1, "1")]
)
def test_nothing_changes_between_machines_in_fp32_or_alone(monkeypatch, dtype, ranks, local):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    model: Any = nn.Linear(2, 2)
    exchange_within_machine(model, dtype, ranks)
    assert not hasattr(model, "gradient_exchange")


if __name__ == "__main__":
    for world in WORLDS:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=process, args=(Path(sys.argv[1]), world, r)) for r in range(world)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            if child.exitcode:
                sys.exit(f"a process of {world} ended with {child.exitcode}")
