"""The Hopper attention kernels: schedules and tables on the CPU, compilation for sm_90, values on a GPU."""

from __future__ import annotations

import heapq
import itertools
import json
import queue
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.attention import hopper_common as common
from fuselm.kernels.attention.api import explain_kernel, prefer_hopper
from fuselm.kernels.attention.hopper_backward_rolling import short_tiles_last as short_tiles_last_jitted
from fuselm.kernels.attention.hopper_dq import attention_finish_kernel
from fuselm.kernels.attention.reference import visible_pairs
from fuselm.kernels.launch.attention_hopper import heads_a_section, hopper_backward_launch

from .compiling import compile_in_a_process
from .protocol import as_python

position_at, tile_and_head, key_blocks, split_blocks, query_blocks, short_tiles_last = map(
    common.python_function,
    (
        common.position_at,
        common.tile_and_head,
        common.key_blocks,
        common.split_blocks,
        common.query_blocks,
        short_tiles_last_jitted,
    ),
)


def places_of(program: int, programs: int, positions: int) -> list[int]:
    """What the forward kernel's producer goes through: until a place is beyond the last."""
    places = (position_at(program, programs, step) for step in itertools.count())
    return list(itertools.takewhile(lambda place: place < positions, places))


@pytest.mark.parametrize("programs", [1, 3, 132])
@pytest.mark.parametrize("positions", [1, 2, 3, 131, 132, 133, 400, 1000])
def test_programs_take_every_place_once(positions, programs):
    programs = min(programs, positions)
    taken = [place for program in range(programs) for place in places_of(program, programs, positions)]
    assert sorted(taken) == list(range(positions))


@pytest.mark.parametrize(("heads", "section", "tiles"), [(1, 1, 1), (8, 4, 3), (10, 4, 5), (6, 6, 2), (7, 3, 1)])
def test_places_are_tiles_and_heads(heads, section, tiles):
    pairs = [tile_and_head(place, heads, section, tiles) for place in range(heads * tiles)]
    assert sorted(pairs) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    last = (heads - 1) // section * section  # first head of the last section
    size = heads - last
    assert [tile for tile, _ in pairs[last * tiles :]] == [t for t in reversed(range(tiles)) for _ in range(size)]
    assert {head for _, head in pairs[: section * tiles]} == set(range(section))
    steps = [abs(after - before) for (before, _), (after, _) in itertools.pairwise(pairs)]
    assert max(steps, default=0) <= 1


@pytest.mark.parametrize(
    ("heads", "section", "tiles"), [(128, 64, 32), (128, 16, 32), (32, 4, 128), (32, 12, 128), (512, 256, 8)]
)
def test_programs_have_equal_work(heads, section, tiles):
    """With causal tiles, of 1, 2, 3 ... blocks: the busiest of 132 programs within 3.5 % of the average, or half a
    percent where there are many tiles."""
    work = [0.0] * 132
    for program in range(132):
        for place in places_of(program, 132, heads * tiles):
            tile, _ = tile_and_head(place, heads, section, tiles)
            work[program] += tile + 1 + 2.5
    assert max(work) * 132 / sum(work) < (1.035 if tiles == 8 else 1.005)


