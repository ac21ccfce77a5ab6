"""FLOPs a token, and the rate a card can reach: what MFU is made of.

MFU = tokens a second · FLOPs a token / peak FLOP/s. FLOPs a token of a training step, the usual convention (PaLM,
appendix B):

    6 · (N - N_embedding) + 12 · L · H · D · S

N counts each parameter once, N_embedding is the input embedding (a lookup); a tied head's matrix product is counted.
The attention term is that of full attention; `causal=True` counts the half that causal attention does.
"""

from __future__ import annotations

import torch

from fuselm.model.config import LlamaConfig

MFU_FORMULA = "MFU = tok/s · (6·(N - N_embedding) + 12·L·H·D·S) / peak bf16 FLOP/s"

# Dense bf16, by the vendors' datasheets.
_PEAK_BF16 = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
)


def parameter_counts(config: LlamaConfig) -> tuple[int, int]:
    """(all parameters, those of the input embedding that no matrix product uses: 0 when the head is tied to it)."""
    head = config.head_size
    attention = config.dim * head * (config.num_heads + 2 * config.num_kv_heads) + config.num_heads * head * config.dim
    norms = 2 * config.dim + (2 * head if config.qk_norm else 0)
    block = attention + 3 * config.dim * config.ffn_dim + norms
    embedding = config.vocab_size * config.dim
    total = config.num_layers * block + config.dim + embedding * (1 if config.tie_embeddings else 2)
    return total, 0 if config.tie_embeddings else embedding


def flops_per_token(config: LlamaConfig, seq_len: int, *, causal: bool = False) -> int:
    """FLOPs of a training step (forward and backward) a token, for sequences of `seq_len` tokens; see the module's
    formula."""
    total, embedding = parameter_counts(config)
    attention = 12 * config.num_layers * config.num_heads * config.head_size * seq_len
    return 6 * (total - embedding) + (attention // 2 if causal else attention)


def device_peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the card by its datasheet; None for a CPU or a card that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAK_BF16 if key in name), None)
