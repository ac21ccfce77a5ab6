"""Pictures of compare_kernels.py's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from peers.base import OURS, is_ours
from report_kernels import KernelResults, Row, best_peer, ours, peers_of

OUR_COLOUR, PEER_COLOUR = "#0b3c6f", "#e08a1e"  # told apart in greyscale too
# A marker a provider, so that they are told apart without colour; light and dark take turns.
STYLES: dict[str, tuple[str, str]] = {
    "eager": ("x", "#777777"),
    "torch.compile": ("D", "#8fb8de"),
    "Liger": ("s", "#e08a1e"),
    "QuACK": ("^", "#2e7d4f"),
    "CCE": ("v", "#7b4fa3"),
    "torch fused": ("P", "#e0b41e"),
    "torch foreach": ("X", "#9a9a9a"),
    "cuDNN (SDPA)": ("s", "#76b041"),
    "FA2 (SDPA)": ("v", "#c9a36a"),
    "FA4": ("^", "#a3242a"),
    "flash-attn": ("<", "#5a5a9a"),
    "Flex": ("D", "#d98cb3"),
    "apex": ("h", "#333333"),
}
OTHER_STYLE = ("*", "#444444")


def style_of(provider: str) -> tuple[str, str]:
    """(marker, colour); a variant ("QuACK, in place") has its provider's."""
    return STYLES.get(provider, STYLES.get(provider.split(",")[0], OTHER_STYLE))


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """As PNG and SVG."""
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        # The same results give the same file.
        with plt.rc_context({"svg.hashsalt": name}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def relative_times(results: KernelResults, folder: Path) -> list[Path]:
    """kernels.png: each peer's time over ours, a line a row; a marker left of 1 is a peer that is faster."""
    rows = [row for row in results.rows.values() if not row["odd"] and ours(row) and peers_of(row)]
    figure, axes = plt.subplots(figsize=(9.5, 1.6 + 0.27 * len(rows)), dpi=130, layout="constrained")
    shown: dict[str, tuple[str, str]] = {}
    for height, row in enumerate(rows):
        mine = ours(row)
        assert mine is not None
        for name, m in peers_of(row).items():
            marker, colour = shown.setdefault(name.split(",")[0], style_of(name))
            filled = "none" if "in place" in name and marker not in "xX" else colour
            axes.plot(m["ms"] / mine["ms"], height, marker, color=colour, mfc=filled, ms=6.5, mew=1.4, ls="none")
        if height and row["op"] != rows[height - 1]["op"]:
            axes.axhline(height - 0.5, color="#bbbbbb", lw=0.8)
    axes.axvline(1.0, color=OUR_COLOUR, lw=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([0.8, 1, 1.25, 1.5, 2, 3, 5, 10])
    axes.set_yticks(range(len(rows)), [f"{r['op']}  {r['label']}  {r['direction']}" for r in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("time relative to fuselm (1 = fuselm; left of the line: faster than fuselm)")
    axes.set_title(f"Kernels against their peers, {results.sources[-1]['environment']['card']}", fontsize=11)
    handles = [Line2D([], [], marker=m, color=c, ls="none", ms=6.5, label=n) for n, (m, c) in shown.items()]
    handles.append(Line2D([], [], color=OUR_COLOUR, lw=2, label=OURS))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, title="hollow: in place")
    return save(figure, folder, "kernels")


def roofline_shares(results: KernelResults, folder: Path) -> list[Path]:
    """kernels_roofline.png: what share of the card's copy or matmul rate we and the best peer reach, a line a row."""
    rows = [r for r in results.rows.values() if not r["odd"] and (mine := ours(r)) and mine["share"]]
    if not rows:
        return []
    figure, axes = plt.subplots(figsize=(9.5, 1.4 + 0.3 * len(rows)), dpi=130, layout="constrained")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for height, row in enumerate(rows):
        mine, best = ours(row), best_peer(row)
        assert mine is not None
        axes.barh(height - 0.19, mine["share"], 0.36, color=OUR_COLOUR)
        label = f"{mine['share']:.0%}"
        if best and row["providers"][best]["share"]:
            share = row["providers"][best]["share"]
            axes.barh(height + 0.19, share, 0.36, color=PEER_COLOUR)
            label += f"  |  {best} {share:.0%}"
            axes.text(max(mine["share"], share) + 0.01, height, label, va="center", fontsize=7.5, bbox=box)
        else:
            axes.text(mine["share"] + 0.01, height, label, va="center", fontsize=7.5, bbox=box)
    axes.axvline(1.0, color="#666666", lw=1, ls="--", zorder=0)
    axes.set_xlim(0, 1.5)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_yticks(range(len(rows)), [f"{r['op']}  {r['label']}  {r['direction']}" for r in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlabel(
        "share of the measured ceiling: copying, or bf16 matmul where multiplications are the bound", fontsize=8
    )
    axes.set_title(f"Share of the roofline, {results.sources[-1]['environment']['card']}", fontsize=11)
    handles = [Patch(color=OUR_COLOUR, label=OURS), Patch(color=PEER_COLOUR, label="best peer")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    return save(figure, folder, "kernels_roofline")


def times_by_size(results: KernelResults, folder: Path) -> list[Path]:
    """kernels_time.png: milliseconds of every provider at every size, a panel a kernel and direction."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows.values():
        if ours(row):
            panels.setdefault((row["op"], row["direction"]), []).append(row)
    if not panels:
        return []
    columns = 3
    lines = -(-len(panels) // columns)
    size = (13, 4.2 * lines + 0.8)
    figure, grid = plt.subplots(lines, columns, figsize=size, dpi=110, layout="constrained", squeeze=False)
    shown: dict[str, tuple[str, str]] = {OURS: ("_", OUR_COLOUR)}
    for axes, ((op, direction), rows) in zip(grid.flat, panels.items(), strict=False):
        rows.sort(key=lambda row: row["flops"] or row["bytes"])
        for place, row in enumerate(rows):
            for name, m in row["providers"].items():
                if name != OURS and (is_ours(name) or name not in peers_of(row)):
                    continue
                marker, colour = shown.setdefault(name.split(",")[0], style_of(name))
                filled = "none" if "in place" in name and marker not in "xX" else colour
                wide = 22 if name == OURS else 6
                axes.plot(place, m["ms"], marker, color=colour, mfc=filled, ms=wide, mew=2 if wide > 6 else 1.2)
        axes.set_yscale("log")
        axes.set_title(f"{op} {direction}", fontsize=10)
        axes.set_ylabel("ms", fontsize=8)
        labels = [row["label"].replace(", ", ",\n", 1) for row in rows]
        axes.set_xticks(range(len(rows)), labels, rotation=40, ha="right", fontsize=7)
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", labelsize=8)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles = [Line2D([], [], marker=m, color=c, ls="none", ms=7, mew=1.6, label=n) for n, (m, c) in shown.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=9, title="hollow: in place")
    return save(figure, folder, "kernels_time")
