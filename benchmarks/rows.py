"""The rows of the kernel comparison: op, shape, directions, and what bounds each.

The shapes are those of Llama-like models; `odd` rows stand beside a round one (`near`) and should move as many bytes a
second, or do as many operations, as that. `goal_ms` is what the project wants on an H200, in milliseconds; on another
card it says nothing. Cards of one kind differ by several percent, so a goal is a ratio as well: to the time of the peer
that was best when the goal was set (GOAL_PEERS), in the same run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from fuselm.kernels.specs.base import Case, KernelSpec
from fuselm.kernels.specs.registry import SPECS

FORWARD, BACKWARD, BOTH, STEP = "forward", "backward", "forward+backward", "clip+step"
SPEC_OF: dict[str, KernelSpec] = {spec.name: spec for spec in SPECS}


@dataclass(frozen=True, eq=False)  # a row is itself: caches are keyed by it, and its case is a dictionary
class Row:
    """One shape of one op.

    Attributes:
        op: a KernelSpec's name, or "adamw".
        label: the shape, for the table.
        case: what `make_inputs` takes.
        directions: what is timed.
        goal_ms: direction -> milliseconds to reach on an H200.
        near: label of the round shape that this odd one is compared with.
        compiled: also time our op inside torch.compile.
    """

    op: str
    label: str
    case: Case
    directions: tuple[str, ...]
    goal_ms: Mapping[str, float] = field(default_factory=dict)
    near: str = ""
    compiled: bool = False

    @property
    def name(self) -> str:
        """Op and shape."""
        return f"{self.op} {self.label}"


def _goals(directions: tuple[str, ...], goals: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(directions, goals, strict=False))


def _norm(op: str, rows: int, n: int, *goals: float, near: str = "", compiled: bool = False) -> Row:
    directions = (FORWARD, BACKWARD)
    return Row(op, f"{rows}x{n}", {"rows": (rows,), "n": n}, directions, _goals(directions, goals), near, compiled)


def _loss(rows: int, vocab: int, *goals: float, near: str = "", compiled: bool = False) -> Row:
    case = {"rows": (rows,), "vocab": vocab, "ignored": 0.0}
    return Row("cross_entropy", f"{rows}x{vocab}", case, (BOTH,), _goals((BOTH,), goals), near, compiled)


def _linear_loss(rows: int, dim: int, vocab: int, *goals: float, near: str = "") -> Row:
    case = {"rows": (rows,), "dim": dim, "vocab": vocab, "ignored": 0.0}
    label = f"{rows}x{dim}x{vocab}"
    return Row("linear_cross_entropy", label, case, (BOTH,), _goals((BOTH,), goals), near)


def _swiglu(rows: int, ffn: int, *goals: float, near: str = "", compiled: bool = False) -> Row:
    directions = (FORWARD, BOTH)
    return Row(
        "swiglu", f"{rows}x{ffn}", {"rows": (rows,), "ffn": ffn}, directions, _goals(directions, goals), near, compiled
    )


def _rope(batch: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, *goals: float, near: str = "") -> Row:
    case = {"lead": (batch, seq_len), "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "packed_qkv": True}
    directions = (FORWARD, BOTH)
    label = f"{batch}x{seq_len}, {heads}+{kv_heads} heads of {head_dim}"
    return Row("rope", label, case, directions, _goals(directions, goals), near, compiled=bool(goals))


def _attention(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, *goals: float, near: str = "") -> Row:
    case = {"batch": batch, "lengths": (length, length), "heads": (heads, kv_heads), "head_dim": head_dim}
    directions = (FORWARD, BACKWARD, BOTH)
    return Row(
        "attention",
        f"{batch}x{length}, {heads}/{kv_heads} heads of {head_dim}",
        case,
        directions,
        _goals(directions, goals),
        near,
    )


def document_lengths(tokens: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of documents that fill `tokens`: log-uniform between the two, always the same, the last one cut off."""
    generator, lengths = random.Random(seed), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(round(shortest * (longest / shortest) ** generator.random()), left))
    return lengths


