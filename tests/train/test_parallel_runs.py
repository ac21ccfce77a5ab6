"""Whole runs on 1, 2 and 4 processes: the same losses for any split, resume on another number, stops in order."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path

import pytest

from fuselm.train.checkpointing import latest_checkpoint, read_manifest, step_folder
from fuselm.train.config import to_json

from ..forked import Program

HERE = Path(__file__).parent
PRETRAIN = HERE.parents[1] / "train" / "pretrain.py"
# name: (processes, sequences a micro-batch, compute dtype, checkpoint to resume from)
RUNS = {
    "one": (1, 8, "float32", None),
    "one_accumulated": (1, 2, "float32", None),
    "one_bf16": (1, 8, "bfloat16", None),
    "two": (2, 4, "float32", None),
    "two_accumulated": (2, 1, "float32", None),
    "two_bf16": (2, 4, "bfloat16", None),
    "two_swiglu": (2, 2, "float32", None),
    "two_from_one": (2, 4, "float32", "one"),
    "two_from_two": (2, 4, "float32", "two"),
    "four": (4, 2, "float32", None),
    "four_accumulated": (4, 1, "float32", None),
    "four_bf16": (4, 2, "bfloat16", None),
    "four_from_two": (4, 2, "float32", "two"),
    "one_from_four": (1, 8, "float32", "four"),
    "one_selective": (1, 4, "float32", None),
    "one_compiled": (1, 4, "float32", None),
}
# The same of a model whose 5 and 11 rows do not divide by the ranks (of 5 rows the fourth rank has none), and whose
# embedding and head are not one.
UNEVEN = {
    "uneven_one": (1, 8, "float32", None),
    "uneven_four": (4, 2, "float32", None),
    "uneven_four_again": (4, 2, "float32", "uneven_four"),
    "uneven_one_from_four": (1, 4, "float32", "uneven_four"),
}


@pytest.fixture(scope="module")
def runs(make_config, launch, tmp_path_factory):
    """Every run of RUNS and UNEVEN, trained; the folder of all."""
    every = RUNS | UNEVEN
    folder = tmp_path_factory.mktemp("runs")
    for names in (
        [n for n, (count, *_, resume) in every.items() if count == 1 and resume is None],
        [n for n, (count, *_) in every.items() if count == 2],
        [n for n, (count, *_) in every.items() if count == 4],
        ["one_from_four", "uneven_one_from_four"],
    ):
        files = []
        for name in names:
            _, micro_batch_size, dtype, resume = every[name]
            config = make_config(
                folder,
                training__micro_batch_size=micro_batch_size,
                parallel__param_dtype=dtype,
                evaluation__source_documents=3,
                checkpoint__resume=str(step_folder(folder / resume, 3)) if resume else "auto",
            )
            changes = {
                "one_selective": {"activation_checkpointing": "selective"},
                "one_compiled": {"compile": True},
                "two_swiglu": {"activation_checkpointing": "swiglu"},
            }
            parallel = dataclasses.replace(config.parallel, **changes.get(name, {}))
            config = dataclasses.replace(config, parallel=parallel)
            if name in UNEVEN:
                model = dataclasses.replace(config.model, dim=5, head_dim=16, ffn_dim=11, tie_embeddings=False)
                config = dataclasses.replace(config, model=model)
            (folder / f"{name}.json").write_text(to_json(dataclasses.replace(config, name=name)))
            files.append(str(folder / f"{name}.json"))
        for code, _, errors in launch([str(HERE / "run_configs.py"), *files], every[names[0]][0]).wait():
            assert code == 0, errors
    return folder


@pytest.mark.parametrize("name", [n for n, (*_, resume) in RUNS.items() if resume is None])
def test_same_losses_for_any_split(runs, losses_of, name):
    tolerance = 1e-3 if RUNS[name][2] == "bfloat16" else 1e-5
    reference = losses_of(runs / ("one_bf16" if RUNS[name][2] == "bfloat16" else "one"))
    assert list(reference) == [1, 2, 3, 4, 5, 6]
    assert losses_of(runs / name) == pytest.approx(reference, rel=tolerance)
    assert reference[6] < reference[1] - 0.1, "the model does not learn, so equal losses say little"


@pytest.mark.parametrize("name", [n for n, (*_, resume) in RUNS.items() if resume is not None])
def test_resume_goes_on_with_the_unbroken_losses(runs, losses_of, name):
    resumed, unbroken = losses_of(runs / name), losses_of(runs / "one")
    assert list(resumed) == [4, 5, 6]
    assert resumed == pytest.approx({k: unbroken[k] for k in resumed}, rel=1e-5)


def test_resume_on_the_same_number_is_exact(runs, losses_of):
    resumed, unbroken = losses_of(runs / "two_from_two"), losses_of(runs / "two")
    assert resumed == {step: unbroken[step] for step in (4, 5, 6)}


def test_shards_of_unequal_numbers_of_rows_and_of_none(runs, losses_of):
    one, four = losses_of(runs / "uneven_one"), losses_of(runs / "uneven_four")
    assert list(one) == [1, 2, 3, 4, 5, 6] and one[6] < one[1]
    assert four == pytest.approx(one, rel=1e-6)
    assert losses_of(runs / "uneven_four_again") == {step: four[step] for step in (4, 5, 6)}
    resumed = losses_of(runs / "uneven_one_from_four")
    assert resumed == pytest.approx({step: one[step] for step in (4, 5, 6)}, rel=1e-6)


def test_validation_agrees_too(runs):
    def validation(name):
        entries = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
        entries = [e for e in entries if "validation_loss" in e]
        sources = {e["step"] + 0.5: next(iter(e["validation_sources"].values()))["bits_per_byte"] for e in entries}
        return {e["step"]: e["validation_loss"] for e in entries} | sources

    reference = validation("one")
    assert list(reference) == [0, 3, 6, 0.5, 3.5, 6.5]
    for name in ("one_accumulated", "two", "two_accumulated", "four"):
        assert validation(name) == pytest.approx(reference, rel=1e-5)


def test_nan_on_one_rank_is_one_verdict(make_config, launch, tmp_path):
    config = make_config(tmp_path, training__max_nonfinite_steps=2, training__micro_batch_size=4, checkpoint__every=4)
    (tmp_path / "config.json").write_text(to_json(config))
    results = launch([str(HERE / "nan_on_one_rank.py"), str(tmp_path / "config.json")], 2).wait()
    for code, output, errors in results:
        assert code == 0, errors
        found = json.loads(output.splitlines()[-1])
        assert found["error"] and "2 steps in a row" in found["error"]
        assert found["step"] == 6
        assert found["skipped_step_changed_nothing"] and found["next_step_changed_weights"] and found["finite"]
    assert latest_checkpoint(tmp_path / "tiny") == step_folder(tmp_path / "tiny", 4)


def _options(tiny_data: Path, tmp_path: Path) -> list[str]:
    options = {
        "--preset": "debug",
        "--name": "run",
        "--runs": tmp_path,
        "--data.path": tiny_data,
        "--parallel.device": "cpu",
        "--model.kernels": "eager",
        "--training.seq_len": 32,
        "--training.micro_batch_size": 1,
        "--evaluation.batches": 0,
        "--logging.tensorboard": False,
        "--logging.plot": False,
    }
    return [str(part) for pair in options.items() for part in pair]


@pytest.mark.parametrize(("number", "count", "victim"), [(signal.SIGTERM, 2, 1), (signal.SIGINT, 1, 0)])
def test_a_signal_to_one_rank_saves_and_ends_all_with_0(launch, tiny_data, tmp_path, losses_of, number, count, victim):
    processes = launch([str(PRETRAIN), *_options(tiny_data, tmp_path), "--training.steps", "1000000"], count)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() and metrics.read_text().count("\n") > 3:
            break
        time.sleep(0.1)
    processes.members[victim].send_signal(number)
    for code, _, errors in processes.wait():
        assert code == 0, errors
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert read_manifest(checkpoint)["step"] == max(losses_of(tmp_path / "run"))
    assert not list(checkpoint.parent.glob("*.tmp"))


def test_torchrun_starts_the_script_and_a_user_error_is_one_line(tiny_data, tmp_path, server):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PRETRAIN)]
    command = [*torchrun, *_options(tiny_data, tmp_path)]
    program = Program(server, [*command, "--training.steps", "2"])
    code, (out, err) = program.wait(240), program.communicate()
    assert code == 0, err
    assert "step 2/2" in out
    assert out.count("step 1/2") == 1, "only rank 0 prints"
    program = Program(server, [*command, "--training.global_batch_size", "5"])
    assert program.wait(240) != 0
    _, err = program.communicate()
    ours = [line for line in err.splitlines() if line.startswith("error: ")]
    assert ours == [
        "error: training.global_batch_size 5 does not divide by 2 ranks x training.micro_batch_size 1 = 2: "
        "give a multiple of it, or 0 for 2",
    ]
    assert "exitcode  : 2" in err
