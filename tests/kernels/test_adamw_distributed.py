"""AdamW over DTensor parameters on 1, 2 and 4 gloo processes: as one process, whatever the placements.

Run as a script with a folder, this file forks the processes, which write what they saw; the tests read it.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

STEPS = 4
OPTIONS: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
WORLDS = (2, 1, 4)  # 2 first: it saves what the others load


class Net(nn.Module):
    """11 rows do not divide by 2 or 4; 3 rows leave the last of 4 ranks with nothing; `plain` is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 5)
        self.head = nn.Linear(5, 3)
        self.plain = nn.Parameter(torch.ones(3))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=generator) - 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens)))) * self.plain


def train(net: nn.Module, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    """Every rank sees the same batch, so that gradients are those of one process; the gradient norms."""
    norms = []
    for step in range(first, first + steps):
        tokens = (torch.arange(12) * 5 + step) % 11
        (net(tokens) - torch.linspace(-2, 2, 3)).square().sum().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return [float(n) for n in norms]


def full(parameters) -> list[torch.Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in parameters]


# What follows runs in the forked processes.


def _sharded(mesh: Any, **options: Any) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    from fuselm.kernels.adamw import AdamW

    net = Net()
    fully_shard(net, mesh=mesh, ignored_params={net.plain})
    return net, AdamW(net.parameters(), **{**OPTIONS, **options})


def _fsdp(mesh: Any, world: int, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import DTensor

    seen: dict[str, Any] = {}
    net, optimizer = _sharded(mesh)
    seen["norms"] = train(net, optimizer, STEPS)
    seen["params"] = full(net.parameters())
    weight = net.get_parameter("embedding.weight")
    moment = optimizer.state[weight]["exp_avg"]
    assert isinstance(moment, DTensor) and isinstance(weight, DTensor)
    assert moment.placements == weight.placements and moment.shape == weight.shape
    seen["rows"] = [len(p.to_local()) for p in net.parameters() if isinstance(p, DTensor)]
    if world == 2:
        states = get_state_dict(net, optimizer)
        save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder / "checkpoint")
    seen["more"] = train(net, optimizer, 2, STEPS)
    seen["params after more"] = full(net.parameters())

    resumed, again = _sharded(mesh, lr=0.9)
    states = get_state_dict(resumed, again)
    loaded = {"model": states[0], "optimizer": states[1]}
    load(loaded, checkpoint_id=folder / "checkpoint")
    set_state_dict(resumed, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    seen["resumed"] = train(resumed, again, 2, STEPS)
    seen["resumed params"] = full(resumed.parameters())
    seen["resumed steps"] = [float(again.state[p]["step"]) for p in resumed.parameters()]

    plainly, by_torch = _sharded(mesh, backend="reference")
    seen["reference norms"] = train(plainly, by_torch, STEPS)
    seen["reference params"] = full(plainly.parameters())

    for backend in ("triton", "reference"):
        seen[f"veto, {backend}"] = _vetoed(mesh, backend)

    # A gradient that is not finite on the last rank only: in its shard, then in a parameter that is not sharded.
    for name in ("embedding.weight", "plain"):
        before = [p.detach().clone() for p in net.parameters()]
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        if dist.get_rank() == world - 1:
            grad: Any = net.get_parameter(name).grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0] = float("nan")
        optimizer.step()
        seen[f"nan in {name}"] = {
            "norm": float(optimizer.grad_norm),
            "skipped": int(optimizer.skipped_steps),
            "unchanged": all(
                torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (a.detach(), b)))
                for a, b in zip(net.parameters(), before, strict=True)
            ),
            "steps": [float(optimizer.state[p]["step"]) for p in net.parameters()],
        }
    return seen


