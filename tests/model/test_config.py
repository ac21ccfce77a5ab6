"""LlamaConfig: presets with the published parameter counts, and errors that name what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fuselm.model.config import PRESETS, LlamaConfig, RopeScaling
from fuselm.model.flops import flops_per_token, parameter_counts
from fuselm.model.llama import Llama

# Parameter counts that the models' publishers state, in exact numbers.
PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_parameter_counts(name, parameters):
    assert parameter_counts(PRESETS[name])[0] == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_counts_equal_the_modules(name):
    """The formula counts what the meta-device model holds, each parameter once."""
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == model.num_parameters()


def test_an_untied_embedding_is_left_out():
    config = LlamaConfig.from_preset("llama3_1b", tie_embeddings=False)
    with torch.device("meta"):
        model = Llama(config)
    assert model.num_parameters() - model.num_parameters(embedding=False) == 128256 * 2048
    tied = Llama(LlamaConfig.from_preset("debug"))
    assert tied.num_parameters() == tied.num_parameters(embedding=False)


def test_flops_by_hand():
    """debug: per block 64·(4+4)·16 + 64·64 attention, 3·64·192 MLP, 2·64 norms; 64 final norm; 1024·64 tied
    embedding."""
    config = PRESETS["debug"]
    block = 64 * 8 * 16 + 64 * 64 + 3 * 64 * 192 + 2 * 64
    parameters = 2 * block + 64 + 1024 * 64
    assert parameter_counts(config) == (parameters, 0)
    assert flops_per_token(config, 100) == 6 * parameters + 12 * 2 * 4 * 16 * 100
    assert flops_per_token(config, 100, causal=True) == 6 * parameters + 6 * 2 * 4 * 16 * 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"dim": 66}, "dim=66 does not divide by num_heads=4"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"vocab_size": 10**20}, "vocab_size=1000.*from 1 to 2147483647"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"attention_backend": "flash"}, "attention_backend='flash'"),
        ({"kernels": "cuda"}, "kernels='cuda'"),
        ({"num_layer": 3}, "unknown field 'num_layer' of LlamaConfig, did you mean 'num_layers'"),
    ],
)
def test_bad_fields_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_preset("debug", **overrides)


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(ValueError, match="unknown model preset 'llama3_8', did you mean 'llama3_8b'"):
        LlamaConfig.from_preset("llama3_8")


def test_bad_rope_scaling():
    with pytest.raises(ValueError, match="low_freq_factor=4"):
        RopeScaling(low_freq_factor=4.0, high_freq_factor=1.0)
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        for value in (float("nan"), float("inf"), 0.0):
            with pytest.raises(ValueError, match=f"{name}={value}"):
                replace(RopeScaling(), **{name: value})
    with pytest.raises(ValueError, match="original_max_seq_len=0"):
        RopeScaling(original_max_seq_len=0)
