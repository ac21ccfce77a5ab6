"""benchmarks/compare_kernels.py on a CPU: what is wrong or raises is said, and all providers compute the same."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

# Scripts of benchmarks/, which pytest's configuration puts on sys.path and a type checker does not know.
compare_kernels: Any = importlib.import_module("compare_kernels")
compile_ahead: Any = importlib.import_module("compile_ahead")
measure: Any = importlib.import_module("measure")
expected: Any = importlib.import_module("expected")
rows: Any = importlib.import_module("rows")
base: Any = importlib.import_module("peers.base")
eager: Any = importlib.import_module("peers.eager")

CPU = torch.device("cpu")
TINY = {row.op: row for row in rows.TINY_ROWS if row.op != "adamw"}
ADAMW = [row for row in rows.TINY_ROWS if row.op == "adamw"]


def _run(row: Any, makers: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    run = measure.RowRun(row, dtype, CPU, measure.Ceilings(1e9, 1e12), 2)
    return {result.direction: result for result in run.run(makers)}


def test_the_command_line_writes_every_row(monkeypatch, tmp_path, capsys):
    output = tmp_path / "results" / "kernels.json"
    command = ["compare_kernels.py", "--output", str(output), "--tiny", "--rounds", "2", "--providers", "eager"]
    monkeypatch.setattr(sys, "argv", [*command, "--ops", "add_rms_norm", "rope"])
    compare_kernels.main()
    facts = json.loads(output.read_text())
    assert [(r["op"], r["direction"]) for r in facts["rows"]] == [
        ("add_rms_norm", "forward"),
        ("add_rms_norm", "backward"),
        ("rope", "forward"),
        ("rope", "forward+backward"),
    ]
    for row in facts["rows"]:
        assert set(row["providers"]) == {"fuselm", "eager"}
        for measured in row["providers"].values():
            assert measured["status"] == "ok" and measured["low_ms"] <= measured["ms"] <= measured["high_ms"]
            assert measured["gb_s"] == pytest.approx(row["bytes"] / measured["ms"] / 1e6)
        assert row["copy_ms"] > 0 and row["flops"] == 0
    assert not facts["shows_gpu"] and facts["left_out"] == [] and facts["environment"]["commit"]
    assert "show nothing about GPUs" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["rms_norm", "linear_cross_entropy"])
def test_long_products_start_from_the_same_load(op, monkeypatch):
    """Before every call that is timed, of every provider; not where memory is what counts. Their ceiling is a large
    product's rate in the same rounds."""
    loads, calls, products = [], [], []
    monkeypatch.setattr(measure, "LOADED_OPERATIONS", 1)
    monkeypatch.setattr(measure, "load_of", lambda product, rate: lambda: loads.append(len(calls) + len(products)))
    monkeypatch.setattr(measure, "product_of", lambda device: lambda: products.append(1) or time.sleep(1e-3))
    function = rows.SPEC_OF[op].plain

    def make(inputs: dict[str, Any]) -> Any:
        return base.Call(lambda: calls.append(1) or function(**inputs), base.leaves_of(inputs))

    (result, *_) = _run(TINY[op], {"fuselm": make, "eager": make}).values()
    assert all(measured.status == "ok" for measured in result.providers.values())
    timed = len(calls) + len(products)
    assert loads == ([] if op == "rms_norm" else list(range(timed - 3 * result.rounds, timed)))
    assert (result.copy_ms is None) == (op == "linear_cross_entropy")
    assert (result.product_tflops is None) == (op == "rms_norm")
    if result.product_tflops:
        assert 0.1 < result.product_tflops / (measure.PRODUCT_OPERATIONS / 1e9) <= 1.0
        for measured in result.providers.values():
            assert measured.share == pytest.approx(measured.tflops / result.product_tflops)


