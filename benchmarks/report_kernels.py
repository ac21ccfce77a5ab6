"""Tables of compare_kernels.py's results, and the comparison of two result files."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from peers.base import DETERMINISTIC, OURS, is_ours

Row = dict[str, Any]
Key = tuple[str, str, str]
PEER_DIFFERS = 0.1  # of its time when a goal was set
NAMED_ROWS = 5  # rows behind that a sentence names; the rest it counts
CELL = 60  # characters of a status in a table
NOT_TIMED = "not timed: "


@dataclass
class KernelResults:
    """Rows of one or several result files, a later file's in the place of an earlier one's.

    Attributes:
        rows: (op, label, direction) -> row.
        sources: where and with what the files were measured.
        missing: peer -> why it was not there.
        left_out: rows that no file has, for want of time.
        shows_gpu: False if any file is of small shapes or of a machine without a GPU.
    """

    rows: dict[Key, Row] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    shows_gpu: bool = True


def key_of(row: Row) -> Key:
    """What names a row."""
    return row["op"], row["label"], row["direction"]


def merged(files: Iterable[dict[str, Any]]) -> KernelResults:
    """The files as one."""
    results = KernelResults()
    left_out: list[str] = []
    for facts in files:
        results.rows |= {key_of(row): row for row in facts["rows"]}
        results.sources.append({k: facts[k] for k in ("environment", "peers", "ceilings")})
        results.missing |= facts["missing"]
        results.shows_gpu &= facts["shows_gpu"]
        left_out += facts["left_out"]
    there = {f"{op} {label}" for op, label, _ in results.rows}
    results.left_out = sorted(set(left_out) - there)
    return results


def peers_of(row: Row) -> dict[str, Row]:
    """The peers that were right and were timed."""
    return {name: m for name, m in row["providers"].items() if not is_ours(name) and m["status"] == "ok" and m["ms"]}


def best_peer(row: Row) -> str | None:
    """The fastest of them."""
    peers = peers_of(row)
    return min(peers, key=lambda name: peers[name]["ms"]) if peers else None


def ours(row: Row) -> Row | None:
    """Our measurement, where it was right and was timed."""
    measured = row["providers"].get(OURS)
    return measured if measured and measured["status"] == "ok" and measured["ms"] else None


def speed_ratio(row: Row) -> float | None:
    """Best peer's time over ours: above 1 we are faster; None where one of the two is not there."""
    best, mine = best_peer(row), ours(row)
    return row["providers"][best]["ms"] / mine["ms"] if best and mine else None


def milliseconds(ms: float | None) -> str:
    """Four digits."""
    if ms is None:
        return ""
    return f"{ms:.{max(0, min(4, 3 - math.floor(math.log10(ms))))}f}"


def _by_op(results: KernelResults) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {}
    for row in results.rows.values():
        grouped.setdefault(row["op"], []).append(row)
    return grouped


def _named(row: Row) -> str:
    return f"{row['label']} {row['direction']}"


def summary_table(results: KernelResults) -> str:
    """A line a kernel over its round sizes: how often it is ahead, on average and at worst. Then what the other sizes
    come to, and where it was measured."""
    lines = [
        "| kernel | rows | speed against the best peer of each row, geometric mean | worst row | rows behind |",
        "|---|---|---|---|---|",
    ]
    for op, rows in _by_op(results).items():
        rows = [row for row in rows if not row["odd"]]
        ratios = {_named(row): ratio for row in rows if (ratio := speed_ratio(row)) is not None}
        failed = [_named(row) for row in rows if ours(row) is None]
        if not rows:
            continue
        if not ratios:
            lines.append(f"| {op} | {len(rows)} | no peer | | {_count(failed, 'failed')} |")
            continue
        worst = min(ratios, key=lambda name: ratios[name])
        row = next(row for row in rows if _named(row) == worst)
        behind = _count([n for n, ratio in ratios.items() if ratio < 1], "")
        lines.append(
            f"| {op} | {len(rows)} | {statistics.geometric_mean(ratios.values()):.2f}x | "
            f"{ratios[worst]:.2f}x, {worst}, {best_peer(row)} | {behind}{', ' if failed else ''}"
            f"{_count(failed, 'failed') if failed else ''} |"
        )
    return "\n".join([*lines, "", other_sizes(results), "", *sources(results)]) + "\n"


