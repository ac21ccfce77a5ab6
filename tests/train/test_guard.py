"""The guard: its verdict against the formula, skipped steps that change nothing, the way back, the diagnosis."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from fuselm.kernels.adamw import AdamW
from fuselm.train.checkpointing import checkpoints_of, read_manifest, step_folder
from fuselm.train.config import resolve, to_json
from fuselm.train.data_stream import DataStream, TokenDataset
from fuselm.train.distributed import AgreedError, World
from fuselm.train.event_log import read_events
from fuselm.train.guard import Guard, Verdict, take_notice
from fuselm.train.guard_config import GuardConfig
from fuselm.train.metrics import read_metrics
from fuselm.train.progress import BadStep, Progress
from fuselm.train.trainer import StopSignal, Trainer

from .faults import Faults

HERE = Path(__file__).parent
ALONE = World(0, 0, 1, torch.device("cpu"))


def optimizer_and_guard(config: GuardConfig, backend: Literal["reference", "triton"] = "reference"):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(4))]
    optimizer = AdamW(parameters, lr=0.1, max_grad_norm=1.0, backend=backend)
    return optimizer, Guard(config, ALONE, optimizer)


def do_step(optimizer: AdamW, guard: Guard, loss: float, grad_norm: float) -> Verdict:
    parameters = optimizer.param_groups[0]["params"]
    size = sum(p.numel() for p in parameters)
    for p in parameters:
        p.grad = torch.full_like(p, grad_norm / math.sqrt(size))
    guard.expect(torch.tensor(loss, dtype=torch.float64))
    optimizer.step()
    return guard.read(guard.record.tolist())


def state_of(optimizer: AdamW) -> list[torch.Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    return [t.detach().clone() for p in parameters for t in (p, *optimizer.state[p].values())]


def expected_spikes(history: list[tuple[float, float]], now: tuple[float, float], config: GuardConfig) -> list[bool]:
    """The formula in guard.py, by numpy; history without what is not finite."""
    found = []
    for i, (threshold, floor) in enumerate(((config.loss_threshold, 0.01), (config.norm_threshold, 0.05))):
        values = np.sort([pair[i] for pair in history])
        if len(values) < config.min_history:
            found.append(False)
            continue
        median = values[(len(values) - 1) // 2]
        mad = np.sort(np.abs(values - median))[(len(values) - 1) // 2]
        found.append(bool(now[i] - median > threshold * max(1.4826 * mad, floor * abs(median))))
    return found


def test_the_verdict_is_the_formula_s():
    config = GuardConfig(window=16, min_history=5, loss_threshold=3.0, norm_threshold=4.0)
    optimizer, guard = optimizer_and_guard(config)
    random, history, verdicts = np.random.default_rng(1), [], []
    for step in range(120):
        loss, norm = 3 + 0.2 * random.standard_normal(), float(np.exp(0.3 * random.standard_normal()))
        loss, norm = loss + 2 * (step % 17 == 0), norm * (1 + 9 * (step % 13 == 0))
        if step % 11 == 0:
            loss = math.nan
        verdict = do_step(optimizer, guard, loss, norm)
        window = [pair for pair in history[-16:] if pair is not None]
        if math.isnan(loss):
            assert verdict.kind == "nonfinite"
        else:
            expected = expected_spikes(window, (loss, verdict.grad_norm), config)
            assert [verdict.loss_spike, verdict.norm_spike] == expected, step
        history.append(None if math.isnan(loss) else (loss, verdict.grad_norm))
        verdicts.append(verdict)
        if verdict.kind is None:
            assert verdict.grad_norm == float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-5)
    for kind in ("nonfinite", "loss_spike", "norm_spike"):
        assert 3 <= sum(getattr(v, kind) for v in verdicts) <= 30


def test_a_restored_guard_comes_to_the_same_verdicts():
    config = GuardConfig(window=8, min_history=3, loss_threshold=2.0)
    random = np.random.default_rng(2)
    steps = [(3 + 0.1 * random.standard_normal() + (k % 9 == 8), 1.0 + 0.1 * random.random()) for k in range(60)]
    steps[13] = (math.inf, 1.0)
    optimizer, guard = optimizer_and_guard(config)
    unbroken, progress, history = [], Progress(), {}
    for k, step in enumerate(steps):
        if k == 21:
            history = json.loads(json.dumps(progress.to_dict()))
        verdict = do_step(optimizer, guard, *step)
        progress.remember(verdict.loss, verdict.grad_norm, window=config.window)
        unbroken.append(verdict)
    optimizer, guard = optimizer_and_guard(config)
    guard.restore(Progress.from_dict(history).history)
    resumed = [do_step(optimizer, guard, *step) for step in steps[21:]]
    assert resumed == unbroken[21:] and any(v.loss_spike for v in resumed)


@pytest.mark.parametrize(
    ("loss", "norm", "kind"),
    [
        (math.nan, 1.0, "nonfinite"),
        (math.inf, 1.0, "nonfinite"),
        (3.0, math.nan, "nonfinite"),
        (3.0, math.inf, "nonfinite"),
        (9.0, 1.0, "spike"),
        (3.0, 90.0, "spike"),
        (3.01, 1.01, None),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_bad_step_changes_nothing_at_all(loss, norm, kind, backend):
    optimizer, guard = optimizer_and_guard(GuardConfig(min_history=8), backend)
    for k in range(12):
        assert do_step(optimizer, guard, 3.0 + 0.01 * (k % 3), 1.0 + 0.01 * (k % 5)).kind is None
    before, skipped = state_of(optimizer), int(optimizer.skipped_steps)
    assert do_step(optimizer, guard, loss, norm).kind == kind
    assert int(optimizer.skipped_steps) - skipped == (kind is not None)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(optimizer), strict=True)) == (kind is not None)


def test_a_guard_changes_its_optimizer_s_veto_alone():
    """No step of its own, and groups may be added later; a step without a loss is none of the run's."""
    optimizer, guard = optimizer_and_guard(GuardConfig(min_history=2))
    assert not optimizer.state and int(optimizer.skipped_steps) == 0
    late = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.full_like(late, 1e6)
    optimizer.step()
    assert float(optimizer.state[late]["step"]) == 1 and not hasattr(guard, "record")
    late.grad = None
    assert [do_step(optimizer, guard, 3.0, norm).kind for norm in (1.0, 1.0, 1.0, 90.0)] == [None] * 3 + ["spike"]
    assert float(optimizer.grad_norm) == pytest.approx(90.0, rel=1e-5), "refused, and known all the same"