def test_a_round_size_and_the_odd_one_beside_it_are_loaded_alike():
    """Which ones are does not hang on times, and no row is near the border."""
    operations = {
        (r.name, d): rows.work(r, torch.bfloat16, d)[1] for r in (*rows.ROWS, *rows.ODD_ROWS) for d in r.directions
    }
    loaded = {key for key, flops in operations.items() if flops > measure.LOADED_OPERATIONS}
    assert {row.name for row in rows.ROWS if row.op == "linear_cross_entropy"} <= {name for name, _ in loaded}
    for row in rows.ODD_ROWS:
        if row.near:
            assert all(((row.name, d) in loaded) == ((f"{row.op} {row.near}", d) in loaded) for d in row.directions)
    assert all(abs(flops / measure.LOADED_OPERATIONS - 1) > 0.03 for flops in operations.values())


def test_without_memory_for_it_the_load_or_the_copy_costs_no_other_row(monkeypatch):
    def none(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measure, "product_of", none)
    monkeypatch.setattr(measure, "LOADED_OPERATIONS", 1)
    monkeypatch.setattr(measure.torch, "empty_like", none)
    for op, status in (("linear_cross_entropy", "failed: while timed in turn"), ("rms_norm", "ok")):
        function = rows.SPEC_OF[op].plain
        makers = {"eager": lambda inputs, f=function: base.Call(lambda: f(**inputs), base.leaves_of(inputs))}
        (result, *_) = _run(TINY[op], makers).values()
        assert result.providers["eager"].status.startswith(status) and result.copy_ms is None


def test_what_there_was_no_time_for_is_left_out_by_name(monkeypatch, tmp_path):
    output = tmp_path / "kernels.json"
    command = ["compare_kernels.py", "--output", str(output), "--tiny", "--budget-s", "0", "--only", "x37"]
    monkeypatch.setattr(sys, "argv", command)
    compare_kernels.main()
    facts = json.loads(output.read_text())
    assert facts["rows"] == []
    assert facts["left_out"] == ["cross_entropy 7x37", "linear_cross_entropy 9x16x37"]


