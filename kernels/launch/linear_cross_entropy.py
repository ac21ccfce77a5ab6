"""Launch choices of linear_cross_entropy: how many rows of logits exist at a time."""

from __future__ import annotations

_BUFFER_BYTES = 1 << 30
_MAX_ROWS = 4096
_MIN_ROWS = 512


def chunk_rows(rows: int, vocab: int, itemsize: int) -> int:
    """Rows of a chunk for `rows` rows of `vocab` logits of `itemsize` bytes.

    Large chunks make efficient matrix multiplications and save passes over the fp32 dw (one read and one write each);
    beyond 4096 rows that gain is small and only memory grows. A chunk keeps to about 1 GiB down to 512 rows, below
    which the multiplications slow down. Chunks are evened out, in multiples of 128 rows (a tile of the multiplication).
    """
    limit = min(max((_BUFFER_BYTES + _BUFFER_BYTES // 32) // (vocab * itemsize), _MIN_ROWS), _MAX_ROWS)
    chunks = -(-max(rows, 1) // limit)
    even = -(-max(rows, 1) // chunks)
    return min(-(-even // 128) * 128, max(rows, 1))
