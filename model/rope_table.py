"""RoPE's cosine and sine tables (Su et al. 2021, arXiv:2104.09864), with Llama 3.1's frequency scaling.

Angles are computed in fp64 and the tables kept in fp32. They are no module state: casting a model to bf16, autocast,
meta-device construction and to_empty() leave them as they are. (Angles rounded to bf16 make positions collide from 257
on.)
"""

from __future__ import annotations

import functools
import math

import torch

from fuselm.model.config import LlamaConfig, RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Radians a token for each pair of a head.

    Args:
        head_dim: width of a head, even.
        theta: the base.
        scaling: Llama 3.1's scaling; None for plain RoPE.

    Returns:
        (head_dim / 2,) fp64 on the CPU.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = theta**-exponent
    if scaling is None:
        return frequencies
    # Turns that a pair makes within the original context: few are low frequencies, many are high ones.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)


@functools.lru_cache(maxsize=16)
def _tables(
    head_dim: int, theta: float, scaling: RopeScaling | None, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    # Tables outlive the first call; made under inference_mode they would be unusable for training later.
    with torch.inference_mode(False), torch.no_grad():
        angles = torch.outer(
            torch.arange(length, dtype=torch.float64, device="cpu"), rope_frequencies(head_dim, theta, scaling)
        )
        return angles.cos().float().to(device), angles.sin().float().to(device)


def rope_tables(config: LlamaConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (max_seq_len, head_dim / 2) fp32 on `device`, shared by all models of the same shape."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _tables(config.head_size, config.rope_theta, config.rope_scaling, config.max_seq_len, device)
