"""Lost and hung processes, restarts by torchrun, another number of ranks, and running out of memory."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d

from fuselm.model.config import LlamaConfig
from fuselm.train import distributed, hang_watch
from fuselm.train.config import TrainConfig, TrainingConfig, to_json
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.event_log import EventLog, read_events
from fuselm.train.hang_watch import HangWatch, waiting_collectives
from fuselm.train.memory_advice import advice
from fuselm.train.metrics import read_metrics
from fuselm.train.resume import go_on_with_batch

from ..forked import Program

HERE = Path(__file__).parent


@pytest.fixture
def options(tiny_data, tmp_path):
    """options(**overrides): a command line of pretrain.py; section__field=value."""

    def make(**overrides) -> list[str]:
        given = {
            "preset": "debug",
            "name": "run",
            "runs": tmp_path,
            "data__path": tiny_data,
            "parallel__device": "cpu",
            "parallel__param_dtype": "float32",
            "model__kernels": "eager",
            "training__seq_len": 32,
            "training__micro_batch_size": 2,
            "training__steps": 12,
            "evaluation__batches": 0,
            "logging__tensorboard": False,
            "logging__plot": False,
        } | overrides
        return [part for key, value in given.items() for part in (f"--{key.replace('__', '.')}", str(value))]

    return make


@pytest.mark.parametrize("fault", ["sleep", "stop"])
def test_a_hung_rank_is_named(launch, options, fault, tmp_path):
    command = [str(HERE / "faulty_process.py"), fault, "1", "3", *options(parallel__timeout=4)]
    command += ["--logging.alert_command", f'echo "$FUSELM_EVENT $FUSELM_MESSAGE" >> {tmp_path / "heard"}']
    processes = launch(command, 2)
    code, _, errors = (processes.members[0].wait(120), *processes.members[0].communicate(timeout=20))
    processes.members[1].send_signal(signal.SIGCONT)
    processes.members[1].kill()
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1 and len(lines) == 1, errors
    assert re.search(r"nothing has moved for \d+ s: rank 1 ", lines[0])
    # Batches are made ahead, by a thread: what stops the process there stops it in an earlier step.
    step = "4" if fault == "sleep" else r"[1-4]"
    assert re.search(rf"rank 0 waits in the forward and backward pass of step {step}\b", lines[0])
    if fault == "sleep":
        assert "rank 1 holds the others up, in reading a batch of step 4 (" in lines[0]
        assert "faulty at faulty_process.py" in lines[0]
    else:
        assert "rank 1 does not answer any more, it is stopped or lost" in lines[0]
    assert re.search("all_reduce|all_gather|reduce_scatter", lines[0]), "the operation that rank 0 waits in"
    assert [e["kind"] for e in read_events(tmp_path / "run")] == ["start", "stall"]
    assert re.fullmatch(r"stall nothing has moved for \d+ s in the \w.* of step \d\n", (tmp_path / "heard").read_text())


def test_a_run_that_moves_is_left_alone():
    stalls, left = [], []
    with HangWatch(World(0, 0, 1, torch.device("cpu")), 0.6, stalls.append, left.append) as watch:
        for step in range(12):
            watch.at("a step", step)
            time.sleep(0.1)
        with watch.patiently():
            time.sleep(1.0)
        assert stalls == left == []
        time.sleep(1.0)
    assert left == [1] and len(stalls) == 1 and "a step of step 12" in stalls[0]


def test_a_rank_that_stands_still_first_is_not_taken_for_lost(monkeypatch, capsys):
    """It holds the others up, who come to a standstill later, and is still there to be asked then."""
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    left: list[int] = []
    device = torch.device("cpu")
    others, culprit = (
        HangWatch(World(rank, rank, 2, device), 1.6, lambda _: None, lambda _code, rank=rank: left.append(rank))
        for rank in range(2)
    )
    with others, culprit:
        culprit.at("reading a batch", 3)
        others.at("reading a batch", 3)
        time.sleep(1.2)  # more than the 2.5 posts that say whether a rank still answers
        others.at("the forward and backward pass", 3)
        end = time.monotonic() + 20
        while len(left) < 2 and time.monotonic() < end:
            time.sleep(0.05)
    assert sorted(left) == [0, 1]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "rank 1 holds the others up, in reading a batch of step 4 (" in line
    assert "rank 0 waits in the forward and backward pass of step 4" in line


@pytest.mark.parametrize("fault", ["stands still", "fails"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_gets_nowhere_holds_up_no_end(fault, monkeypatch):
    """A file system does not answer, or a terminal takes no text: it may be why the run stands still."""
    held = threading.Event()

    def told(_: str) -> None:
        if fault == "fails":
            raise OSError
        held.wait(60)

    left = []
    monkeypatch.setattr(hang_watch, "_PATIENCE", 0.1)
    monkeypatch.setattr(sys.stderr, "write", told)
    with HangWatch(World(0, 0, 1, torch.device("cpu")), 0.6, told, left.append):
        end = time.monotonic() + 20
        while not left and time.monotonic() < end:
            time.sleep(0.05)
    held.set()
    assert left == [1]


def test_the_time_in_which_the_whole_process_was_stopped_does_not_count(monkeypatch, capsys):
    """By Ctrl-Z, a paused container; a standstill after that is still found."""
    left, checks, went_on = [], [], []
    watch = HangWatch(World(0, 0, 1, torch.device("cpu")), 1.6, lambda _: None, left.append)
    wait = watch._end.wait

    def stopped(seconds: float | None) -> bool:
        checks.append(seconds)
        if len(checks) == 2:
            time.sleep(3)
            went_on.append(time.monotonic())
        return wait(seconds)

    monkeypatch.setattr(watch._end, "wait", stopped)
    with watch:
        end = time.monotonic() + 20
        while len(checks) < 4 and time.monotonic() < end:
            time.sleep(0.02)
        assert len(checks) >= 4 and not left
        while not left and time.monotonic() < end:
            time.sleep(0.02)
        assert left == [1] and time.monotonic() - went_on[0] > 0.8
    assert "error: nothing has moved for 2 s" in capsys.readouterr().err


def test_a_rank_that_moves_again_while_it_asks_the_others_goes_on(monkeypatch, capsys):
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    asked, left = [], []
    watch = HangWatch(World(0, 0, 2, torch.device("cpu")), 0.4, lambda _: None, left.append)
    read = watch._read

    def slow(store: Any) -> Any:
        asked.append(time.monotonic())
        if len(asked) <= 2:
            watch.at("a step", len(asked))
        return read(store)

    monkeypatch.setattr(watch, "_read", slow)
    with watch:
        end = time.monotonic() + 20
        while not left and time.monotonic() < end:
            time.sleep(0.05)
    assert len(asked) == 4, "twice in vain, then before and after it has waited for the others"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert left == [1] and "rank 1 has never answered; rank 0 waits in a step of step 3" in line


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (None, []),
        (lambda **_: '{"entries": []}', []),
        (lambda **_: "not JSON", []),
        (lambda **_: '{"entries": [{"profiling_name": "nccl:all_reduce", "state": "started"}]}', []),
        (
            lambda **_: (
                '{"entries": [{"profiling_name": "nccl:all_gather", "collective_seq_id": 7},'
                ' {"profiling_name": "nccl:all_reduce", "collective_seq_id": 8}]}'
            ),
            ["nccl:all_gather number 7", "nccl:all_reduce number 8"],
        ),
    ],
)
def test_collectives_under_way_are_named(monkeypatch, dump, expected):
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", dump, raising=False)
    assert waiting_collectives() == expected


def test_a_lost_rank_ends_the_others_with_a_line(launch, options):
    processes = launch([str(HERE / "faulty_process.py"), "kill", "1", "3", *options()], 2)
    (code, _, errors), (killed, *_) = processes.wait()
    assert killed == -signal.SIGKILL and code == 1
    assert [line for line in errors.splitlines() if line.startswith("error: rank 0 lost contact")], errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_torchrun_starts_again_and_the_run_goes_on(options, tmp_path, server, resume):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "2", "--monitor-interval", "0.1"]
    command = [*torchrun, str(HERE / "faulty_process.py"), "kill", "1", "8"]
    command += options(checkpoint__every=2, checkpoint__resume=resume)
    program = Program(server, command)
    code, (out, err) = program.wait(240), program.communicate()
    assert code == 0, err
    assert "resuming from" in out
    steps = [e["step"] for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in e]
    assert steps == list(range(1, 13)) and not (tmp_path / "run.1").exists()
    starts = [e for e in read_events(tmp_path / "run") if e["kind"] == "start"]
    assert len(starts) == 2 and starts[0]["step"] == 0 and starts[1]["step"] in (4, 6, 8)
    assert starts[0]["job"] == starts[1]["job"]


def test_the_batch_of_the_run_is_kept_on_other_ranks(tmp_path):
    base = TrainConfig(name="run", runs=tmp_path, training=TrainingConfig(global_batch_size=0, micro_batch_size=4))
    assert go_on_with_batch(base, 3) == base, "there is no run yet"
    (tmp_path / "run" / "checkpoints" / "step_00000002").mkdir(parents=True)
    before = dataclasses.replace(base, training=dataclasses.replace(base.training, global_batch_size=24))
    (tmp_path / "run" / "config.json").write_text(to_json(before))
    for ranks, micro in ((2, 4), (3, 4), (4, 3), (8, 3), (12, 2), (24, 1), (5, 4)):
        training = go_on_with_batch(base, ranks).training
        assert (training.global_batch_size, training.micro_batch_size) == (24, micro)
    assert go_on_with_batch(before, 4) == before, "what the user says counts"


OUT_OF_MEMORY = [
    # GiB of the device, of the state, of the peak; micro-batch, global batch, ranks; what must be said, what must not
    (
        (80.0, 16.0, 76.0),
        (8, 32, 4),
        ["micro_batch_size to 4 (about 46.0 GiB", "full", "8 ranks (8.0 GiB"],
        ["seq_len to"],
    ),
    ((80.0, 16.0, 76.0), (6, 48, 4), ["micro_batch_size to 4 (about 56.0 GiB"], []),
    ((80.0, 16.0, 76.0), (1, 4, 4), ["shorten training.seq_len, now 256", "full"], ["micro_batch_size to"]),
    ((80.0, 79.0, 79.5), (4, 16, 4), ["8 ranks (39.5 GiB"], ["micro_batch_size to"]),
    ((80.0, 16.0, 16.0), (4, 16, 4), ["micro_batch_size to 2 (less"], []),
]


@pytest.mark.parametrize(("memory", "batch", "said", "not_said"), OUT_OF_MEMORY)
def test_out_of_memory_says_what_to_change(memory, batch, said, not_said):
    total, state, peak = memory
    micro, whole, ranks = batch
    training = TrainingConfig(micro_batch_size=micro, global_batch_size=whole)
    text = advice(total=total, state=state, peak=peak, config=TrainConfig(training=training), ranks=ranks)
    assert f"of {total:.1f} GiB" in text and f"take {state:.1f} GiB" in text
    assert all(part in text for part in said) and not any(part in text for part in not_said), text


def test_out_of_memory_names_the_cheapest_way_first():
    """SwiGLU's output of llama3_1b is 16 layers · 16,384 tokens · 8,192 numbers · 2 bytes, 4.0 GiB, as measured."""
    training = TrainingConfig(micro_batch_size=4, global_batch_size=8, seq_len=4096)
    config = TrainConfig(training=training, model=LlamaConfig.from_preset("llama3_1b"))

    def said(mode: Any, state: float = 18.0) -> str:
        parallel = dataclasses.replace(config.parallel, activation_checkpointing=mode)
        changed = dataclasses.replace(config, parallel=parallel)
        return advice(total=40.0, state=state, peak=39.0, config=changed, ranks=1)

    ways = [said("none").find(part) for part in ("swiglu (about 4.0 GiB less", "micro_batch_size to 2", "to full")]
    assert -1 not in ways and ways == sorted(ways)
    assert "swiglu" not in said("swiglu") and "to full" in said("swiglu")
    assert "swiglu" not in said("full") and "swiglu" not in said("none", state=39.0), "it is not the activations"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("shapes differ"), False),
        (UserError("Connection closed by peer"), False),
    ],
)
def test_what_counts_as_lost_contact(error, expected):
    assert distributed.is_lost_contact(error) == expected


def test_alerts_hear_what_happened_once_a_minute(tmp_path):
    log = EventLog(tmp_path, f'echo "$FUSELM_EVENT $FUSELM_STEP $FUSELM_MESSAGE $FUSELM_RUN" >> {tmp_path}/heard')
    for step in range(3):
        log.add("spike", step, f"step {step} is a spike")
    log.add("save", 3, "saved")
    log.add("stop", 4, 'it\'s over; "really" $HOME')
    log.close()
    heard = sorted((tmp_path / "heard").read_text().splitlines())
    assert heard == [f"spike 0 step 0 is a spike {tmp_path}", f'stop 4 it\'s over; "really" $HOME {tmp_path}']
    assert [e["kind"] for e in read_events(tmp_path)] == ["spike"] * 3 + ["save", "stop"]


def test_an_alert_that_hangs_or_fails_holds_nothing_up(tmp_path, monkeypatch):
    monkeypatch.setattr("fuselm.train.event_log._PATIENCE_SECONDS", 0.2)
    began = time.monotonic()
    for command in ("sleep 30", "exit 3", "/no/such/command"):
        log = EventLog(tmp_path, command)
        log.add("stop", 1, "x")
        log.close()
    assert time.monotonic() - began < 5
