"""A machine that is lost for good: torchrun goes on with those that are left, and so does the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from fuselm.train.config import to_json
from fuselm.train.event_log import read_events
from fuselm.train.metrics import read_metrics

from .storm import WORKER


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_machines(make_config, tmp_path):
    """Two agents of torchrun stand for two machines; one is killed with its worker, and does not come back."""
    steps = 400
    config = make_config(tmp_path, training__steps=steps, training__micro_batch_size=4, checkpoint__every=20)
    (tmp_path / "config.json").write_text(to_json(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
    command += ["--rdzv-endpoint", f"localhost:{port}"]
    command += ["--rdzv-conf", "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command += [str(WORKER), str(tmp_path / "config.json"), '{"data": {}}']
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    metrics, agents = tmp_path / "tiny" / "metrics.jsonl", []
    with (tmp_path / "log").open("w") as log:
        try:
            for _ in range(2):
                agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                time.sleep(2)  # the first one keeps the store of the rendezvous
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 50):
                time.sleep(0.1)
            pids = subprocess.run(["pgrep", "-P", str(agents[1].pid)], capture_output=True, text=True, check=True)
            for pid in (agents[1].pid, *map(int, pids.stdout.split())):
                os.kill(pid, signal.SIGKILL)
            assert agents[0].wait(200) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            for agent in agents:
                agent.kill()
    starts = [e for e in read_events(tmp_path / "tiny") if e["kind"] == "start"]
    assert [e["ranks"] for e in starts] == [2, 1] and starts[1]["step"] > 0
    entries = [e for e in read_metrics(metrics) if "loss" in e]
    assert [e["step"] for e in entries] == list(range(1, steps + 1)), "each step once"
    assert [e["batch"] for e in entries] == list(range(steps)), "each batch once, in order"
