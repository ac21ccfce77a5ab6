"""What L2 is told of the elements that a kernel reads once."""

from __future__ import annotations

_VECTOR_BYTES = 16


def load_hint(run_bytes: int) -> str:
    """The eviction policy of loads: "evict_last" where runs of `run_bytes` are read in whole 16-byte vectors, else "".

    H200, bf16, of the time without, from small calls to large ones: rms_norm 0.95 to 0.98, add_rms_norm 0.94 to 0.98,
    swiglu's backward pass 0.97 to 0.985, rope 0.96 to 0.985; with the copy of other 64 MB that came after it 0.97 to
    1.005 (benchmarks/results/tune_hints_and_what_follows.json). Narrow loads, of swiglu's unaligned rows,
    gained at some launches and lost at others (tune_rope_in_turn.json).
    """
    return "" if run_bytes % _VECTOR_BYTES else "evict_last"
