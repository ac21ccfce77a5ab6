"""Launch choices of linear_cross_entropy: how many rows of logits exist at a time."""

from __future__ import annotations

_BUFFER_BYTES = 1 << 30
_MAX_ROWS = 4096
_MIN_ROWS = 512
_TILE_ROWS = 128


def row_bytes(vocab: int, itemsize: int) -> int:
    """Bytes of one row of logits in the buffer, whose rows start on 16-byte borders."""
    return -(-vocab * itemsize // 16) * 16


def chunk_rows(rows: int, vocab: int, itemsize: int, memory_budget: int = 0) -> int:
    """Rows of a chunk for `rows` rows of `vocab` logits of `itemsize` bytes.

    Large chunks make efficient matrix multiplications and save passes over the fp32 dw (one read and one write each);
    beyond 4096 rows that gain is small and only memory grows. A chunk keeps to about 1 GiB down to 512 rows, below
    which the multiplications slow down; with a `memory_budget` (bytes, 0 for none) it takes what that allows. Chunks
    are evened out, in multiples of 128 rows (a tile of the multiplication) where they are that large.
    """
    rows = max(rows, 1)
    size = row_bytes(vocab, itemsize)
    if memory_budget:
        limit = max(memory_budget // size, 1)
    else:
        limit = min(max((_BUFFER_BYTES + _BUFFER_BYTES // 32) // size, _MIN_ROWS), _MAX_ROWS)
    tile = _TILE_ROWS if limit >= _TILE_ROWS else 1
    limit = limit // tile * tile
    even = -(-rows // -(-rows // limit))
    return min(-(-even // tile) * tile, rows)