def _vetoed(mesh: Any, backend: str) -> dict[str, Any]:
    """Steps of which every second is refused, then one that is not finite on the last rank only."""
    import torch.distributed as dist

    net, optimizer = _sharded(mesh, backend=backend)
    asked: list[torch.Tensor] = []

    def veto(norm: torch.Tensor) -> torch.Tensor:
        asked.append(norm)
        return (norm > 0) & (len(asked) % 2 == 0)

    optimizer.veto = veto
    norms = train(net, optimizer, STEPS)
    params = full(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    if dist.get_rank() == dist.get_world_size() - 1:
        grad: Any = net.get_parameter("plain").grad
        grad[0] = float("inf")
    optimizer.step()
    return {
        "norms": norms,
        "asked": [float(norm) for norm in asked],
        "skipped": int(optimizer.skipped_steps),
        "steps": [float(optimizer.state[p]["step"]) for p in net.parameters()],
        "params": params,
    }


def _meshes() -> dict[str, Any]:
    """Parameters cut over two mesh dimensions, one, the other, none; of a sub-mesh; plain. Gradients set by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    from fuselm.kernels.adamw import AdamW

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    line = init_device_mesh("cpu", (4,))
    cuts = [
        (mesh, (Shard(0), Shard(1))),
        (mesh, (Shard(0), Shard(0))),
        (mesh, (Shard(0), Replicate())),
        (mesh, (Replicate(), Shard(0))),
        (mesh, (Replicate(), Replicate())),
        (mesh["data"], (Shard(0),)),
        (line, (Shard(0),)),  # a group that contains the others
        (None, ()),
    ]

    def place(tensor: torch.Tensor, cut: Any) -> torch.Tensor:
        return tensor if cut[0] is None else distribute_tensor(tensor, cut[0], cut[1])

    params = [place(p, cut).detach().requires_grad_() for p, cut in zip(by_hand(0), cuts, strict=True)]
    optimizer = AdamW(params, **OPTIONS)
    norms = []
    for step in range(1, 4):
        for p, g, cut in zip(params, by_hand(step), cuts, strict=True):
            p.grad = place(g, cut)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    seen: dict[str, Any] = {"norms": norms, "params": full(params)}
    weight: Any = params[4]
    weight.grad = type(weight).from_local(weight.grad.to_local(), mesh, (Replicate(), Partial()), run_check=False)
    try:
        optimizer.step()
    except ValueError as error:
        seen["partial"] = str(error)
    return seen


def _collectives(mesh: Any) -> dict[str, list[int]]:
    """Numbers in each all-reduce of a step, for all parameters sharded, and with one that is not."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from fuselm.kernels.adamw import AdamW

    seen: dict[str, list[int]] = {}
    all_reduce = dist.all_reduce
    for name in ("all sharded", "one plain"):
        net = Net()
        fully_shard(net, mesh=mesh, ignored_params={net.plain} if name == "one plain" else set())
        optimizer = AdamW(net.parameters(), **OPTIONS)
        train(net, optimizer, 1)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        seen[name] = sizes = []

        def counting(tensor: torch.Tensor, *args: Any, sizes=sizes, **kwargs: Any) -> Any:
            sizes.append(tensor.numel())
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = counting
        optimizer.step()
        dist.all_reduce = all_reduce
        seen[f"{name}, not finite"] = []
        if dist.get_rank() == 0:
            grad: Any = net.get_parameter("embedding.weight").grad
            grad.to_local()[0] = float("inf")
        optimizer.step()
        seen[f"{name}, not finite"] = [int(optimizer.skipped_steps)]
    return seen


ROUNDED_SHAPES = [(6, 8), (6, 8), (6, 8), (6, 8), (4, 6, 8), (7, 5), (48,), (6, 8)]


def rounded(place: Any) -> tuple[list[Any], Any]:
    """Parameters in bf16 rounded stochastically, three steps; place(number, tensor) cuts them."""
    from fuselm.kernels.adamw import AdamW

    def whole(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).bfloat16() for shape in ROUNDED_SHAPES]

    params = [place(i, p).detach().requires_grad_() for i, p in enumerate(whole(0))]
    optimizer = AdamW(params, lr=1e-2, stochastic_rounding=True, seed=7, state_dtype=torch.bfloat16)
    for step in range(1, 4):
        for i, g in enumerate(whole(step)):
            params[i].grad = place(i, g)
        optimizer.step()
    return params, optimizer