def other_sizes(results: KernelResults) -> str:
    """What the summary leaves out: how many rows are not of round sizes, and which of them are behind or failed."""
    rows = [row for row in results.rows.values() if row["odd"]]
    if not rows:
        return "Round sizes only; no other sizes were measured."
    ratios = {f"{row['op']} {_named(row)}": ratio for row in rows if (ratio := speed_ratio(row)) is not None}
    behind = [f"{name} ({_below_one(ratios[name])})" for name in sorted(ratios, key=ratios.__getitem__)]
    behind = behind[: sum(ratio < 1 for ratio in ratios.values())]
    failed = [f"{row['op']} {_named(row)}" for row in rows if ours(row) is None]
    kind = "(off block borders, one row)"
    start = f"Of the {len(rows)} rows of other sizes {kind}" if len(rows) > 1 else f"The one row of another size {kind}"
    said = [_verdict(behind, "behind", len(rows)), *([_verdict(failed, "failed", len(rows))] if failed else [])]
    return f"Round sizes only. {start} {'; '.join(said)}."


def _verdict(names: list[str], word: str, rows: int) -> str:
    """Such as 3 are behind: a, b, c; of a single row no number, as the sentence begins with it."""
    verb = word if word == "failed" else f"{'is' if len(names) < 2 else 'are'} {word}"
    if rows == 1:
        return verb if names else verb.replace("is ", "is not ")
    more = f" and {len(names) - NAMED_ROWS} more" if len(names) > NAMED_ROWS else ""
    return f"{len(names)} {verb}: {', '.join(names[:NAMED_ROWS])}{more}" if names else f"none {verb}"