def _documents(tokens: int, shortest: int, longest: int, heads: int, kv_heads: int, head_dim: int) -> Row:
    """Causal attention within each document of one packed batch."""
    lengths = document_lengths(tokens, shortest, longest)
    case = {
        "lengths": (tokens, tokens),
        "documents_q": (0, *accumulate(lengths)),
        "heads": (heads, kv_heads),
        "head_dim": head_dim,
    }
    label = f"{tokens} in {len(lengths)} documents, {heads}/{kv_heads} heads of {head_dim}"
    return Row("attention", label, case, (FORWARD, BACKWARD, BOTH))


def _window(batch: int, length: int, window: int, heads: int, kv_heads: int, head_dim: int) -> Row:
    """Causal attention in which a query sees its own key and the window - 1 before it."""
    case = {
        "batch": batch,
        "lengths": (length, length),
        "window": window,
        "heads": (heads, kv_heads),
        "head_dim": head_dim,
    }
    label = f"{batch}x{length}, window {window}, {heads}/{kv_heads} heads of {head_dim}"
    return Row("attention", label, case, (FORWARD, BACKWARD, BOTH))


def _llama_shapes(layers: int, dim: int, kv_dim: int, ffn: int, vocab: int) -> tuple[tuple[int, ...], ...]:
    """Parameters of a Llama whose head is its embedding: (vocab, dim), a layer's packed matrices and norms, a norm."""
    block = ((dim + 2 * kv_dim, dim), (dim, dim), (2 * ffn, dim), (dim, ffn), (dim,), (dim,))
    return ((vocab, dim), *block * layers, (dim,))


def _adamw(mode: str, *goals: float, shapes: tuple[tuple[int, ...], ...] = ()) -> Row:
    shapes = shapes or _llama_shapes(16, 2048, 512, 8192, 128256)
    case = {"shapes": shapes, "mode": mode, "max_grad_norm": 1.0}
    text = {"fp32": "all fp32", "bf16": "all bf16", "master": "bf16, fp32 master and moments"}[mode]
    label = f"{sum(torch.Size(s).numel() for s in shapes) / 1e9:.3f}e9, {text}"
    return Row("adamw", label, case, (STEP,), _goals((STEP,), goals))