def test_noise_and_trends_are_no_spikes():
    optimizer, guard = optimizer_and_guard(GuardConfig())
    random = np.random.default_rng(3)
    for step in range(3000):
        loss = 2 + 9 * math.exp(-step / 100) + 0.1 * random.standard_normal()
        norm = (1 + step / 1000) * math.exp(0.35 * random.standard_normal())
        assert do_step(optimizer, guard, loss, norm).kind is None, step


def test_without_spike_detection_only_what_is_not_finite_is_skipped():
    optimizer, guard = optimizer_and_guard(GuardConfig(spikes=False))
    kinds = [do_step(optimizer, guard, loss, 1.0).kind for loss in [3.0] * 50 + [1e6, math.nan]]
    assert kinds == [None] * 51 + ["nonfinite"]


def test_the_verdict_waits_for_no_device():
    """Meta tensors have no numbers: whatever would need one on the host raises."""
    guard = Guard.__new__(Guard)
    guard.config, guard.world, guard._next = GuardConfig(), ALONE, 0
    guard._history = torch.empty((2, 128), dtype=torch.float64, device="meta")
    guard._thresholds = guard._floors = torch.empty(2, dtype=torch.float64, device="meta")
    guard._inf = torch.empty((), dtype=torch.float64, device="meta")
    for _ in range(2):
        guard.expect(torch.empty((), dtype=torch.float64, device="meta"))
        refused = guard.judge(torch.empty((), dtype=torch.float64, device="meta"))
        assert refused.device.type == "meta" and refused.shape == () and refused.dtype == torch.bool
    assert guard.record.device.type == "meta" and guard.record.shape == (5,) and guard._next == 2
    with pytest.raises(RuntimeError, match="meta"):
        float(guard.record[0])


def test_batches_that_are_passed_over_shift_those_behind_them():
    progress = Progress(passed_over=[2, 3, 7])
    assert [progress.batch_of(step) for step in range(7)] == [0, 1, 4, 5, 6, 8, 9]
    assert progress.pass_over(3, 5) == [4, 5] and progress.passed_over == [2, 3, 4, 5, 7]
    assert [progress.batch_of(step) for step in range(4)] == [0, 1, 6, 8]
    again = Progress.from_dict(
        json.loads(json.dumps(dataclasses.replace(progress, history=[None, (0.1, 0.2)]).to_dict()))
    )
    assert again.history == [None, (0.1, 0.2)] and again.passed_over == progress.passed_over


