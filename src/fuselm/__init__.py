"""fuselm: fused Triton kernels for LLaMA-style models, and the model and trainer that use them.

    import fuselm
    y = fuselm.rms_norm(x, weight)
    model = fuselm.Llama(fuselm.LlamaConfig.from_preset("124m"))

Names load on first use, so `import fuselm` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "rms_norm": "fuselm.kernels.rms_norm",
    "add_rms_norm": "fuselm.kernels.rms_norm",
    "rope": "fuselm.kernels.rope",
    "rope_qkv": "fuselm.kernels.rope",
    "qk_norm_rope": "fuselm.kernels.qk_norm_rope",
    "swiglu": "fuselm.kernels.swiglu",
    "cross_entropy": "fuselm.kernels.cross_entropy",
    "linear_cross_entropy": "fuselm.kernels.linear_cross_entropy",
    "vocab_parallel_cross_entropy": "fuselm.kernels.vocab_parallel",
    "vocab_parallel_linear_cross_entropy": "fuselm.kernels.vocab_parallel_linear",
    "attention": "fuselm.kernels.attention.api",
    "decode_attention": "fuselm.kernels.decode_attention",
    "AdamW": "fuselm.kernels.adamw",
    "LlamaConfig": "fuselm.model.config",
    "Llama": "fuselm.model.llama",
    "generate": "fuselm.model.generate",
    "patch": "fuselm.model.patch_hf",
    "unpatch": "fuselm.model.patch_hf",
}

if TYPE_CHECKING:
    from fuselm.kernels.adamw import AdamW as AdamW
    from fuselm.kernels.attention.api import attention as attention
    from fuselm.kernels.cross_entropy import cross_entropy as cross_entropy
    from fuselm.kernels.decode_attention import decode_attention as decode_attention
    from fuselm.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from fuselm.kernels.qk_norm_rope import qk_norm_rope as qk_norm_rope
    from fuselm.kernels.rms_norm import add_rms_norm as add_rms_norm
    from fuselm.kernels.rms_norm import rms_norm as rms_norm
    from fuselm.kernels.rope import rope as rope
    from fuselm.kernels.rope import rope_qkv as rope_qkv
    from fuselm.kernels.swiglu import swiglu as swiglu
    from fuselm.kernels.vocab_parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from fuselm.kernels.vocab_parallel_linear import (
        vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
    )
    from fuselm.model.config import LlamaConfig as LlamaConfig
    from fuselm.model.generate import generate as generate
    from fuselm.model.llama import Llama as Llama
    from fuselm.model.patch_hf import patch as patch
    from fuselm.model.patch_hf import unpatch as unpatch

__all__ = [
    "AdamW",
    "Llama",
    "LlamaConfig",
    "__version__",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "decode_attention",
    "generate",
    "linear_cross_entropy",
    "patch",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_qkv",
    "swiglu",
    "unpatch",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fuselm' has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