@pytest.mark.parametrize(
    ("options", "message"), [(["--ops", "gelu"], "--ops gelu: expected one of"), (["--only", "9x9"], "no row has")]
)
def test_rows_that_do_not_exist_are_refused(options, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare_kernels.py", "--tiny", *options])
    with pytest.raises(SystemExit, match=message):
        compare_kernels.main()


@pytest.mark.parametrize("op", sorted(TINY))
def test_an_error_in_a_value_or_a_gradient_is_found(op):
    """A wrong peer is marked and timed, a wrong kernel of ours is not timed; one that raises says what."""
    plain = rows.SPEC_OF[op].plain

    def scaled(**inputs: Any) -> Any:
        outputs = plain(**inputs)
        return tuple(o * 1.02 for o in outputs) if isinstance(outputs, tuple) else outputs * 1.02

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            return grad_outputs[0] * 1.02

    def bent(**inputs: Any) -> Any:
        bent_inputs = {n: WrongGradient.apply(t) if n in base.leaves_of(inputs) else t for n, t in inputs.items()}
        return plain(**bent_inputs)

    def maker(function: Any) -> Any:
        return lambda inputs: base.Call(lambda: function(**inputs), base.leaves_of(inputs))

    def broken(inputs: Any) -> Any:
        raise RuntimeError("no such kernel\non this card")

    makers = {"right": maker(plain), "value": maker(scaled), "gradient": maker(bent), "broken": broken}
    for result in _run(TINY[op], makers | {"fuselm": maker(scaled), "fuselm, in place": maker(bent)}).values():
        got = result.providers
        assert got["right"].status == "ok" and got["right"].ms > 0
        assert got["value"].status.startswith("wrong: output 0") and got["value"].ms > 0
        assert got["gradient"].status.startswith("wrong: gradient of") and got["gradient"].ms > 0
        assert got["broken"].status == "failed: RuntimeError: no such kernel on this card" and got["broken"].ms is None
        assert got["fuselm"].status.startswith("failed: output 0") and got["fuselm"].ms is None
        assert got["fuselm, in place"].status.startswith("failed: gradient of")


def _optimizer(mode: str, **options: Any) -> Any:
    torch_optim: Any = importlib.import_module("peers.torch_optim")

    def maker(inputs: dict[str, Any]) -> Any:
        optimizer = torch.optim.AdamW(inputs["params"], **(torch_optim.HYPERPARAMETERS | options))
        clip = inputs if mode == "clip" else inputs | {"max_grad_norm": None}
        return torch_optim.optimizer_call(optimizer, torch_optim.clipped(optimizer, clip))

    return maker


@pytest.mark.parametrize("op", ["rms_norm", "cross_entropy"])
def test_a_provider_leaves_nothing_in_the_cache_for_another(op):
    """Tensors are equal and each provider's lie elsewhere, where kernels keep what they read."""
    seen: dict[str, list[torch.Tensor]] = {}
    function = rows.SPEC_OF[op].plain

    def maker(name: str) -> Any:
        def make(inputs: dict[str, Any]) -> Any:
            tensors = [x for x in inputs.values() if isinstance(x, torch.Tensor)]

            def note(upstream: Any) -> Any:
                seen[name] = [*tensors, *upstream]
                return upstream

            return base.Call(lambda: function(**inputs), base.leaves_of(inputs), upstream=note)

        return make

    _run(TINY[op], {name: maker(name) for name in ("fuselm", "fuselm, compiled", "eager", "Liger")})
    places = {x.data_ptr() for tensors in seen.values() for x in tensors}
    of_one = len(seen["fuselm"])
    assert len(seen) == 4 and len(places) == (4 * of_one if op == "rms_norm" else of_one)
    assert all(torch.equal(a, b) for tensors in seen.values() for a, b in zip(tensors, seen["fuselm"], strict=True))


def test_an_optimizer_is_checked_from_where_the_one_before_it_left():
    makers = {
        "first": _optimizer("clip"),
        "second": _optimizer("clip"),
        "decay": _optimizer("clip", weight_decay=5.0),
        "third": _optimizer("clip"),
    }
    got = _run(ADAMW[0], makers)[rows.STEP].providers
    assert {name: m.status.split(":")[0] for name, m in got.items()} == {
        "first": "ok",
        "second": "ok",
        "decay": "wrong",
        "third": "ok",
    }
    unclipped = _run(ADAMW[0], {"unclipped": _optimizer("none")})[rows.STEP].providers["unclipped"]
    assert unclipped.status.startswith("wrong: first moments")


@pytest.mark.parametrize("row", ADAMW, ids=lambda row: row.case["mode"])
def test_our_optimizer_passes_and_torch_says_what_it_lacks(row):
    makers: Any = importlib.import_module("peers.registry").load_peers().makers["adamw"]
    got = _run(row, {name: makers[name] for name in ("fuselm", "torch foreach")})[rows.STEP].providers
    assert got["fuselm"].status == "ok", got["fuselm"].status
    has = row.case["mode"] != "master"
    assert got["torch foreach"].status == "ok" if has else "no fp32 master" in got["torch foreach"].status


def test_a_provider_brings_its_variants():
    peers: Any = importlib.import_module("peers.registry").Peers()
    names = ("fuselm", "fuselm, compiled", "fuselm, in place", "QuACK", "QuACK, in place", "eager")
    peers.makers["cross_entropy"] = dict.fromkeys(names)
    chosen = list(compare_kernels.chosen_makers(peers, TINY["cross_entropy"], ("QuACK",)))
    assert chosen == ["fuselm", "fuselm, in place", "QuACK", "QuACK, in place"]


def test_a_card_that_is_lost_ends_the_run_and_leaves_what_was_measured(monkeypatch, tmp_path):
    output = tmp_path / "kernels.json"
    monkeypatch.setattr(compare_kernels, "_lost", lambda device: "AcceleratorError: an illegal memory access")
    command = ["compare_kernels.py", "--output", str(output), "--tiny", "--rounds", "2", "--only", "x37"]
    monkeypatch.setattr(sys, "argv", [*command, "--providers", "eager"])
    with pytest.raises(SystemExit, match="the GPU stopped at cross_entropy 7x37"):
        compare_kernels.main()
    facts = json.loads(output.read_text())
    assert [r["op"] for r in facts["rows"]] == ["cross_entropy"]
    assert facts["left_out"] == ["linear_cross_entropy 9x16x37"] and "illegal memory access" in facts["card_lost"]


def test_a_kernel_that_never_ends_does_not_hold_the_gpu(tmp_path):
    """The process ends itself, says in which row, and leaves the file of the rows before."""
    output = tmp_path / "kernels.json"
    script = f"""
import sys, time
sys.path[:0] = {[str(Path(compare_kernels.__file__).parent), str(Path(compare_kernels.__file__).parents[1] / "src")]!r}
import compare_kernels, torch
from peers import eager
from rows import TINY_ROWS
compare_kernels.ROW_LIMIT_S = 1.0
run, rows = compare_kernels.RowRun.run, [row for row in TINY_ROWS if row.op in ("swiglu", "rope")]
compare_kernels.RowRun.run = lambda self, makers: time.sleep(60) if self.row is rows[1] else run(self, makers)
peers = compare_kernels.Peers({{row.op: {{"eager": eager.maker(row.op)}} for row in rows}})
options = compare_kernels.Arguments(output=compare_kernels.Path({str(output)!r}), rounds=2, tiny=True)
compare_kernels.compare(options, rows, torch.device("cpu"), torch.float32, time.monotonic(), peers)
"""
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and time.monotonic() - began < 50 and "Timeout" in ended.stderr
    assert ended.stderr.index("rope 2x5") < ended.stderr.index("Timeout")
    assert {r["op"] for r in json.loads(output.read_text())["rows"]} == {"swiglu"}


def test_a_call_that_fails_while_timed_does_not_end_the_run():
    calls = []

    def flaky(inputs: Any) -> Any:
        def forward() -> Any:
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("out of memory")
            return rows.SPEC_OF["swiglu"].plain(**inputs)

        return base.Call(forward, base.leaves_of(inputs))

    results = _run(TINY["swiglu"], {"flaky": flaky})
    assert results["forward"].providers["flaky"].status == "failed: while timed in turn, RuntimeError: out of memory"
    assert results["forward"].providers["flaky"].ms is None


def test_a_backward_pass_that_cannot_be_repeated_is_not_timed_alone():
    x = TINY["rms_norm"]

    def once(inputs: Any) -> Any:
        return base.Call(lambda: rows.SPEC_OF["rms_norm"].plain(**inputs), base.leaves_of(inputs), keeps_graph=False)

    results = _run(x, {"once": once})
    assert results["forward"].providers["once"].ms > 0
    assert results["backward"].providers["once"].status.startswith("not timed: its backward pass overwrites")


@pytest.mark.parametrize(
    ("name", "direction", "floor_ms"),
    [
        ("rms_norm 16384x4096", "forward", 0.063),
        ("rms_norm 65536x768", "backward", 0.071),
        ("add_rms_norm 16384x4096", "forward", 0.125),
        ("cross_entropy 8192x128256", "forward+backward", 0.982),
        ("swiglu 32768x8192", "forward+backward", 1.003),
        ("rope 4x4096, 32+8 heads of 128", "forward+backward", 0.157),
        ("adamw 1.236e9, all fp32", "clip+step", 9.23),
        ("adamw 1.236e9, all bf16", "clip+step", 4.62),
        ("adamw 1.236e9, bf16, fp32 master and moments", "clip+step", 8.7),
    ],
)
def test_bytes_are_those_of_the_floor(name, direction, floor_ms):
    """Floors worked out by hand for a card that copies 4,280 GB/s."""
    (row,) = [row for row in rows.ROWS if row.name == name]
    moved, _ = rows.work(row, torch.bfloat16, direction)
    assert moved / 4.28e9 == pytest.approx(floor_ms, rel=0.01)


def test_operations_are_those_of_the_formulas():
    attention, loss = (next(r for r in rows.ROWS if r.op == op) for op in ("attention", "linear_cross_entropy"))
    assert rows.work(attention, torch.bfloat16, "forward")[1] == 4 * 4 * 32 * 4096**2 * 128 // 2
    assert rows.work(attention, torch.bfloat16, "backward")[1] == 10 * 4 * 32 * 4096**2 * 128 // 2
    assert rows.work(loss, torch.bfloat16, "forward+backward")[1] == 6 * 8192 * 4096 * 128256


def test_operations_are_those_of_the_mask():
    """Pairs counted one by one differ from the areas by half of what lies on the diagonal."""
    for row in rows.ROWS + rows.TINY_ROWS:
        case = row.case
        if row.op != "attention" or not {"window", "documents_q"} & set(case):
            continue
        borders, window = case.get("documents_q", (0, case["lengths"][0])), case.get("window", 10**9)
        lengths = [end - start for start, end in itertools.pairwise(borders)]
        counted = case.get("batch", 1) * sum(min(i + 1, window) for n in lengths for i in range(n))
        pairs = rows.visible_pairs(case)
        assert 0 <= counted - pairs <= case.get("batch", 1) * sum(-(-n // 2) for n in lengths)
        heads, head_dim = case["heads"][0], case["head_dim"]
        assert rows.work(row, torch.bfloat16, "forward")[1] == 4 * pairs * heads * head_dim
        assert rows.work(row, torch.bfloat16, "backward")[1] == 10 * pairs * heads * head_dim


def test_documents_fill_the_tokens_with_lengths_of_the_range():
    lengths = rows.document_lengths(16384, 64, 8192)
    assert sum(lengths) == 16384 and all(64 <= n <= 8192 for n in lengths[:-1]) and 0 < lengths[-1] <= 8192
    many = rows.document_lengths(2**22, 64, 8192, seed=1)
    below = sum(n < 724 for n in many) / len(many)  # 724 = sqrt(64 * 8192), the middle of a log-uniform law
    assert 0.45 < below < 0.55 and lengths == rows.document_lengths(16384, 64, 8192)


def test_sizes_choose_between_round_and_odd():
    def chosen(sizes: str) -> list[Any]:
        return compare_kernels.chosen_rows(compare_kernels.Arguments(ops=("swiglu",), sizes=sizes))

    round_ones, odd_ones = chosen("round"), chosen("odd")
    assert [r.near != "" for r in round_ones + odd_ones] == [False, False, True]
    assert chosen("all") == round_ones + odd_ones


def test_processes_that_compile_get_the_same_rows_and_one_folder(monkeypatch):
    commands = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command[2:])

        def wait(self, timeout: float) -> None:
            assert timeout <= 36

    monkeypatch.setattr(compile_ahead.subprocess, "Popen", Process)
    given = {"ops": ("swiglu", "rope"), "only": "16", "sizes": "odd", "providers": ("eager", "FA2 (SDPA)")}
    arguments = compare_kernels.Arguments(budget_s=90.0, **given)
    peers, seconds = compare_kernels.compile_all(compare_kernels.chosen_rows(arguments), arguments, 2)
    parsed = [tyro.cli(compare_kernels.Arguments, args=command) for command in commands]
    assert len(parsed) == 2 and len({p.part for p in parsed}) == 1 and not parsed[0].part.exists()
    assert all({name: getattr(p, name) for name in given} == given for p in parsed)
    assert "swiglu" in peers.makers and seconds == {}


def test_each_task_is_taken_once_and_what_fails_does_not_end_the_others(tmp_path):
    made: list[str] = []

    def maker(name: str, fails: bool = False) -> Any:
        def make(inputs: dict[str, Any]) -> Any:
            made.append(name)
            if fails:
                raise RuntimeError("no such kernel")
            return base.Call(lambda: rows.SPEC_OF["swiglu"].plain(**inputs), base.leaves_of(inputs))

        return make

    makers = {"Liger": maker("Liger"), "fuselm": maker("fuselm"), "FA4": maker("FA4", True), "eager": maker("eager")}
    tasks = compile_ahead.tasks_of([(TINY["swiglu"], makers), (ADAMW[0], makers)])
    (tmp_path / "1").touch()  # another process is at it
    for _ in range(2):
        compile_ahead.compile_tasks(tasks, tmp_path, 60.0, CPU, torch.float32)
    assert [task.provider for task in tasks] == ["FA4", "fuselm", "Liger"] and made == ["FA4", "Liger"]
    assert set(compile_ahead.compiled(tasks, tmp_path)) == {"FA4, swiglu 5x24", "Liger, swiglu 5x24"}
    made.clear()
    late = tmp_path / "late"
    late.mkdir()
    compile_ahead.compile_tasks(tasks, late, -1.0, CPU, torch.float32)
    assert made == [] and not list(late.iterdir())


def test_code_that_is_compiled_already_is_taken_last():
    attention = [row for row in rows.ROWS if row.op == "attention"]
    makers: dict[str, Any] = dict.fromkeys(("fuselm", "FA2 (SDPA)", "FA4", "Flex"))
    tasks = compile_ahead.tasks_of([(row, makers) for row in attention])
    fa4 = [task.row for task in tasks if task.provider == "FA4"]
    kinds = [
        (r.case["head_dim"], r.case.get("window"), "documents_q" in r.case, r.case["heads"][0] // r.case["heads"][1])
        for r in fa4
    ]
    assert len(fa4) == len(attention) and len(set(kinds[:6])) == 6 and set(kinds[6:]) <= set(kinds[:6])
    assert [task.provider for task in tasks[:6]] == ["FA4"] * 6
    assert [task.provider for task in tasks[6 : 6 + len(attention)]] == ["Flex"] * len(attention)  # made for one shape


def test_rows_are_measured_by_weight_and_written_in_the_order_of_the_tables(monkeypatch, tmp_path):
    chosen = compare_kernels.chosen_rows(compare_kernels.Arguments())
    assert len(chosen) == len(rows.ROWS + rows.ODD_ROWS)
    places = [(row in rows.ODD_ROWS, row.op not in compare_kernels.FIRST_OPS) for row in chosen]
    assert places == sorted(places) and chosen[0].op == "cross_entropy"
    small = [TINY["swiglu"], TINY["add_rms_norm"]]
    monkeypatch.setattr(compare_kernels, "ROWS", tuple(reversed(small)))
    options = compare_kernels.Arguments(output=tmp_path / "k.json", rounds=2, providers=("eager",), tiny=True)
    facts = compare_kernels.compare(options, small, CPU, torch.float32, time.monotonic())
    assert [r["op"] for r in facts["rows"]] == ["add_rms_norm"] * 2 + ["swiglu"] * 2
    assert list(facts["row_seconds"]) == [row.name for row in small]
    assert set(facts["row_seconds"]["swiglu 5x24"]) == {"inputs, expected", "fuselm", "eager", "timing"}


def test_every_odd_row_names_a_row_that_exists():
    labels = {(row.op, row.label) for row in rows.ROWS}
    odd = [row for row in rows.ODD_ROWS if row.near]
    assert odd and all((row.op, row.near) in labels for row in odd)


def test_quick_prints_the_kernel_of_each_op_and_a_line_a_row(monkeypatch, tmp_path, capsys):
    quick: Any = importlib.import_module("quick")
    monkeypatch.setattr(quick, "TINY_ROWS", [TINY["swiglu"]])
    output = tmp_path / "quick.json"
    command = ["quick.py", "--output", str(output), "--rounds", "2", "--providers", "eager"]
    monkeypatch.setattr(sys, "argv", command)
    quick.main()
    printed = capsys.readouterr().out
    assert "linear_cross_entropy" in printed and "attention" in printed  # of the table of kernels
    (line,) = [line for line in printed.splitlines() if "5x24" in line and "forward+backward" in line and "│" in line]
    measured = json.loads(output.read_text())["rows"][1]["providers"]
    assert f"{measured['eager']['ms'] / measured['fuselm']['ms']:.2f}x" in line and "eager" in line
    assert "show nothing about GPUs" in printed


def test_quick_rows_fit_into_small_cards():
    for row in rows.QUICK_ROWS:
        moved, _ = rows.work(row, torch.bfloat16, row.directions[-1])
        assert moved < 2.5e9, row.name


def test_a_call_runs_within_its_context_forward_and_backward():
    inside, seen = [], []

    @contextlib.contextmanager
    def context() -> Any:
        inside.append(1)
        yield
        inside.pop()

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", len(inside)))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            seen.append(("backward", len(inside)))
            return grad_outputs[0]

    def maker(inputs: dict[str, Any]) -> Any:
        plain = rows.SPEC_OF["rms_norm"].plain
        return base.Call(lambda: Watched.apply(plain(**inputs)), base.leaves_of(inputs), context=context)

    results = _run(TINY["rms_norm"], {"watched": maker})
    assert {r.providers["watched"].status for r in results.values()} == {"ok"}
    assert set(seen) == {("forward", 1), ("backward", 1)} and not inside