def _below_one(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 0.995 else f"{ratio:.4f}x"  # or it would read as 1.00


def _count(names: list[str], word: str) -> str:
    return f"{len(names)} {word}".strip()


def sources(results: KernelResults) -> list[str]:
    """Card, versions and commit, once where the files agree."""
    seen: list[str] = []
    for source in results.sources:
        facts = source["environment"]
        driver = f", driver {facts['driver']}" if "driver" in facts else ""
        peers = ", ".join(f"{name} {version}" for name, version in sorted(source["peers"].items()))
        line = f"{facts['card']}{driver}, commit {facts['commit']}; {peers}."
        if line not in seen:
            seen.append(line)
    if not results.shows_gpu:
        seen.append("Small shapes, or no GPU: these figures show nothing about GPUs.")
    return seen


def _others(row: Row, best: str | None, noted: set[tuple[str, str]]) -> str:
    """Everyone else: times, then what failed, in short; without those that the note under the table has."""
    cells = []
    for name, m in row["providers"].items():
        if name in (OURS, best) or (name, m["status"]) in noted:
            continue
        time = f" {milliseconds(m['ms'])}" if m["ms"] else ""
        state = "" if m["status"] == "ok" else f" ({_short(m['status'])})"
        cells.append(f"{name}{time}{state}")
    return "; ".join(cells)


def _not_timed(rows: list[Row]) -> dict[tuple[str, str], int]:
    """(provider, status) -> in how many rows it was not timed for that reason, where these are several."""
    pairs = [(name, m["status"]) for row in rows for name, m in row["providers"].items() if name != OURS]
    return {pair: n for pair, n in Counter(pairs).items() if n > 1 and pair[1].startswith(NOT_TIMED)}


def _not_timed_note(noted: dict[tuple[str, str], int], rows: int) -> list[str]:
    if not noted:
        return []
    said = (
        f"{name} in {'all' if n == rows else f'{n} of the {rows}'} rows ({_short(status.removeprefix(NOT_TIMED), 200)})"
        for (name, status), n in noted.items()
    )
    return ["", f"Not timed: {', '.join(said)}."]


def plain(text: str) -> str:
    """Text without the colours that some compilers give their messages, also where one was cut off."""
    return re.sub(r"\x1b(\[[0-9;]*[A-Za-z]?)?", "", text)


def _short(status: str, longest: int = CELL) -> str:
    """A status as a part of a line: no colours, no column borders, an object by its type's name and not by its repr, no
    addresses, and cut at a word where it is longer than `longest`."""
    text = plain(status).replace("|", "/")
    shorter = ""
    while shorter != text:  # a repr in a repr
        shorter, text = text, re.sub(r"(?<!\w)<([A-Za-z_][\w.]*)[^<>]*>", r"\1", text)
    text = re.sub(r"(?<!\w)<([A-Za-z_][\w.]*) [^<>]*$", r"\1", text)  # the message was cut off within it
    text = re.sub(r"( at)? ?\b0x[0-9a-fA-F]{6,}\b", "", text)
    text = re.sub(r"\berror\[\w+\]: ", "", text)  # a compiler's class of errors
    if len(text) <= longest:
        return text
    text = text[: longest - 2].rpartition(" ")[0] or text[: longest - 3]
    if text.count("(") > text.count(")"):
        text = text.rpartition("(")[0]
    return text.rstrip(" ,;:.(") + "..."


def _rate(row: Row, m: Row) -> str:
    if m["tflops"]:
        return f"{m['tflops']:,.0f} TFLOP/s"
    return f"{m['gb_s']:,.0f} GB/s" if m["gb_s"] else ""


def full_tables(results: KernelResults) -> str:
    """A table an op, a line a row and direction, round sizes first."""
    lines: list[str] = []
    for op, rows in _by_op(results).items():
        copies = any(row.get("copy_ms") for row in rows)  # not in older files
        columns = (
            "shape", "pass", "fuselm ms", "in a CUDA graph", "rate", "of ceiling",
            *(["a copy of as many bytes, ms"] if copies else []), "extra memory", "best peer",
            "its extra memory", "best peer / fuselm", "goal, ms", "others, ms",
        )  # fmt: skip
        lines += [f"### {op}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        noted = _not_timed(rows)
        for row in sorted(rows, key=lambda row: row["odd"]):
            best = best_peer(row)
            mine = row["providers"].get(OURS)
            cells = [row["label"], row["direction"]]
            if mine and mine["ms"]:
                share = f"{mine['share']:.0%}" if mine["share"] else ""
                cells += [milliseconds(mine["ms"]), milliseconds(mine["graph_ms"]), _rate(row, mine), share]
            else:
                cells += [_short(mine["status"]) if mine else "not measured", "", "", ""]
            if copies:
                cells.append(milliseconds(row.get("copy_ms")))
            cells.append(_memory(mine) if mine and mine["ms"] else "")
            if best:
                peer = row["providers"][best]
                graph = f" ({milliseconds(peer['graph_ms'])} in a graph)" if peer["graph_ms"] else ""
                cells += [f"{best} {milliseconds(peer['ms'])}{graph}", _memory(peer)]
            else:
                cells += ["", ""]
            ratio = speed_ratio(row)
            cells += ["" if ratio is None else f"{ratio:.2f}x", goal_of(row), _others(row, best, set(noted))]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [*_not_timed_note(noted, len(rows)), ""]
    lines += [*_odd_sizes(results), *_compiled(results), *_deterministic(results), *_small_chunks(results)]
    if results.missing:
        reasons = "; ".join(f"{name} ({_short(reason, 120)})" for name, reason in results.missing.items())
        lines += [f"Not compared: {reasons}.", ""]
    if results.left_out:
        lines += [f"Left out, no time: {'; '.join(results.left_out)}.", ""]
    ceilings = results.sources[-1]["ceilings"]
    if ceilings["copy_gb_s"]:
        loaded = [rate for row in results.rows.values() if (rate := row.get("product_tflops"))]  # not in older files
        after = ""
        if loaded:
            after = f"; right after the load of long calls, in their rounds, {min(loaded):,.0f} to {max(loaded):,.0f}"
        lines += [
            f"Ceilings of the card in the same run: copy {ceilings['copy_gb_s']:,.0f} GB/s (read plus written), bf16 "
            f"matmul of 8192³ {ceilings['matmul_tflops']:,.0f} TFLOP/s{after}.",
            "",
        ]
    return "\n".join([*lines, *sources(results)]) + "\n"


def _memory(m: Row) -> str:
    return "" if m["extra_gib"] is None else f"{m['extra_gib']:.2f} GiB"


def goal_of(row: Row) -> str:
    """Whether the goal is met: in milliseconds, and beside the peer that was best when it was set. "" for no goal."""
    goal, mine, peer = row["goal_ms"], ours(row), goal_ratio(row)
    if goal is None:
        return ""
    text = f"{goal:g} {'met' if mine and mine['ms'] <= goal else 'missed'}"
    if peer is None:
        return text
    name, ratio, asked = peer
    return f"{text}; {ratio:.3f} of {name} (asked {asked:.3f}) {'met' if ratio <= asked else 'missed'}"


def goal_ratio(row: Row) -> tuple[str, float, float] | None:
    """(the peer that was best when the goal was set, our time over its, what the goal was over its); None without, or
    where it is more than a tenth faster or slower than then, which is more than cards of one kind differ by: its time
    then held what launching took, or it has changed."""
    if not row.get("goal_peer") or (mine := ours(row)) is None:  # not in older files
        return None
    name, then = row["goal_peer"]
    now = row["providers"].get(name)
    if not now or now["status"] != "ok" or not now["ms"]:
        return None
    if abs(now["ms"] / then - 1) > PEER_DIFFERS:
        return None
    return name, mine["ms"] / now["ms"], row["goal_ms"] / then


def odd_slowdowns(results: KernelResults) -> dict[str, float]:
    """Row -> time by the work done, over that of the round size beside it: 1.0 is as fast."""
    found = {}
    for row in results.rows.values():
        beside = results.rows.get((row["op"], row["near"], row["direction"]))
        if not row["near"] or beside is None:
            continue
        this, that = ours(row), ours(beside)
        if this and that:
            work = "flops" if row["flops"] else "bytes"
            found[f"{row['op']} {_named(row)}"] = (this["ms"] / row[work]) / (that["ms"] / beside[work])
    return found


def _odd_sizes(results: KernelResults) -> list[str]:
    slowdowns = odd_slowdowns(results)
    if not slowdowns:
        return []
    lines = ["### Sizes off the block borders", "", "| row | time for the same work, round size = 1 |", "|---|---|"]
    return [*lines, *(f"| {name} | {slowdown:.2f} |" for name, slowdown in slowdowns.items()), ""]


def _compiled(results: KernelResults) -> list[str]:
    lines = [
        "### Inside torch.compile",
        "",
        "| row | eager launch, ms | compiled, ms | compiled / eager |",
        "|---|---|---|---|",
    ]
    rows = [row for row in results.rows.values() if f"{OURS}, compiled" in row["providers"]]
    for row in rows:
        compiled, mine = row["providers"][f"{OURS}, compiled"], ours(row)
        which = "graph_ms" if mine and mine["graph_ms"] and compiled["graph_ms"] else "ms"
        if mine and compiled[which]:
            cells = milliseconds(mine[which]), milliseconds(compiled[which]), f"{compiled[which] / mine[which]:.2f}"
        else:
            cells = (_short(mine["status"]) if mine else "", _short(compiled["status"]), "")
        lines.append(f"| {row['op']} {_named(row)} | {' | '.join(cells)} |")
    return [*lines, "", "Of short calls both are replayed from a CUDA graph.", ""] if rows else []


def deterministic_cost(row: Row) -> float | None:
    """Time of our deterministic kernels over that of the default ones; None where one of the two is not there."""
    mine, fixed = ours(row), row["providers"].get(DETERMINISTIC)
    return fixed["ms"] / mine["ms"] if mine and fixed and fixed["status"] == "ok" and fixed["ms"] else None


def _deterministic(results: KernelResults) -> list[str]:
    lines = [
        "### The same bits in every run",
        "",
        "| row | fuselm ms | deterministic, ms | cost |",
        "|---|---|---|---|",
    ]
    rows = [r for r in results.rows.values() if r["direction"] == "backward" and DETERMINISTIC in r["providers"]]
    for row in rows:
        mine, fixed, cost = ours(row), row["providers"][DETERMINISTIC], deterministic_cost(row)
        cells = (milliseconds(fixed["ms"]) or _short(fixed["status"]), "" if cost is None else f"{cost:.2f}x")
        lines.append(
            f"| {row['op']} {_named(row)} | {milliseconds(mine['ms']) if mine else ''} | {' | '.join(cells)} |"
        )
    return [*lines, ""] if rows else []


def _small_chunks(results: KernelResults) -> list[str]:
    lines = [
        "### With a buffer of logits no larger than Liger's",
        "",
        "| row | fuselm ms | extra memory | Liger ms | extra memory | Liger / fuselm |",
        "|---|---|---|---|---|---|",
    ]
    rows = [r for r in results.rows.values() if {"Liger", f"{OURS}, Liger's chunk"} <= r["providers"].keys()]
    for row in rows:
        pair = [row["providers"][name] for name in (f"{OURS}, Liger's chunk", "Liger")]
        cells = [cell for m in pair for cell in (milliseconds(m["ms"]) or _short(m["status"]), _memory(m))]
        ratio = f"{pair[1]['ms'] / pair[0]['ms']:.2f}x" if pair[0]["ms"] and pair[1]["ms"] else ""
        lines.append(f"| {row['op']} {_named(row)} | {' | '.join(cells)} | {ratio} |")
    return [*lines, ""] if rows else []


@dataclass
class Change:
    """A row that changed between two result files by more than its spread.

    Attributes:
        row: its name.
        text: what changed.
        worse: whether the gate closes for it.
    """

    row: str
    text: str
    worse: bool


def _drifts(before: Row, after: Row) -> list[float]:
    """New over old time of each peer that is in both."""
    then, now = peers_of(before), peers_of(after)
    return [now[name]["ms"] / then[name]["ms"] for name in then if name in now]


def changes(old: KernelResults, new: KernelResults, tolerance: float) -> list[Change]:
    """Compares our times, each first divided by the median change of the same row's peers, or where it has fewer than
    three by that of all rows' peers: a card drifts by more than many a change. A time counts as changed if the
    intervals of 20 to 80 % are apart and the medians by `tolerance` (a fraction); memory if it grew by that. A row that
    is gone, or fails now, is worse.
    """
    found: list[Change] = []
    everywhere = [d for key, row in old.rows.items() if key in new.rows for d in _drifts(row, new.rows[key])]
    for key, before in old.rows.items():
        name, after = " ".join(key), new.rows.get(key)
        then = ours(before)
        if then is None:
            continue
        now = ours(after) if after else None
        if after is None or now is None:
            status = after["providers"].get(OURS, {}).get("status", "not measured") if after else "not measured"
            found.append(Change(name, plain(status), True))
            continue
        drifts = _drifts(before, after)
        drift = statistics.median(drifts if len(drifts) >= 3 else everywhere or [1.0])
        low, middle, high = (now[part] / drift for part in ("low_ms", "ms", "high_ms"))
        text = f"{milliseconds(then['ms'])} -> {milliseconds(middle)} ms"
        text += f" (measured {milliseconds(now['ms'])}, peers x{drift:.3f})"
        if low > then["high_ms"] and middle > then["ms"] * (1 + tolerance):
            found.append(Change(name, f"slower: {text}", True))
        elif high < then["low_ms"] and middle < then["ms"] * (1 - tolerance):
            found.append(Change(name, f"faster: {text}", False))
        if then["extra_gib"] is not None and now["extra_gib"] is not None:
            grown = now["extra_gib"] - then["extra_gib"]
            if grown > max(tolerance * then["extra_gib"], 2.0**-10):
                text = f"more memory: {then['extra_gib']:.3f} -> {now['extra_gib']:.3f} GiB"
                found.append(Change(name, text, True))
    return found
