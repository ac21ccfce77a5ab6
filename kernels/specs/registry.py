"""SPECS, the list of kernels that tests and benchmarks read: one KernelSpec an op. Imported by tests and benchmarks
only."""

from __future__ import annotations

from fuselm.kernels.specs.attention import ATTENTION
from fuselm.kernels.specs.base import KernelSpec
from fuselm.kernels.specs.cross_entropy import CROSS_ENTROPY
from fuselm.kernels.specs.decode_attention import DECODE_ATTENTION
from fuselm.kernels.specs.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from fuselm.kernels.specs.qk_norm_rope import QK_NORM_ROPE
from fuselm.kernels.specs.rms_norm import ADD_RMS_NORM, RMS_NORM
from fuselm.kernels.specs.rope import ROPE, ROPE_QKV
from fuselm.kernels.specs.swiglu import SWIGLU

SPECS: tuple[KernelSpec, ...] = (
    RMS_NORM,
    ADD_RMS_NORM,
    ROPE,
    ROPE_QKV,
    QK_NORM_ROPE,
    SWIGLU,
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    ATTENTION,
    DECODE_ATTENTION,
)
