"""RoPE tables equal fp64 within 1e-6, whatever is done to the model around them."""

from __future__ import annotations

import math

import pytest
import torch

from fuselm.model.config import PRESETS, LlamaConfig, RopeScaling
from fuselm.model.llama import Llama
from fuselm.model.rope_table import rope_frequencies, rope_tables

CONFIG = LlamaConfig.from_preset("debug", max_seq_len=600)


def _exact(config: LlamaConfig) -> torch.Tensor:
    half = config.head_size // 2
    rows = [[p * config.rope_theta ** (-i / half) for i in range(half)] for p in range(config.max_seq_len)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("treatment", ["plain", "bf16", "autocast", "meta"])
def test_tables_survive(treatment):
    if treatment == "meta":
        with torch.device("meta"):
            model = Llama(CONFIG)
        model.to_empty(device="cpu")
        model.init_weights()
    else:
        model = Llama(CONFIG)
    if treatment == "bf16":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=treatment == "autocast"):
        model(torch.randint(0, 1024, (1, 8)))
        cos, sin = rope_tables(model.config, torch.device("cpu"))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.double(), _exact(CONFIG).cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), _exact(CONFIG).sin(), rtol=0, atol=1e-6)
    assert len({tuple(row) for row in torch.cat([cos, sin], 1).tolist()}) == 600  # no two positions collide


def test_a_table_made_in_inference_mode_can_train():
    config = LlamaConfig.from_preset("debug", max_seq_len=77)
    model = Llama(config)
    tokens = torch.randint(0, 1024, (1, 8))
    with torch.inference_mode():
        model(tokens)
    model(tokens, tokens).backward()
    assert model.embedding.weight.grad is not None


def test_llama3_scaling_by_hand():
    """Wavelengths under 2048 tokens stay, over 8192 are divided by 8, between them blend linearly in turns."""
    plain = rope_frequencies(128, 500_000.0)
    scaled = rope_frequencies(128, 500_000.0, RopeScaling(factor=8.0))
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 2048, wavelength > 8192
    assert torch.equal(scaled[short], plain[short]) and short.sum() > 20
    torch.testing.assert_close(scaled[long], plain[long] / 8, rtol=1e-12, atol=0)
    assert long.sum() > 10
    between = ~short & ~long
    smooth = (8192 / wavelength[between] - 1) / 3
    torch.testing.assert_close(scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between])
    assert between.sum() >= 3


def test_scaling_factor_32_of_the_small_models():
    config = PRESETS["llama3_1b"]
    plain = rope_frequencies(64, 500_000.0)
    assert torch.isclose(rope_frequencies(64, config.rope_theta, config.rope_scaling)[-1], plain[-1] / 32)
