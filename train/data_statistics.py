"""What is in a data set: documents, bytes and tokens of each source and split, and how long documents are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BINS = 48  # by powers of two: bin k counts documents of 2^k to 2^(k+1) - 1 tokens


class DataStatistics:
    """Counts, by split and source.

    Args:
        names: of the sources.
        state: what `state()` of an earlier object gave; this one counts on.
    """

    def __init__(self, names: list[str], state: dict[str, Any] | None = None) -> None:
        self.names = names
        self._rows: dict[str, dict[str, Any]] = state or {
            split: {
                name: {"documents": 0, "tokens": 0, "text_bytes": 0, "lengths": [0] * BINS, "longest": 0}
                for name in names
            }
            for split in ("train", "validation")
        }

    def state(self) -> dict[str, Any]:
        """The counts: by split, then by source, `documents`, `tokens` (BOS and EOS among them), `text_bytes`, the
        `longest` document in tokens, and how many documents have 2^k to 2^(k+1) - 1 tokens in `lengths[k]`."""
        return self._rows

    def text(self, split: str, source: int, text_bytes: int) -> None:
        """Counts a piece of text."""
        self._rows[split][self.names[source]]["text_bytes"] += text_bytes

    def document(self, split: str, source: int, tokens: int) -> None:
        """Counts a document that is complete."""
        row = self._rows[split][self.names[source]]
        row["documents"] += 1
        row["tokens"] += tokens
        row["lengths"][tokens.bit_length() - 1] += 1
        row["longest"] = max(row["longest"], tokens)

    def table(self) -> list[str]:
        """Lines for people."""
        lines = [
            f"  {'split':<10} {'source':<20} {'documents':>12} {'tokens':>16} {'bytes':>16} {'bytes/token':>11}"
            f" {'median':>8} {'longest':>11}"
        ]
        for split, rows in self._rows.items():
            for name, row in rows.items():
                ratio = f"{row['text_bytes'] / row['tokens']:.3f}" if row["tokens"] else "-"
                lines.append(
                    f"  {split:<10} {name[:20]:<20} {row['documents']:>12,} {row['tokens']:>16,} "
                    f"{row['text_bytes']:>16,} {ratio:>11} {_median(row['lengths']):>8} {row['longest']:>11,}"
                )
        return lines + self._histogram()

    def _histogram(self) -> list[str]:
        counts = [sum(row["lengths"][k] for rows in self._rows.values() for row in rows.values()) for k in range(BINS)]
        total = sum(counts)
        if not total:
            return []
        used = [k for k in range(BINS) if counts[k]]
        lines = [f"  {'tokens a document':<23} {'documents':>12} {'share':>7}"]
        for k in range(used[0], used[-1] + 1):
            bounds = f"{1 << k:,} to {(2 << k) - 1:,}"
            lines.append(f"  {bounds:<23} {counts[k]:>12,} {counts[k] / total:>7.2%}")
        return lines

    def draw(self, image: Path) -> None:
        """Draws the histogram of lengths in tokens, of training and validation together."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110, layout="constrained")
        last = 1
        width = 0.9 / len(self.names)
        for number, name in enumerate(self.names):
            counts = [sum(rows[name]["lengths"][k] for rows in self._rows.values()) for k in range(BINS)]
            last = max([last, *(k for k in range(BINS) if counts[k])])
            places = [k + 0.5 + (number - (len(self.names) - 1) / 2) * width for k in range(BINS)]
            axes.bar(places, counts, width=width, label=name)
        axes.set_xlim(0, last + 1)
        axes.set_xticks(range(last + 2), [_short(1 << k) for k in range(last + 2)])
        axes.set_xlabel("tokens in a document, end of text included")
        axes.set_ylabel("documents")
        if max(max(row["lengths"]) for rows in self._rows.values() for row in rows.values()) >= 1000:
            axes.set_yscale("symlog", linthresh=10)  # so that the few longest documents are seen
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
        figure.savefig(image)
        plt.close(figure)


def _short(number: int) -> str:
    for size, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)


def _median(lengths: list[int]) -> str:
    """The bin that holds the median, by its lower end."""
    half, seen = sum(lengths) / 2, 0
    for k, count in enumerate(lengths):
        seen += count
        if count and seen >= half:
            return f"{_short(1 << k)}+"
    return "-"