@pytest.mark.parametrize(("heads", "section", "tiles"), [(1, 1, 1), (8, 4, 8), (10, 4, 5), (6, 6, 16), (7, 3, 31)])
@pytest.mark.parametrize("held", [1, 4, 8])
def test_short_tiles_come_last(heads, section, tiles, held):
    pairs = [short_tiles_last(place, heads, section, tiles, held) for place in range(heads * tiles)]
    assert sorted(pairs) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    long = tiles - tiles * held // 8
    assert [tile for tile, _ in pairs[heads * long :]] == [t for t in range(long, tiles) for _ in range(heads)]
    begins = [section * i for i in range(heads // section)]
    for begin, end in itertools.pairwise([*begins, heads]):
        here = pairs[begin * long : end * long]
        assert here == [(tile, head) for tile in range(long) for head in range(begin, end)]


@pytest.mark.parametrize(
    ("heads", "section", "tiles"), [(32, 4, 32), (32, 3, 33), (32, 7, 33), (8, 1, 128), (16, 3, 64), (128, 8, 8)]
)
def test_programs_that_end_with_short_tiles_have_equal_work(heads, section, tiles):
    """With causal tiles, of 2, 4, 6 ... blocks of four heads, taken from a counter by 132 programs: the busiest within
    1.5 % of the average."""
    free, work = [0] * 132, 0
    for place in range(heads * tiles):
        tile, _ = short_tiles_last(place, heads, section, tiles, 2)
        work += 8 * (tiles - tile)
        heapq.heapreplace(free, free[0] + 8 * (tiles - tile))
    assert max(free) * 132 / work < 1.015


SHAPES = [(1, 1), (5, 2), (2, 5), (128, 128), (130, 130), (200, 70), (70, 200), (256, 300), (40, 0)]


@pytest.mark.parametrize("window", [None, 1, 7, 64, 500])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_blocks_hold_every_visible_pair(queries, keys, causal, window):
    """Skipped blocks hold no visible pair, blocks without a mask only visible ones."""
    if window is not None and not causal:
        return
    seen = visible_pairs(queries, keys, torch.device("cpu"), causal=causal, window=window)
    options = {"CAUSAL": causal, "WINDOW": window is not None}
    for first in range(0, queries, 128):
        begin, full_begin, full_end, count = key_blocks(
            first, queries, keys, window or 0, ROWS=128, BLOCK_N=32, **options
        )
        full_from, full_to = split_blocks(begin, full_begin, full_end, count)
        assert count >= 1 and 1 <= full_from <= full_to <= count
        visited = torch.zeros_like(seen)
        for i in range(count):
            block = begin + count - 1 - i
            here = seen[first : first + 128, block * 32 : block * 32 + 32]
            visited[first : first + 128, block * 32 : block * 32 + 32] = True
            if full_from <= i < full_to:
                assert here.shape[1] == 32 and here.all()
        assert not (seen & ~visited)[first : first + 128].any()
    for first in range(0, keys, 128):
        begin, full_begin, full_end, count = query_blocks(
            first, keys, queries, window or 0, ROWS=128, BLOCK_M=32, **options
        )
        visited = torch.zeros_like(seen)
        for block in range(begin, begin + count):
            rows, columns = slice(block * 32, block * 32 + 32), slice(first, first + 128)
            visited[rows, columns] = True
            if full_begin <= block < full_end:
                assert seen[rows, columns].shape[1] == 128 and seen[rows, columns].all()
        assert not (seen & ~visited)[:, first : first + 128].any()


def test_consumers_visit_what_their_queries_meet_and_somebody_visits_every_block():
    """Nobody waits for a block that only is passed over: TMA would still write to it when the next one is asked for."""
    own_blocks, draw = as_python((common,), {}).own_blocks, random.Random(0).randrange
    passed_over = 0
    for _ in range(1500):
        queries, causal, consumers = draw(500), draw(3) > 0, draw(2, 4)
        window = causal * draw(2) * draw(1, 300)
        keys, block_n = queries if draw(2) else draw(600), 64 * draw(1, 3)
        first = 64 * consumers * draw(-(-queries // (64 * consumers)) + 2)  # also behind the end
        problem, masks = (queries, keys, window), (causal, window > 0)
        begin, _, _, count = key_blocks(first, *problem, *masks, 64 * consumers, block_n)
        everything = visible_pairs(queries, keys, torch.device("cpu"), causal=causal, window=window or None)
        visited = set()
        for row in range(first, first + 64 * consumers, 64):
            last = begin + count - 1
            skipped, full_from, full_to, own = own_blocks(row, *problem, last, *masks, block_n)
            blocks = [last - skipped - i for i in range(own)]
            assert 0 <= skipped <= count - own and 1 <= full_from <= full_to <= own
            seen = everything[row : row + 64]
            met = {b for b in range(begin, last + 1) if seen[:, b * block_n : (b + 1) * block_n].any()}
            assert met <= set(blocks)
            assert own == max(len(met), 1)
            for b in blocks[full_from:full_to]:
                assert (b + 1) * block_n <= keys and seen[:, b * block_n : (b + 1) * block_n].all()
            visited |= set(blocks)
            passed_over += count - own
        assert visited == set(range(begin, begin + count))
    assert passed_over > 500


def test_sections_are_whole_groups_that_fit():
    assert heads_a_section(2**20, 32, 16 * 2**20, 4) == 16
    assert heads_a_section(3 * 2**20, 32, 16 * 2**20, 4) == 4
    assert heads_a_section(2**30, 32, 16 * 2**20, 4) == 4
    assert heads_a_section(1, 32, 16 * 2**20, 4) == 32


@pytest.mark.parametrize(
    ("head_dim", "keys", "packed", "groups", "held"),
    [
        (128, 4096, False, 4, 1),
        (128, 4097, False, 4, 1),
        (128, 16384, False, 1, 2),
        (128, 16384, True, 1, 4),
        (128, 1024, False, 8, 1),
        (64, 4096, False, 4, 0),
        (64, 4097, False, 4, 0),
        (64, 16384, True, 2, 0),
    ],
)
def test_sections_of_the_backward_kernel(head_dim, keys, packed, groups, held):
    """Of 32/8 heads: as many groups, and short tiles, as were measured to be best."""
    head_bytes = 4 * 2 * 2 * keys * head_dim
    launch = hopper_backward_launch(head_dim, keys, KNOWN_PROFILES[90], packed)
    assert (heads_a_section(head_bytes, 8, launch.section_bytes), launch.held) == (groups, held)


@pytest.mark.parametrize("queries", [True, False])
@pytest.mark.parametrize("masks", [(True, 0), (True, 50), (False, 0)])
@pytest.mark.parametrize("by_work", [True, False])
def test_tile_table(by_work, masks, queries, device):
    """Every row of every document, and of what lies behind the last, is in one tile, at its place; tiles are sorted by
    the pairs of blocks that they hold, or else as documents come."""
    borders_q, borders_k = (0, 5, 5, 40, 100, 300), (0, 7, 9, 9, 200, 230)
    causal, window = masks
    cu_q, cu_k = (torch.tensor(b, dtype=torch.int32, device=device) for b in (borders_q, borders_k))
    table, tiles = common.tile_table(
        cu_q, cu_k, 310, 240, 32, by_work=by_work, queries=queries, causal=causal, window=window
    )
    assert table is not None and table.shape == (tiles + 1, common.TABLE_COLUMNS) and table[tiles, 0] == 0
    rows = torch.zeros(310, dtype=torch.int32)
    work, numbers = [], []
    for first, length, begin, others, other_begin, document, *_ in table[:tiles].tolist():
        if document < 5:
            assert (begin, begin + length) == borders_q[document : document + 2]
            assert (other_begin, other_begin + others) == borders_k[document : document + 2]
        else:
            assert (begin, length, others) == (300, 10, 0)
        rows[begin + first : begin + min(first + 32, length)] += 1
        numbers.append(begin // 32 + document + first // 32)
        options = {"causal": causal, "window": window or None}
        if queries:
            seen = visible_pairs(length, others, torch.device("cpu"), **options)[first : first + 32]
        else:
            seen = visible_pairs(others, length, torch.device("cpu"), **options)[:, first : first + 32].T
        met = seen.any(0).nonzero()
        work.append(-1 if first >= length else int(met.max() - met.min()) + 1 if len(met) else 0)
    assert (rows == 1).all() and sorted(numbers) == list(range(tiles))
    if by_work:
        assert work == sorted(work, reverse=not queries)
    else:
        assert numbers == list(range(tiles))
    nothing = common.tile_table(None, None, 310, 240, 32, queries=True, causal=True, window=0)
    assert nothing == (None, 10)


@pytest.mark.parametrize(
    ("lengths", "behind"), [([], 70), ([0], 0), ([64], 0), ([0, 0, 33, 0, 0], 0), ([1] * 40 + [0] * 24, 5)]
)
def test_tile_table_of_empty_documents(lengths, behind, device, monkeypatch):
    """No documents, empty ones, the last border repeated as in padded cu_seqlens; and too many tiles to be sorted."""
    rows = sum(lengths) + behind
    borders = [0, *itertools.accumulate(lengths)]
    cu = torch.tensor(borders, dtype=torch.int32, device=device)
    for most in (4096, 1):
        monkeypatch.setattr(common, "SORTED_TILES", most)
        for queries in (True, False):
            table, tiles = common.tile_table(cu, cu, rows, rows, 32, queries=queries, causal=True, window=0)
            assert table is not None
            seen = torch.zeros(rows, dtype=torch.int32)
            order = []
            for first, length, begin, others, _, document, *_ in table[:tiles].tolist():
                assert begin == borders[document] and others == (length if document < len(lengths) else 0)
                seen[begin + first : begin + min(first + 32, length)] += 1
                order.append(begin // 32 + document + first // 32)
            assert (seen == 1).all() and sorted(order) == list(range(tiles))
            assert most > 1 or order == list(range(tiles))


@pytest.mark.parametrize(("head_dim", "block_m"), [(64, 128), (128, 64)])
def test_dq_out_of_the_registers_order(head_dim, block_m, device):
    """The last kernel puts back in order what the consumers' threads added block by block, 64 x 64 numbers as the
    registers of a 64-row product hold them: four a thread, of rows r and r + 8, columns c and c + 1. It scales them."""
    queries, heads = block_m + 5, 2
    exact = torch.randn(1, 2 * block_m, heads, head_dim, device=device)
    order = torch.empty(64, 64, dtype=torch.long)
    for thread, register in itertools.product(range(128), range(32)):
        lane, piece = thread % 32, register // 4
        row = thread // 32 * 16 + lane // 4 + register // 2 % 2 * 8
        column = piece * 8 + lane % 4 * 2 + register % 2
        order[row, column] = piece * 512 + thread * 4 + register % 4
    blocks = exact[0].permute(1, 0, 2).reshape(heads, 2 * block_m // 64, 64, head_dim // 64, 64).transpose(2, 3)
    added = torch.empty(*blocks.shape[:3], 4096, device=device)
    added[..., order.flatten().to(device)] = blocks.flatten(-2)
    dq = torch.empty(1, queries, heads, head_dim, device=device)
    attention_finish_kernel[(2 * heads,)](
        added, dq, None, None, *dq.stride()[:3], queries, queries, heads, 0, 2, 0.125,
        PACKED=False, HEAD_DIM=head_dim, BLOCK_M=block_m, num_warps=4,
    )  # fmt: skip
    assert torch.equal(dq, exact[:, :queries] * 0.125)


def test_why_not_hopper(device):
    with prefer_hopper(False):
        assert "switched off" in explain_kernel(device).reason
    reason = explain_kernel(device).reason
    assert "interpreter" in reason or device.type == "cuda"
    assert common.tma_refusal("q", torch.zeros(1, 8, 4, 64)) is None
    odd = torch.zeros(2, 8, 4, 66, dtype=torch.bfloat16)
    assert "multiples of 16 bytes" in str(common.tma_refusal("k", odd[..., :64]))
    assert "begin at a multiple" in str(common.tma_refusal("k", odd[..., 1:65]))
    assert "stride 2" in str(common.tma_refusal("v", torch.zeros(1, 8, 4, 128)[..., ::2]))
    assert common.tma_refusal("q", torch.zeros(1, 1, 4, 64).expand(1, 8, 4, 64)) is not None


def test_compiles_for_hopper():
    """Each mask of the kernels compiles for sm_90, without serialised products. The limits hold what Triton 3.6 and
    3.8 spill: only backward kernels, that of calls that are not deterministic an address or two, at head_dim 64."""
    program = """
        import json, sys
        import torch
        from fuselm.kernels.aot import compile_only
        from fuselm.kernels.attention.api import attention, prefer_hopper
        borders = torch.tensor([0, 100, 2500], dtype=torch.int32)  # long enough for three consumers
        report = []
        for head_dim, options in ((128, {}), (64, {"cu_seqlens_q": borders})):
            shape = (3000, 8, head_dim) if "cu_seqlens_q" in options else (2, 300, 8, head_dim)
            qkv = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            with prefer_hopper(), compile_only(90) as compiled:
                for deterministic in (False, True):
                    out = attention(*qkv.split([4, 2, 2], -2), **options, deterministic=deterministic)
                    out.backward(torch.empty_like(out))
            for k in compiled:
                report.append([k.name, head_dim, sorted(options), k.spill_bytes, k.warnings, k.shared_memory])
        print(json.dumps(report))
    """
    hopper = [row for row in compile_in_a_process(program) if "hopper" in row[0]]
    assert len(hopper) == 6
    for name, head_dim, options, spills, warnings, shared in hopper:
        assert not warnings and shared <= 227 * 1024
        rolling = {64: 32, 128: 0}[head_dim]
        limit = 320 if name == "_hopper_backward_kernel" else rolling if "backward" in name else 0
        assert spills <= limit, (name, head_dim, options, spills)


def test_named_barriers_stand_where_they_must():
    """Inline assembly that the compiler might move: dS is stored and fenced before its barrier, and waited for before
    the products that read it; queries are given back when no product reads them any more."""
    program = """
        import json
        import torch
        from fuselm.kernels._triton import triton
        from fuselm.kernels.aot import compile_only
        from fuselm.kernels.attention.api import attention, prefer_hopper
        kernels = []
        for head_dim in (64, 128):
            qkv = torch.empty((2, 300, 8, head_dim), dtype=torch.bfloat16, requires_grad=True)
            with prefer_hopper(), compile_only(90):
                run = triton.runtime.jit.JITFunction.run
                triton.runtime.jit.JITFunction.run = lambda *a, **k: (kernels.append(run(*a, **k)), kernels[-1])[1]
                out = attention(*qkv.split([4, 2, 2], -2))
                out.backward(torch.empty_like(out))
                triton.runtime.jit.JITFunction.run = run
        print(json.dumps([k.asm["ptx"] for k in kernels if "rolling" in k.metadata.name]))
    """
    kinds = (
        r"stmatrix|fence\.proxy\.async|bar\.arrive +\d+|bar\.sync +1[0-3]\b|wgmma\.mma_async|wgmma\.wait_group\S* +\d"
    )
    for head_dim, ptx in zip((64, 128), compile_in_a_process(program), strict=True):
        body = "".join(re.findall(r"^(?!\s*//).*\n", ptx, re.MULTILINE))
        events = [" ".join(e.split()).replace(".sync.aligned", "") for e in re.findall(kinds, body)]
        found = {"read": 0, "ds": 0, "waits": 0}
        for i, event in enumerate(events):
            before = [e for e in events[:i] if not e.startswith("bar.arrive")]
            if event in ("bar.arrive 8", "bar.arrive 9"):
                found["read"] += 1
                assert before[-1] == "wgmma.wait_group 0"
            elif event.startswith("bar.arrive"):
                found["ds"] += 1
                stored = max(j for j, e in enumerate(before) if e == "stmatrix")
                assert "fence.proxy.async" in before[stored:]
                assert before[-1] in ("fence.proxy.async", "wgmma.wait_group 1")  # zeros; dQ, which read the one before
            elif event.startswith("bar.sync"):
                found["waits"] += 1
                around = [[e for e in part if not e.startswith("bar.")] for part in (events[:i], events[i:])]
                assert around[0][-1] != "wgmma.mma_async" and around[1][0] in ("wgmma.mma_async", "stmatrix")
        # Both barriers of a pair stand in each place; two consumers, before the loop and in it, in it and behind it.
        assert found == {"read": 4, "ds": 8, "waits": 8}, (head_dim, found)


WORKER = Path(__file__).parent / "attention_hopper_worker.py"
SILENCE_S = 45.0
hung: list[str] = []


def read_lines(process: subprocess.Popen, lines: queue.Queue) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("group", ["forward", "backward"])
def test_values_on_a_gpu(group, head_dim, tmp_path):
    """Values (and gradients) of every mask, length and layout against fp64; see attention_hopper_worker.py."""
    assert not hung, f"not run, because {hung[0]}"
    errors = tmp_path / "stderr"
    command = [sys.executable, str(WORKER), group, str(head_dim)]
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    lines: queue.Queue = queue.Queue()
    threading.Thread(target=read_lines, args=(process, lines), daemon=True).start()
    current, wrong, right = None, [], 0
    try:
        while True:
            try:
                line = lines.get(timeout=SILENCE_S)
            except queue.Empty:
                hung.append(f"{group} {head_dim} was silent for {SILENCE_S:.0f} s at {current}")
                break
            if line is None:
                break
            message = json.loads(line)
            current = message.get("start", current)
            if message.get("wrong"):
                wrong.append((message["done"], message["wrong"]))
            elif "done" in message:
                right += 1
    finally:
        process.kill()
    report = "\n".join(f"{case}\n    " + "\n    ".join(lines) for case, lines in wrong[:25])
    assert not hung and not wrong, f"{hung}; {right} cases right, {len(wrong)} wrong:\n{report}"
    assert right > 50, errors.read_text()[-3000:]
