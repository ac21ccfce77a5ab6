"""A run as one HTML file, plots included; it needs nothing but itself."""

from __future__ import annotations

import html
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

from fuselm.train.metrics import centered_mean
from fuselm.train.watch_data import RunView, in_words

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
th { font-weight: 600; white-space: nowrap } svg { max-width: 100%; height: auto }
"""


def facts(view: RunView) -> list[tuple[str, str]]:
    """The numbers of a run in words; what is not known is left out."""
    steps, left = view.steps, view.seconds_left()
    rows = [("state", view.state()), ("step", f"{steps[-1]['step'] if steps else 0:,} of {view.total:,}")]
    if left is not None:
        rows.append(("time left", in_words(left)))

    def add(label: str, name: str, form: Callable[[float], str], *, noisy: bool = True) -> None:
        if steps and steps[-1].get(name) is not None:
            mean = view.mean(name) if noisy else None
            rows.append((label, form(steps[-1][name]) + (f" (mean {form(mean)})" if mean is not None else "")))

    add("loss", "loss", lambda x: f"{x:.4f}")
    add("gradient norm", "grad_norm", lambda x: f"{x:.3f}")
    add("tokens a second", "tokens_per_second", lambda x: f"{x:,.0f}")
    add("TFLOP/s a device", "tflops", lambda x: f"{x:.3g}")
    add("MFU", "mfu", lambda x: f"{x:.1%}")
    add("learning rate", "lr", lambda x: f"{x:.3g}", noisy=False)
    add("tokens", "tokens", lambda x: f"{x:,}", noisy=False)
    add("memory", "memory_gib", lambda x: f"{x:.2f} GiB", noisy=False)
    if view.validations:
        step, loss = view.validations[-1]
        best_step, best = min(view.validations, key=lambda pair: pair[1])
        rows.append(("validation loss", f"{loss:.4f} at step {step:,}; best {best:.4f} at step {best_step:,}"))
    skipped = [e["step"] for e in steps if e.get("skipped")]
    if skipped:
        rows.append(("skipped steps", f"{len(skipped)}, the last one {skipped[-1]:,}"))
    return rows


def report(view: RunView) -> str:
    """The HTML text."""
    title = html.escape(view.run.name)
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts(view))
    events = "".join(
        f"<tr><td>{html.escape(e['time'])}</td><th>{html.escape(e['kind'])}</th><td>{html.escape(e['message'])}</td></tr>"
        for e in reversed(view.events.entries)
    )
    model = f"{view.config.model.num_layers} layers, dim {view.config.model.dim}"
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>preset {html.escape(view.config.preset)}, {model}; written {html.escape(written)}</p>"
        f"<table>{rows}</table>{_plots(view)}<h2>Events</h2>"
        f"<table>{events or '<tr><td>none</td></tr>'}</table></body></html>\n"
    )


def _plots(view: RunView) -> str:
    steps = [e for e in view.steps if e.get("loss") is not None]
    if not steps:
        return "<p>No step was done yet.</p>"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (name, label, scale) in zip(
        axes.flat,
        (
            ("loss", "loss (nats per token)", "linear"),
            ("grad_norm", "gradient norm", "log"),
            ("lr", "learning rate", "linear"),
            ("tokens_per_second", "tokens a second", "linear"),
        ),
        strict=True,
    ):
        points = [(e["step"], e[name]) for e in steps if e.get(name) is not None]
        _curve(axis, points)
        axis.set_ylabel(label)
        axis.set_xlabel("optimizer step")
        axis.set_yscale(scale if all(y > 0 for _, y in points) else "linear")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    if view.validations:
        axes[0, 0].plot(
            *zip(*view.validations, strict=True), color="#c0392b", marker="o", markersize=3, label="validation"
        )
        axes[0, 0].legend()
    for entry in view.steps:
        if entry.get("skipped"):
            for axis in axes[0]:
                axis.axvline(entry["step"], color="#e67e22", alpha=0.5, linewidth=1)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _curve(axis: Any, points: Sequence[tuple[int, float]]) -> None:
    if not points:
        return
    if len(points) > 4000:  # a report stays small
        points = points[:: len(points) // 4000 + 1]
    steps, values = zip(*points, strict=True)
    smooth = len(points) >= 50
    axis.plot(steps, values, color="#9db8d9" if smooth else "#1f4e8c", linewidth=1)
    if smooth:
        axis.plot(steps, centered_mean(values, 10), color="#1f4e8c", linewidth=1.5)