def test_when_to_go_back_and_when_to_stop():
    config = GuardConfig(rollback_after=3, rollback_within=10, max_rollbacks=1, forget_after=100)
    spike, good, nan = (
        Verdict(1.0, 1.0, *flags) for flags in ((False, True, False), (False,) * 3, (True, False, False))
    )

    def run(verdicts: dict[int, Verdict], last: int) -> dict[int, bool]:
        progress, alarms = Progress(), {}
        for progress.step in range(1, last + 1):
            verdict = verdicts.get(progress.step, good)
            alarm = take_notice(progress, progress.step - 1, verdict, config, max_nonfinite_steps=2)
            if alarm is not None:
                alarms[progress.step] = alarm.stop
        return alarms

    assert run({k: spike for k in (1, 6, 12, 17, 23)}, 40) == {}, "never three within ten steps"
    assert run({k: spike for k in (1, 6, 10, 11)}, 40) == {10: False}
    assert run({k: spike for k in (1, 2, 3, 50, 51, 52)}, 60) == {3: False, 52: True}
    assert run({k: spike for k in (1, 2, 3, 150, 151, 152)}, 160) == {3: False, 152: False}
    assert run({k: nan for k in (5, 7, 8)}, 20) == {8: True}, "in a row is worse than often"
    assert run({k: nan for k in (1, 3, 5)}, 20) == {5: False}


def test_documents_of_a_batch(tiny_data):
    dataset = TokenDataset.open(tiny_data, "train")
    stream = DataStream(dataset, seq_len=32, global_batch_size=8, seed=0)
    for rank in (0, 1):
        found = stream.documents(3, rank=rank, world_size=2, accumulation=2)
        numbers = [n for first, last in found for n in range(first, last + 1)]
        expected = set()
        for micro_step in (0, 1):
            for sequence in stream.sequence_ids(3 * 8 + (micro_step * 2 + rank) * 2, 2):
                for n in range(dataset.num_documents):
                    begin, end = dataset.borders[n], dataset.borders[n + 1]
                    if begin <= sequence * 32 + 32 and end > sequence * 32:  # the target after the last token counts
                        expected.add(n)
        assert numbers == sorted(expected) and all(a[1] + 1 < b[0] for a, b in itertools.pairwise(found))


# --- Whole runs -----------------------------------------------------------------------------------------------------


GUARD = GuardConfig(window=16, min_history=4, rollback_after=2, rollback_within=6, pass_over_before=1, max_rollbacks=1)


@pytest.fixture
def trainer(make_config, world, tmp_path):
    def make(name: str, **overrides) -> Trainer:
        options = {"training__steps": 20, "checkpoint__every": 5, "checkpoint__keep": 9, "evaluation__batches": 0}
        config = make_config(tmp_path, **{**options, "guard": GUARD, **overrides})
        return Trainer(resolve(dataclasses.replace(config, name=name), 1), world, StopSignal())

    return make


def steps_of(run: Trainer) -> list[tuple[int, int, float | None, str | None]]:
    entries = [e for e in read_metrics(run.run / "metrics.jsonl") if "loss" in e]
    assert [e["step"] for e in entries] == list(range(1, len(entries) + 1))
    return [(e["step"], e["batch"], e["loss"], e["skipped"]) for e in entries]


def test_a_single_spike_is_skipped_and_told(trainer):
    run = trainer("one")
    documents = [list(pair) for pair in run.training.documents(9, 0)]  # the run closes its feed at the end
    with Faults(run, spikes=[9]) as faults:
        run.train()
    assert [(step, kind) for step, _, _, kind in steps_of(run) if kind] == [(10, "spike")]
    assert faults.seen == list(range(20)) and int(run.optimizer.skipped_steps) == 1
    (event,) = [e for e in read_events(run.run) if e["kind"] == "spike"]
    assert (event["step"], event["batch"], event["ranks"], event["action"]) == (10, 9, [0], "skipped")
    assert event["documents"] == {"0": documents}
    assert {type(p) for p in run.optimizer.state.values()} == {dict}
    steps = {float(state["step"]) for state in run.optimizer.state.values()}
    assert steps == {19.0}, "the optimizer did one step less"