ROWS: tuple[Row, ...] = (
    _norm("rms_norm", 16384, 4096, 0.068, 0.115, compiled=True),
    _norm("rms_norm", 32768, 2048, 0.068, 0.115),
    _norm("rms_norm", 8192, 8192, 0.068, 0.125),
    _norm("rms_norm", 65536, 768, 0.052, 0.095),
    _norm("add_rms_norm", 16384, 4096, 0.131, 0.145, compiled=True),
    _loss(8192, 128256, 1.20, compiled=True),
    _loss(16384, 50304, 0.88),
    _loss(16384, 32000, 0.54),
    _swiglu(16384, 14336, 0.326, 0.871, compiled=True),
    _swiglu(32768, 8192, 0.374, 1.00),
    _rope(4, 4096, 32, 8, 128, 0.083, 0.18),
    _adamw("fp32", 9.4),
    _adamw("bf16", 4.75),
    _adamw("master", 8.9),
    _linear_loss(8192, 4096, 128256, 39.3),
    _linear_loss(16384, 2048, 128256, 41.0),
    _linear_loss(32768, 768, 50304, 13.7),
    _attention(4, 4096, 32, 8, 128, 0.90, 2.40),
    _attention(2, 8192, 32, 8, 128, 1.70, 4.75),
    _attention(1, 16384, 32, 8, 128, 3.25, 8.85),
    _attention(16, 1024, 32, 8, 128, 0.30, 1.00),
    _attention(32, 1024, 12, 12, 64, 0.150, 0.39),
    _attention(4, 4096, 32, 8, 64, 0.56, 1.50),
    _attention(1, 16384, 16, 16, 64, 1.00, 2.50),
    _documents(16384, 64, 8192, 32, 8, 128),
    _documents(16384, 64, 8192, 32, 8, 64),
    _window(1, 16384, 4096, 32, 8, 128),
)
# Row -> the best peer in each direction, and its milliseconds in the run on an H200 that the goals were set after.
GOAL_PEERS: dict[str, dict[str, tuple[str, float]]] = {
    "rms_norm 16384x4096": {FORWARD: ("Liger", 0.069), BACKWARD: ("QuACK", 0.146)},
    "rms_norm 32768x2048": {FORWARD: ("QuACK", 0.071), BACKWARD: ("QuACK", 0.189)},
    "rms_norm 8192x8192": {FORWARD: ("Liger", 0.071), BACKWARD: ("QuACK", 0.148)},
    "rms_norm 65536x768": {FORWARD: ("QuACK", 0.053), BACKWARD: ("QuACK", 0.186)},
    "add_rms_norm 16384x4096": {FORWARD: ("QuACK", 0.133), BACKWARD: ("torch.compile", 0.193)},
    "cross_entropy 8192x128256": {BOTH: ("QuACK", 1.678)},
    "cross_entropy 16384x50304": {BOTH: ("QuACK", 1.459)},
    "cross_entropy 16384x32000": {BOTH: ("QuACK", 0.815)},
    "swiglu 16384x14336": {FORWARD: ("torch.compile", 0.326), BOTH: ("torch.compile", 0.871)},
    "swiglu 32768x8192": {FORWARD: ("Liger", 0.374), BOTH: ("Liger", 1.013)},
    "rope 4x4096, 32+8 heads of 128": {FORWARD: ("Liger", 0.087), BOTH: ("Liger", 0.409)},
    "adamw 1.236e9, all fp32": {STEP: ("torch fused", 14.31)},
    "adamw 1.236e9, all bf16": {STEP: ("torch fused", 9.25)},
    "linear_cross_entropy 8192x4096x128256": {BOTH: ("torch.compile", 39.1)},
    "linear_cross_entropy 16384x2048x128256": {BOTH: ("torch.compile", 42.7)},
    "linear_cross_entropy 32768x768x50304": {BOTH: ("torch.compile", 16.4)},
    "attention 4x4096, 32/8 heads of 128": {FORWARD: ("FA4", 0.948), BACKWARD: ("FA4", 2.511)},
    "attention 2x8192, 32/8 heads of 128": {FORWARD: ("FA4", 1.779), BACKWARD: ("FA4", 4.984)},
    "attention 1x16384, 32/8 heads of 128": {FORWARD: ("FA4", 3.386), BACKWARD: ("FA4", 9.258)},
    "attention 16x1024, 32/8 heads of 128": {FORWARD: ("cuDNN (SDPA)", 0.319), BACKWARD: ("FA4", 1.072)},
    "attention 32x1024, 12/12 heads of 64": {FORWARD: ("cuDNN (SDPA)", 0.157), BACKWARD: ("FA4", 0.407)},
    "attention 4x4096, 32/8 heads of 64": {FORWARD: ("FA4", 0.593), BACKWARD: ("FA4", 1.592)},
    "attention 1x16384, 16/16 heads of 64": {FORWARD: ("FA4", 1.042), BACKWARD: ("FA4", 2.617)},
}
ODD_ROWS: tuple[Row, ...] = (
    _norm("rms_norm", 16384, 4097, near="16384x4096"),
    _norm("rms_norm", 16384, 5120, near="16384x4096"),
    _norm("rms_norm", 8193, 8192, near="8192x8192"),
    _norm("rms_norm", 1, 4096),
    _norm("add_rms_norm", 16383, 4097, near="16384x4096"),
    _loss(16384, 50257, near="16384x50304"),
    _loss(8192, 128255, near="8192x128256"),
    _loss(8193, 128256, near="8192x128256"),
    _loss(1, 128256),
    _swiglu(16383, 14335, near="16384x14336"),
    _rope(3, 4097, 32, 8, 128, near="4x4096, 32+8 heads of 128"),
    _linear_loss(32768, 768, 50257, near="32768x768x50304"),
    _attention(4, 4097, 32, 8, 128, near="4x4096, 32/8 heads of 128"),
)
TINY_ROWS: tuple[Row, ...] = (
    _norm("rms_norm", 6, 40, compiled=True),
    _norm("add_rms_norm", 3, 33),
    _loss(7, 37),
    _swiglu(5, 24),
    _rope(2, 5, 4, 2, 16),
    _adamw("fp32", shapes=((3, 5), (17,), (1,))),
    _adamw("bf16", shapes=((3, 5), (17,))),
    _adamw("master", shapes=((3, 5), (17,))),
    _linear_loss(9, 16, 37),
    _documents(29, 3, 12, 4, 2, 16),
    _window(2, 19, 7, 4, 2, 16),
    _attention(2, 19, 4, 2, 16),
)
QUICK_ROWS: tuple[Row, ...] = (  # fit into 8 GB of GPU memory, the fp64 check too
    _norm("rms_norm", 8192, 4096),
    _norm("add_rms_norm", 8192, 4096),
    _loss(4096, 32000),
    _swiglu(4096, 11008),
    _rope(2, 2048, 32, 8, 128),
    _adamw("fp32", shapes=_llama_shapes(6, 768, 256, 2048, 32000)),
    _linear_loss(4096, 2048, 32000),
    _attention(2, 2048, 32, 8, 128),
    _attention(4, 2048, 12, 12, 64),
)


