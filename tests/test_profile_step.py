"""The profile of a step: each kernel counted once under its kind, idle time by the union of what ran."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def profile_step() -> Any:
    # A script of benchmarks/, which pytest's configuration puts on sys.path.
    return importlib.import_module("profile_step")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_attention_key_value_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix multiplication"),
        ("_cross_entropy_forward_kernel", "cross-entropy"),
        ("_rms_norm_backward_kernel", "norm"),
        ("_adamw_kernel", "optimizer"),
        ("triton_poi_fused_add_0", "compiled elementwise"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies and casts"),
        ("void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>", "copies and casts"),
        ("something_new", "other"),
    ],
)
def test_the_kind_of_a_kernel(profile_step, name, kind):
    assert profile_step.kind_of(name) == kind


def test_every_kernel_of_ours_has_a_kind_and_a_name_of_its_own(profile_step):
    """Whose file it is in: a step is not to hide our own time under "other"."""
    kinds = {"attention": "attention", "decode_attention": "attention", "rms_norm": "norm", "rope": "rope"}
    kinds |= {"qk_norm_rope": "rope", "swiglu": "swiglu", "cross_entropy": "cross-entropy", "adamw": "optimizer"}
    names = []
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for name in re.findall(r"^@jit.*\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE):
            folder = path.parent.name if path.parent.name != "kernels" else path.stem.removesuffix("_kernels")
            kind = profile_step.kind_of(name)
            assert kind == kinds.get(folder, kind) != "other", f"{path}: {name} is {kind}"
            names.append(name)
    assert len(names) == len(set(names)) > 20


def test_overlapping_kernels_are_busy_once_and_gaps_are_idle(profile_step):
    kernels = [
        profile_step.Kernel("_rope_kernel", 0, 1000),
        profile_step.Kernel("nvjet_a", 500, 2000),  # beside the first
        profile_step.Kernel("nvjet_a", 600, 700),  # within the second
        profile_step.Kernel("_rope_kernel", 3000, 4000),
    ]
    summary = profile_step.summarise(kernels, steps=2)
    assert summary["milliseconds_a_step"] == pytest.approx(2.0)
    assert summary["idle_milliseconds_a_step"] == pytest.approx(0.5)
    assert summary["by_kind"] == pytest.approx({"rope": 1.0, "matrix multiplication": 0.8})
    assert summary["dearest"][0]["name"] == "_rope_kernel" and summary["dearest"][0]["calls"] == 1.0
    assert summary["alone"] == pytest.approx({"rope": 0.75, "matrix multiplication": 0.5})
    assert "| GPU idle | 0.50 | 25.0% |  |" in profile_step.table(summary)
    assert "| matrix multiplication | 0.80 | 40.0% | 0.50 |" in profile_step.table(summary)


def test_alone_counts_streams_that_run_side_by_side(profile_step):
    kernels = [
        profile_step.Kernel("ncclDevKernel_AllGather", 0, 100),
        profile_step.Kernel("ncclDevKernel_ReduceScatter", 50, 120),  # two of one kind
        profile_step.Kernel("nvjet_a", 80, 110),
        profile_step.Kernel("_rope_kernel", 110, 130),
    ]
    assert profile_step.alone(kernels) == pytest.approx({"communication": 80.0, "rope": 10.0})


def test_nothing_recorded_is_an_error(profile_step):
    with pytest.raises(ValueError, match="no kernel was recorded"):
        profile_step.summarise([], steps=1)