def test_rollback_passes_over_the_batches_and_a_resumed_run_too(trainer, world):
    run = trainer("back")
    with Faults(run, spikes=[12, 14]) as faults:
        run.train()
    # Back to step 10, from before the first of them and the one before that; batches 11 to 14 are not seen again.
    passed = [11, 12, 13, 14]
    assert [batch for _, batch, _, _ in steps_of(run)] == [b for b in range(24) if b not in passed]
    assert faults.seen[:17] == [*range(16), 10] or faults.seen[:16] == [*range(15), 10]
    assert not any(kind for *_, kind in steps_of(run))
    events = read_events(run.run)
    assert [e["batch"] for e in events if e["kind"] == "passed_over"] == passed
    assert [e["step"] for e in events if e["kind"] == "rollback"] == [10]
    assert [read_manifest(f)["progress"]["passed_over"] for f in checkpoints_of(run.run)] == [passed] * 3 + [[]]

    # A run that never met them, and one that goes on from the checkpoint that was gone back to, do the same steps.
    other = trainer("passed", checkpoint__resume="never")
    other.progress.passed_over = passed
    other.train()
    assert steps_of(other) == steps_of(run)
    resumed = trainer("resumed", checkpoint__resume=str(step_folder(run.run, 10)))
    with Faults(resumed, spikes=[12, 14]):
        resumed.train()
    tail = [e for e in read_metrics(resumed.run / "metrics.jsonl") if "loss" in e]
    assert [(e["step"], e["batch"], e["loss"], e["skipped"]) for e in tail] == steps_of(run)[10:]


def test_what_repeats_after_a_rollback_stops_the_run(trainer):
    run = trainer("stop")
    with Faults(run, spikes=range(12, 99)), pytest.raises(AgreedError, match="for the 2th time") as error:
        run.train()
    assert "squared gradient norm is that of" in str(error.value)
    assert [e["kind"] for e in read_events(run.run)].count("rollback") == 1
    assert read_events(run.run)[-1]["kind"] == "stop"


def test_without_a_checkpoint_the_run_goes_on(trainer, capsys):
    run = trainer("none", checkpoint__save=False)
    with Faults(run, spikes=[10, 11]):
        run.train()
    assert "there is no checkpoint from before to go back to" in capsys.readouterr().out
    assert [step for step, _, _, kind in steps_of(run) if kind] == [11, 12] and len(steps_of(run)) == 20


@pytest.mark.parametrize("phase", ["activations", "gradients", "weights", "nothing"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_diagnosis_names_the_layer(trainer, monkeypatch, phase, compiled):
    if compiled:
        torch.compiler.reset()
        monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    run = trainer("layer", training__max_nonfinite_steps=2, checkpoint__save=False)
    faults = Faults(run)
    layer = "blocks.1.attention.qkv"
    if phase == "activations":
        faults.break_layer(layer, range(7, 99), lambda output: output * float("nan"))
    elif phase == "gradients":
        faults.break_layer(layer, range(7, 99), lambda output: _NanBackward.apply(output))
    elif phase == "weights":
        with torch.no_grad():
            run.model.get_parameter("blocks.0.attention.qkv.weight").to_local()[0, 0] = float("inf")
    else:
        faults = Faults(run, nan_losses=[7, 8])
    with faults, pytest.raises(AgreedError, match="2 steps in a row") as error:
        if phase == "nothing":
            monkeypatch.setattr("fuselm.train.diagnosis.forward_backward", lambda *a, **k: None)
        run.train()
    expected = {
        "activations": f"the first activations that are not finite are the output of {layer}",
        "gradients": f"activations are finite, the first gradient that is not is that of the input of {layer}",
        "weights": "the weights blocks.0.attention.qkv.weight are not finite",
        "nothing": "was finite when it ran once more",
    }[phase]
    assert expected in str(error.value) and (phase == "nothing" or "on rank 0" in str(error.value))


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * float("nan")


def test_two_ranks_one_verdict_one_way_back(make_config, launch, tmp_path):
    config = make_config(
        tmp_path,
        training__steps=14,
        training__micro_batch_size=4,
        checkpoint__every=5,
        evaluation__batches=0,
        guard=GUARD,
    )
    (tmp_path / "config.json").write_text(to_json(config))
    faults = {"spikes": [8], "nan_losses": [9], "ranks": [1]}
    results = launch([str(HERE / "faulty_run.py"), str(tmp_path / "config.json"), json.dumps(faults)], 2).wait()
    for code, output, errors in results:
        assert code == 0, errors
        found = json.loads(output.splitlines()[-1])
        assert found["passed_over"] == [7, 8, 9] and found["step"] == 14
    assert results[0][1].splitlines()[-1] == results[1][1].splitlines()[-1], "ranks differ"
    events = {e["kind"]: e for e in read_events(tmp_path / "tiny")}
    assert events["spike"]["ranks"] == [1] and events["nonfinite"]["ranks"] == [1]
    assert list(events["spike"]["documents"]) == ["1"] and sorted(events["passed_over"]["documents"]) == ["0", "1"]
    assert BadStep(10, 9, "nonfinite").batch == events["nonfinite"]["batch"]