def make_inputs(row: Row, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The keyword arguments of our public function; of "adamw" the parameters, with gradients, and the case's options.

    Always the same random values. Parameters are fp32 in mode "fp32" and bf16 in the others.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    if row.op != "adamw":
        return SPEC_OF[row.op].make_inputs(row.case, dtype, device, generator)
    dtype = torch.float32 if row.case["mode"] == "fp32" else torch.bfloat16
    params = []
    for shape in row.case["shapes"]:
        param, grad = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(2))
        params.append(torch.nn.Parameter(param))
        params[-1].grad = grad
    return {"params": params, "mode": row.case["mode"], "max_grad_norm": row.case["max_grad_norm"]}


def visible_pairs(case: Case) -> int:
    """Pairs of query and key that attention's mask leaves, for one head over the batch: S²/2 of a causal sequence, the
    sum of that over documents, and of a window W the square without the triangles on both sides, S·W - W²/2."""
    (length, _), batch = case["lengths"], case.get("batch", 1)
    borders = case.get("documents_q", (0, length))
    lengths = [end - start for start, end in pairwise(borders)]
    window = case.get("window") or length
    return batch * sum(n * min(window, n) - min(window, n) ** 2 // 2 for n in lengths)


def work(row: Row, dtype: torch.dtype, direction: str) -> tuple[int, int]:
    """(bytes that device memory must move at least, floating-point operations; 0 where memory is the bound).

    Attention counts 4·D operations for each pair of query and key that the mask leaves, backward 2.5 times that, a
    causal triangle as half of its square (see `visible_pairs`); a linear layer with its loss 6·R·dim·V. AdamW reads and
    writes parameter, moments and master, reads the gradient for the step and, to clip, once more before.
    """
    if row.op == "adamw":
        size = 4 if row.case["mode"] == "fp32" else 2
        bytes_each = {"fp32": 28, "bf16": 14, "master": 28}[row.case["mode"]] + size
        return bytes_each * sum(torch.Size(s).numel() for s in row.case["shapes"]), 0
    spec = SPEC_OF[row.op]
    parts = [d for d in (FORWARD, BACKWARD) if d in direction]
    moved = sum(spec.bytes_moved(row.case, dtype, d) for d in parts)  # pyright: ignore[reportArgumentType]
    if row.op == "attention":
        pairs = visible_pairs(row.case) * row.case["heads"][0]
        return moved, sum({FORWARD: 4, BACKWARD: 10}[d] for d in parts) * pairs * row.case["head_dim"]
    if spec.flops is None:
        return moved, 0
    return moved, sum(spec.flops(row.case, d) for d in parts)  # pyright: ignore[reportArgumentType]


def make_upstream(row: Row, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Gradients of the outputs, the same for every provider: random, of a loss 1; none for an optimizer."""
    if row.op == "adamw":
        return []
    if row.op.endswith("cross_entropy"):
        return [torch.ones((), device=inputs["targets"].device)]
    shapes = {
        "add_rms_norm": ("x", "x"),
        "rope": ("q", "k"),
        "attention": ("q",),
        "rms_norm": ("x",),
        "swiglu": ("gate_up",),
    }[row.op]
    like = [inputs[name] for name in shapes]
    if row.op == "swiglu":
        like = [like[0][..., : like[0].shape[-1] // 2]]
    generator = torch.Generator(device=like[0].device).manual_seed(1)
    return [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in like]
