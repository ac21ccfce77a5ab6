"""Other libraries' whole steps: the same model, weights, tokens and updates as ours, and rows that hide nothing."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fuselm.model.config import LlamaConfig, RopeScaling
from fuselm.model.llama import Llama
from fuselm.train.config import parse_command_line, resolve
from fuselm.train.prepare_data import prepare
from fuselm.train.presets import PRESETS
from fuselm.train.pretrain import main as pretrain

from .forked import Program

# Scripts of benchmarks/, which pytest's configuration puts on sys.path and a type checker does not know.
bench_step: Any = importlib.import_module("bench_step")
step_compare: Any = importlib.import_module("step_compare")
step_peers: Any = importlib.import_module("step_peers")
step_processes: Any = importlib.import_module("step_processes")

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
MODEL = LlamaConfig(
    vocab_size=261, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=64, kernels="eager",
    rope_theta=500.0, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=16), tie_embeddings=False,
)  # fmt: skip
STEPS = 12


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of pretrain.py for a run of seconds on a CPU."""
    folder = tmp_path_factory.mktemp("step")
    (folder / "texts").mkdir()
    for number in range(20):
        lines = [f"Line {line} of text {number}: {line * number} and {line + number}.\n" for line in range(40)]
        (folder / "texts" / f"{number:02d}.txt").write_text("".join(lines))
    prepare(folder / "texts", folder / "tokens", vocab_size=261, validation_fraction=0.1)
    text = (
        f"--preset debug --runs {folder} --data.path {folder / 'tokens'} --model.kernels eager --model.dim 32 "
        "--model.ffn-dim 48 --training.seq-len 32 --training.micro-batch-size 2 --training.global-batch-size 4 "
        f"--training.steps {STEPS} --evaluation.batches 0 --checkpoint.save False --checkpoint.resume never "
        "--logging.progress plain --logging.tensorboard False --logging.plot False --parallel.device cpu "
        "--parallel.param-dtype float32 --model.vocab-size 261"
    )
    return text.split()


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _TitanBlock(nn.Module):
    def __init__(self, args: Any, width: int) -> None:
        super().__init__()
        self.head = args.dim // args.n_heads
        keys = args.n_kv_heads * self.head
        sizes = {"wq": args.dim, "wk": keys, "wv": keys, "wo": args.dim}
        self.attention = nn.ModuleDict({name: _linear(args.dim, size) for name, size in sizes.items()})
        shapes = {"w1": (args.dim, width), "w2": (width, args.dim), "w3": (args.dim, width)}
        self.feed_forward = nn.ModuleDict({name: _linear(*shape) for name, shape in shapes.items()})
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        normed, mlp = self.attention_norm(x), self.feed_forward
        q, k, v = (self.attention[name](normed).unflatten(-1, (-1, self.head)) for name in ("wq", "wk", "wv"))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turns[:, None]).flatten(-2)
            for t in (q, k)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attention["wo"](out.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + mlp["w2"](nn.functional.silu(mlp["w1"](normed)) * mlp["w3"](normed))


class _Titan(nn.Module):
    """torchtitan's Llama 3, as its module names, its widths and its complex RoPE would have it."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        width = int(args.ffn_dim_multiplier * int(2 * 4 * args.dim / 3))
        width = args.multiple_of * ((width + args.multiple_of - 1) // args.multiple_of)
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(layer): _TitanBlock(args, width) for layer in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = _linear(args.dim, args.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        head, scaling = self.args.dim // self.args.n_heads, self.args.rope_scaling_args
        frequencies = self.args.rope_theta ** -(torch.arange(0, head, 2) / head)
        lengths = 2 * torch.pi / frequencies
        blend = scaling.original_max_position_embeddings / lengths - scaling.low_freq_factor
        blend = (blend / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        angles = torch.outer(
            torch.arange(tokens.shape[1]), frequencies * (blend + (1 - blend) / scaling.scaling_factor)
        )
        x, turns = self.tok_embeddings(tokens), torch.polar(torch.ones_like(angles), angles)
        for block in self.layers.values():
            x = block(x, turns)
        return self.output(self.norm(x))


@pytest.fixture
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the package, which is not installed with the tests."""
    for name, members in {
        "args": {"RoPEScalingArgs": _scaling, "TransformerModelArgs": SimpleNamespace},
        "model": {"Transformer": _Titan},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"torchtitan.models.llama3.model.{name}", module)


def _scaling(**given: Any) -> SimpleNamespace:
    defaults = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return SimpleNamespace(**(defaults | given))


def _tokens() -> torch.Tensor:
    return torch.randint(0, MODEL.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("change", [{}, {"tie_embeddings": True, "rope_scaling": None}])
@pytest.mark.parametrize("name", ["hf", "torchtitan"])
def test_a_peer_begins_as_the_very_same_function(torchtitan, name: str, change: dict[str, Any]):
    """The trainer's initial weights, under a peer's names and in its order of heads, give our logits."""
    config = replace(MODEL, **change)
    ours = Llama(config)
    ours.init_weights(seed=3)
    peer = step_peers.PEERS[name]
    built = peer.build(config, 48, CPU)
    step_peers.fill(built.model, peer, config, 3, CPU)
    theirs = built.model(_tokens())
    logits = theirs if isinstance(theirs, torch.Tensor) else theirs.logits
    torch.testing.assert_close(logits, ours(_tokens()), atol=2e-5, rtol=1e-4)
    assert sum(p.numel() for p in built.model.parameters()) == ours.num_parameters()


def test_a_model_that_a_peer_does_not_have_is_refused(torchtitan):
    for change in ({"qk_norm": True}, {"head_dim": 16}):
        with pytest.raises(step_peers.UserError, match="torchtitan's Llama has no norms"):
            step_peers.build_torchtitan(replace(MODEL, **change), 48, CPU)
    config = resolve(parse_command_line(["--preset", "debug", "--data.document_mask", "True"], PRESETS, ""), 1)
    with pytest.raises(step_peers.UserError, match=r"data.document_mask is True"):
        step_peers.run("hf", config, None)


def test_liger_patches_come_before_the_model(monkeypatch):
    """Its fused loss reads the head's weight without calling the head, so only the root's hooks may gather it."""
    calls = []
    module = ModuleType("liger_kernel.transformers")
    vars(module)["apply_liger_kernel_to_llama"] = lambda: calls.append("patched")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr(step_peers, "_hf", lambda config, device: calls.append("built") or _Hf())
    built = step_peers.build_hf_liger(MODEL, 48, CPU)
    assert calls == ["patched", "built"] and built.head is None


class _Hf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleNamespace(embed_tokens=None, layers=[], norm=None)


def _peer_losses(peer: str, options: list[str], output: Path) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        assert step_peers.main(["--peer", peer, "--output", str(output), *options]) == 0
    found = json.loads(output.read_text())
    assert found["step_ms"][0] is None and all(ms > 0 for ms in found["step_ms"][1:])
    assert len(found["step_ms"]) == STEPS and found["memory_gib"] > 0
    return found["losses"]


def test_peers_train_as_ours_does_step_by_step(options, torchtitan, tmp_path, capsys):
    """Twelve steps with accumulation, clipping, warmup, decay: the losses stay equal to fp32 rounding."""
    assert pretrain([*options, "--name", "ours"]) == 0
    folder = Path(options[options.index("--runs") + 1])
    ours = [json.loads(line)["loss"] for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    assert len(ours) == STEPS and ours[-1] < ours[0] - 0.1
    for peer in ("hf", "torchtitan"):
        assert _peer_losses(peer, options, tmp_path / "peer.json") == pytest.approx(ours, rel=2e-5), peer


def test_two_processes_train_as_one(options, tmp_path, server):
    """Where one process accumulates two micro-batches, two take one each. Nothing is tied: the head has its group."""
    options = [*options, "--model.tie-embeddings", "False"]
    alone = _peer_losses("hf+compile", options, tmp_path / "one.json")
    script = str(ROOT / "benchmarks" / "step_peers.py")
    command = [*bench_step.launcher(2), script, "--peer", "hf+compile", "--output", "two.json", *options]
    program = Program(server, command[1:], cwd=tmp_path)
    assert program.wait(300) == 0, program.communicate()[1][-3000:]
    assert json.loads((tmp_path / "two.json").read_text())["losses"] == pytest.approx(alone, rel=2e-5)


# --- The comparison -------------------------------------------------------------------------------------------------


def _compare(monkeypatch, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], **fields: Any) -> Any:
    """The comparison with runs that are made up: loss by name, or an exception; speeds are 100 and 200 ms a step."""
    order: list[str] = []
    arguments = bench_step.Arguments(
        presets=("debug",), steps=STEPS, output=tmp_path, runs=tmp_path / "runs", peers=tuple(theirs), **fields
    )
    rate = 4 * 128 / 0.1

    def run_training(arguments, preset, kernels, gpus, *, budget, suffix):
        order.append(kernels + suffix)
        if isinstance(ours[kernels], Exception):
            raise ours[kernels]
        losses = [ours[kernels]] * STEPS
        return {"kernels": kernels, "gpus": gpus, "losses": losses, "rates": [rate * gpus] * STEPS, "memory_gib": 4.0}

    class PeerRun:
        def __init__(self, arguments, preset, peer, gpus) -> None:
            self.peer, self.process = peer, SimpleNamespace(stop=lambda: order.append(f"stop {peer}"))

        def finish(self, budget) -> dict[str, Any]:
            order.append(self.peer)
            if isinstance(theirs[self.peer], Exception):
                raise theirs[self.peer]
            times = [None, *[200.0] * (STEPS - 1)]
            return {"losses": [theirs[self.peer]] * STEPS, "step_ms": times, "memory_gib": 8.0, "graph_breaks": 0}

    monkeypatch.setattr(bench_step, "run_training", run_training)
    monkeypatch.setattr(bench_step, "PeerRun", PeerRun)
    monkeypatch.setattr(bench_step, "missing_packages", lambda peer: [p for p in [peer] if p == "torchtitan"])
    budget = step_processes.Budget(None, None)
    bench_step.compare(arguments, "debug", budget, {"card": "c", "torch": "2", "triton": "3", "commit": "x"})
    return order, json.loads((tmp_path / "step_debug.json").read_text())


def test_ours_runs_first_and_last_and_each_row_says_how_it_stands(monkeypatch, tmp_path, capsys):
    stopped = step_processes.RunError("CUDA out of memory, and much more", "OutOfMemoryError: CUDA out of memory")
    late = step_processes.OutOfBudget("3 s left", "3 s left")
    theirs = {"hf": 4.02, "hf+compile": late, "hf+liger": stopped, "torchtitan": 0.0}
    order, result = _compare(monkeypatch, tmp_path, {"triton": 4.0, "eager": 4.1}, theirs, kernels=("triton", "eager"))
    assert [step for step in order if not step.startswith("stop")] == [
        "triton", "eager", "hf", "hf+compile", "hf+liger", "triton-again",
    ]  # fmt: skip
    rows = {row["provider"] + (" again" if row["again"] else ""): row for row in result["comparison"]}
    assert rows["hf"]["step_ms"]["median"] == 200.0 and rows["hf"]["time_to_ours"] == pytest.approx(2.0)
    assert rows["hf"]["loss_difference"] == pytest.approx(0.005) and rows["hf"]["same_loss"]
    assert rows["hf"]["tokens_per_second"] == pytest.approx(4 * 128 / 0.2)
    assert not rows["fuselm (eager)"]["same_loss"] and rows["fuselm (triton) again"]["time_to_ours"] == 1.0
    assert (rows["hf+compile"]["status"], rows["hf+compile"]["reason"]) == ("not run", "3 s left")
    assert rows["hf+liger"] == {
        "provider": "hf+liger", "ours": False, "again": False, "gpus": 1, "status": "failed",
        "reason": "OutOfMemoryError: CUDA out of memory",
    }  # fmt: skip
    assert rows["torchtitan"]["status"] == "not installed"
    assert [run["kernels"] for run in result["runs"]] == ["triton", "eager"]
    assert result["largest_loss_difference_after_step_10"] == pytest.approx(0.025)
    assert "debug hf on 1: 200.0 ms" in capsys.readouterr().out


def test_a_failure_of_ours_is_a_row_too_and_the_peers_still_run(monkeypatch, tmp_path):
    failure = step_processes.RunError("exit code 1", "RuntimeError: boom")
    order, result = _compare(monkeypatch, tmp_path, {"triton": failure}, {"hf": 4.0}, kernels=("triton",))
    assert [row["status"] for row in result["comparison"]] == ["failed", "ok", "failed"]
    assert "time_to_ours" not in result["comparison"][1] and order[:3] == ["triton", "hf", "triton-again"]
    assert result["comparison"][0]["reason"] == "RuntimeError: boom"


def test_steps_that_would_not_be_timed_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--peers", "hf", "--steps", "10"])
    with pytest.raises(SystemExit, match="--steps is 10: with --peers it must be above 10"):
        bench_step.main()


def test_a_run_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    """A launcher whose worker has a session of its own, as torchrun's have."""
    worker = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], start_new_session=True)"
    run = step_processes.Process([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"],
                                 tmp_path / "log", {})  # fmt: skip
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    with pytest.raises(step_processes.RunError) as error:
        run.finish(step_processes.Budget(None, 0.2))
    assert error.value.reason == "stopped after 0 s"
    stat = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    end = time.monotonic() + 20
    while not _has_ended(stat):
        assert time.monotonic() < end, "the worker lives on"
        time.sleep(0.05)


def _has_ended(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(") ")[2].startswith(("Z", "X"))
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_run_that_fails_says_why_in_a_line(tmp_path):
    code = "import sys; print('WARNING: x'); print('[rank0]: ValueError: of 3\\n[rank0]: and more'); sys.exit(3)"
    run = step_processes.Process([sys.executable, "-c", code], tmp_path / "log", {})
    with pytest.raises(step_processes.RunError, match="failed with exit code 3") as error:
        run.finish(step_processes.Budget(None, None))
    assert error.value.reason == "ValueError: of 3"
    assert step_processes.first_error("a\nlast line\n") == "last line"


def test_a_budget_that_is_used_up_begins_no_run():
    budget = step_processes.Budget(100.0, 30.0)
    assert budget.for_a_run() == 30.0
    budget.began -= 80
    assert 19 < budget.for_a_run() <= 20
    budget.began -= 15
    with pytest.raises(step_processes.OutOfBudget, match="of the budget of 100 s were left"):
        budget.for_a_run()
    with pytest.raises(ValueError, match=r"limit_s is 0: it must be above 0"):
        step_processes.Budget(None, 0)
