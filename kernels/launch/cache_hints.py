"""What L2 is told of the elements that a kernel reads once."""

from __future__ import annotations

# Above what an L2 cache holds: in a smaller call the results stay in L2 too, where the inputs would be in their way.
_MORE_THAN_L2 = 2**26


def load_hint(bytes_read: int) -> str:
    """The eviction policy of loads: "evict_last" where a call reads more than L2 holds, else "".

    H200, bf16, of the time without: rope of 25 MB of heads 1.04 to 1.05, of 84 to 168 MB 0.97 to 1.00, swiglu of 335 MB
    to 1.6 GB 0.985 to 0.994 (benchmarks/results/tune_rope_hints.json).
    """
    return "evict_last" if bytes_read >= _MORE_THAN_L2 else ""