def _rounded() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    line = init_device_mesh("cpu", (4,))
    cuts = [
        (mesh, (Shard(0), Shard(1))),
        (mesh, (Shard(0), Shard(0))),
        (mesh, (Replicate(), Shard(1))),
        (line, (Shard(0),)),  # rows 2, 2, 2, 0
        (mesh, (Shard(0), Shard(1))),
        (line, (Shard(1),)),  # columns 2, 2, 1, 0
        (line, (Shard(0),)),
        (None, ()),
    ]

    def place(i: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if cuts[i][0] is None else distribute_tensor(tensor, cuts[i][0], cuts[i][1])

    params, optimizer = rounded(place)
    return {"params": full(params), "moments": full(optimizer.state[p]["exp_avg_sq"] for p in params)}


def by_hand(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand((5, 3), generator=generator) - 0.5 for _ in range(8)]


def _process(rank: int, world: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    seen = {"fsdp": _fsdp(mesh, world, folder)}
    seen["collectives"] = _collectives(mesh)
    if world == 4:
        seen["meshes"] = _meshes()
        seen["rounded"] = _rounded()
    torch.save(seen, folder / f"seen{world}-{rank}.pt")
    dist.barrier()
    del mesh
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def _main(folder: Path) -> None:
    # Imported here, so that the forked processes start with everything in memory.
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    sys.path.append(str(Path(__file__).parents[1]))
    importlib.import_module("fast_interpreter").speed_up()
    for module in ("fuselm.kernels.adamw", "torch._dynamo", "torch.distributed.checkpoint._fsspec_filesystem"):
        importlib.import_module(module)

    gc.collect()
    gc.freeze()  # their collections then leave the pages shared
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for world in WORLDS:
        processes = [fork.Process(target=_process, args=(rank, world, folder)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
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
    folder = tmp_path_factory.mktemp("adamw")
    # conftest.py has set TRITON_INTERPRET where there is no GPU; on a GPU machine these processes run the reference.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return {(w, r): torch.load(folder / f"seen{w}-{r}.pt") for w in WORLDS for r in range(w)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process with torch's clipping and AdamW."""

    class Torch(torch.optim.AdamW):
        def step(self, closure=None):
            self.grad_norm = nn.utils.clip_grad_norm_(net.parameters(), OPTIONS["max_grad_norm"])
            super().step()

    net = Net()
    optimizer = Torch(net.parameters(), lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], betas=(0.9, 0.95))
    norms = train(net, optimizer, STEPS)
    params = full(net.parameters())
    more = train(net, optimizer, 2, STEPS)
    return {"norms": norms, "params": params, "more": more, "params after more": full(net.parameters())}


def close(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(e), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fsdp_equals_one_process(seen, alone, world):
    for rank in range(world):
        fsdp = seen[world, rank]["fsdp"]
        for name in ("norms", "params", "more", "params after more"):
            close(fsdp[name], alone[name])
        for name in ("norms", "params"):
            close(fsdp[f"reference {name}"], alone[name])
    for rank in range(1, world):
        a, b = seen[world, 0]["fsdp"], seen[world, rank]["fsdp"]
        assert a["norms"] == b["norms"] and all(
            torch.equal(x, y) for x, y in zip(a["params"], b["params"], strict=True)
        )
    if world == 4:
        rows = [seen[4, rank]["fsdp"]["rows"] for rank in range(4)]
        assert [r[0] for r in rows] == [3, 3, 3, 2] and 0 in rows[3]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_checkpoint_of_two_ranks_resumes(seen, alone, world):
    fsdp = seen[world, 0]["fsdp"]
    close(fsdp["resumed"], alone["more"])
    close(fsdp["resumed params"], alone["params after more"])
    assert set(fsdp["resumed steps"]) == {STEPS + 2.0}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_nan_on_one_rank_is_skipped_by_all(seen, world):
    for rank in range(world):
        for skipped, name in enumerate(("embedding.weight", "plain"), 1):
            verdict = seen[world, rank]["fsdp"][f"nan in {name}"]
            assert verdict["norm"] != verdict["norm"] and verdict["skipped"] == skipped and verdict["unchanged"]
            assert set(verdict["steps"]) == {STEPS + 2.0}


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_veto_sees_the_norm_over_all_ranks(seen, world, backend):
    """As torch without the refused steps: clipped by the whole norm, and the moments know nothing of them."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=OPTIONS["lr"], weight_decay=0.1, betas=(0.9, 0.95))
    norms = []
    for step in range(STEPS):
        tokens = (torch.arange(12) * 5 + step) % 11
        (net(tokens) - torch.linspace(-2, 2, 3)).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), OPTIONS["max_grad_norm"])))
        if step % 2 == 0:
            optimizer.step()
        optimizer.zero_grad()
    for rank in range(world):
        found = seen[world, rank]["fsdp"][f"veto, {backend}"]
        close(found["norms"], norms)
        close(found["asked"][:STEPS], norms)
        close(found["params"], full(net.parameters()))
        assert len(found["asked"]) == STEPS + 1 and found["asked"][STEPS] != found["asked"][STEPS], "NaN on all"
        assert found["skipped"] == STEPS // 2 + 1 and set(found["steps"]) == {STEPS / 2}


def test_meshes_of_two_dimensions_equal_one_process(seen):
    params = [p.clone().requires_grad_() for p in by_hand(0)]
    optimizer = torch.optim.AdamW(params, lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], betas=(0.9, 0.95))
    norms = []
    for step in range(1, 4):
        for p, g in zip(params, by_hand(step), strict=True):
            p.grad = g
        norms.append(float(nn.utils.clip_grad_norm_(params, OPTIONS["max_grad_norm"])))
        optimizer.step()
    for rank in range(4):
        meshes = seen[4, rank]["meshes"]
        close(meshes["norms"], norms)
        close(meshes["params"], [p.detach() for p in params])
        assert meshes["norms"] == seen[4, 0]["meshes"]["norms"]
        assert "partial" in meshes["partial"]


@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_of_sharded_parameters_is_one_all_reduce_of_one_number(seen, world):
    for rank in range(world):
        collectives = seen[world, rank]["collectives"]
        assert collectives["all sharded"] == [1]
        assert collectives["one plain"] == [3]  # sharded, plain, ranks that saw a number that is not finite
        assert collectives["all sharded, not finite"] == collectives["one plain, not finite"] == [1]  # step skipped


def test_one_process_reduces_nothing(seen):
    assert seen[1, 0]["collectives"]["all sharded"] == seen[1, 0]["collectives"]["one plain"] == []


def test_random_bits_do_not_depend_on_the_sharding(seen):
    """Bitwise, whichever dimensions are cut."""
    params, optimizer = rounded(lambda _, tensor: tensor)
    for rank in range(4):
        for i, (a, b) in enumerate(zip(seen[4, rank]["rounded"]["params"], params, strict=True)):
            assert torch.equal(a, b.detach()), i
            assert torch.equal(seen[4, rank]["rounded"]["moments"][i], optimizer.state[b]["exp_avg_sq"]), i
