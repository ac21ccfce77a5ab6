"""Launch choices of AdamW to be timed: the sum of squares, and whole steps with clipping, over the parameters of a
Llama of 1.2 billion (2048 wide, 16 layers, vocabulary 128,256, packed qkv and gate-up)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target

from fuselm.kernels import adamw_step
from fuselm.kernels._triton import device_profile
from fuselm.kernels.adamw import AdamW
from fuselm.kernels.launch.adamw import ChunkLaunch

WIDTH, LAYERS, FFN, VOCABULARY = 2048, 16, 8192, 128256
LAYER = [(WIDTH,), (3072, WIDTH), (WIDTH, WIDTH), (WIDTH,), (2 * FFN, WIDTH), (WIDTH, FFN)]
SHAPES = [(VOCABULARY, WIDTH), *LAYER * LAYERS, (WIDTH,)]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)  # 1.236e9
LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
LATE = 1e6  # step at which both bias corrections are 1: what a step does no longer depends on how many went before
CHECKED = (0, 2, 5, len(SHAPES) - 1)  # parameters of which a piece is checked
PIECE = 4096


def _optimizer(
    device: torch.device, dtype: torch.dtype, options: dict[str, Any], shapes: list[tuple[int, ...]]
) -> tuple[AdamW, list[torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], scale: float, kind: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=kind, generator=generator).mul_(scale)

    params: list[Any] = [random(shape, 0.02, dtype).requires_grad_() for shape in shapes]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=LR, betas=BETAS, eps=EPS, max_grad_norm=CLIP, **options)
    moments = options.get("state_dtype") or torch.float32
    for p in params:
        p.grad = random(p.shape, 1e-3, dtype)
        # The clip factor is about 1 / 35: moments of the size that clipped gradients have.
        exp_avg, exp_avg_sq = random(p.shape, 1e-5, moments), random(p.shape, 3e-5, moments).square_()
        step = torch.full((), LATE, device=device)
        optimizer.state[p].update(step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return optimizer, params


def _keyed_by_launch(optimizer: AdamW, choice: Callable[[], ChunkLaunch]) -> Callable[[], bool]:
    """Gives the optimizer the tables of the launch choice that is in effect; whether they are new."""
    tables: dict[ChunkLaunch, adamw_step.TritonStep] = {}

    def select() -> bool:
        launch = choice()
        new = launch not in tables
        optimizer._triton = tables.setdefault(launch, adamw_step.TritonStep())
        return new

    return select


def _step(
    dtype: torch.dtype, options: dict[str, Any], device: torch.device, shapes: list[tuple[int, ...]] = SHAPES
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    optimizer, params = _optimizer(device, dtype, options, shapes)
    optimizer.step()  # makes master copies
    names = ["exp_avg", "exp_avg_sq", *(["master"] if options.get("master_weights") else [])]
    pieces, decays, grads = [], [], []
    for i in CHECKED:
        p: Any = params[i]
        for slot in (slice(0, PIECE), slice(-PIECE // 2, None)):
            pieces.append([t.detach().view(-1)[slot] for t in (p, *(optimizer.state[p][n] for n in names))])
            decays.append(DECAY if p.ndim > 1 else 0.0)
            grads.append(p.grad.view(-1)[slot])
    views = [t for piece in pieces for t in piece]
    start = [t.clone() for t in views]
    moments = options.get("state_dtype") or torch.float32
    profile = device_profile(device)
    foreach: Any = torch
    select = _keyed_by_launch(
        optimizer, lambda: adamw_step.step_launch((dtype, dtype, moments), len(names) == 3, profile)
    )

    def run() -> list[torch.Tensor]:
        select()
        foreach._foreach_copy_(views, start)
        optimizer.step()
        return [optimizer.grad_norm, *views]

    def reference() -> list[torch.Tensor]:
        norm = torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in params]).norm()
        scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        out = [norm]
        width = len(names) + 1
        for k, (decay, grad) in enumerate(zip(decays, grads, strict=True)):
            p, m, v, *master = (t.double() for t in start[k * width : (k + 1) * width])
            w = master[0] if master else p
            g = grad.double() * scale
            m = BETAS[0] * m + (1.0 - BETAS[0]) * g
            v = BETAS[1] * v + (1.0 - BETAS[1]) * g * g
            w = w - LR * decay * w - LR * m / (v.sqrt() + EPS)
            out += [w, m, v, *([w] if master else [])]
        return out

    return run, reference


def _norm(
    dtype: torch.dtype, device: torch.device, shapes: list[tuple[int, ...]] = SHAPES
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    options = {"state_dtype": torch.bfloat16} if dtype == torch.bfloat16 else {}
    optimizer, params = _optimizer(device, dtype, options, shapes)
    profile = device_profile(device)
    select = _keyed_by_launch(optimizer, lambda: adamw_step.norm_launch(dtype, profile))

    def run() -> torch.Tensor:
        if select():
            optimizer.step()  # makes the tables
        plan = optimizer._triton.plan
        assert plan is not None
        adamw_step.launch_norm(plan)
        return plan.partials.sum(dtype=torch.float64)

    def reference() -> torch.Tensor:
        return torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() for p in params]).sum()

    return run, reference


def _steps(vectors: tuple[int, ...]) -> tuple[ChunkLaunch, ...]:
    """Elements a thread and block 4 to 16, chunks from one block to 32 KiB of an fp32 tensor."""
    shapes = [(1024, 4, 4), (1024, 2, 4), (1024, 8, 4), (1024, 1, 4), (2048, 4, 8), (2048, 2, 8), (2048, 1, 8)]
    shapes += [(512, 8, 4), (512, 4, 4), (512, 8, 2), (2048, 2, 4), (4096, 2, 8), (4096, 1, 16), (1024, 16, 4)]
    both = [ChunkLaunch(*s, vector=v) for v in vectors for s in shapes]
    return (*both, *(ChunkLaunch(*s, vector=v, eviction="evict_first") for v in vectors for s in shapes[:6]))


NORMS = tuple(
    ChunkLaunch(*shape)
    for shape in [
        (8192, 8, 8), (8192, 4, 8), (4096, 8, 8), (4096, 16, 8), (8192, 2, 8), (8192, 16, 8), (4096, 4, 4),
        (4096, 8, 4), (4096, 16, 4), (2048, 8, 4), (2048, 32, 4), (16384, 4, 8), (16384, 4, 16), (16384, 2, 16),
    ]
)  # fmt: skip
_MODES: list[tuple[str, torch.dtype, dict[str, Any], int, tuple[int, ...]]] = [
    ("fp32", torch.float32, {}, 32, (4,)),
    ("bf16", torch.bfloat16, {"state_dtype": torch.bfloat16}, 16, (8, 4)),
    ("bf16, fp32 master and moments", torch.bfloat16, {"master_weights": True}, 30, (4, 8)),
    (
        "bf16 rounded stochastically",
        torch.bfloat16,
        {"state_dtype": torch.bfloat16, "stochastic_rounding": True},
        16,
        (8,),
    ),
]
TARGETS = [
    *(
        Target(
            f"clip + AdamW, 1.236e9 parameters, {name}",
            "fuselm.kernels.adamw_step.step_launch",
            _steps(vectors),
            functools.partial(_step, dtype, options),
            moved * NUMEL,
        )
        for name, dtype, options, moved, vectors in _MODES
    ),
    *(
        Target(
            f"sum of squares, 1.236e9 gradients, {str(dtype).removeprefix('torch.')}",
            "fuselm.kernels.adamw_step.norm_launch",
            NORMS,
            functools.partial(_norm, dtype),
            dtype.itemsize * NUMEL,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
]
