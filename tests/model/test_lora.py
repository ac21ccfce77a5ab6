"""LoRA: nothing changes at first, merging changes nothing but speed, and adapters travel alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama
from fuselm.model.lora import (
    LoRAConfig,
    adapted_layers,
    add_lora,
    load_lora,
    lora_state,
    merge_lora,
    remove_lora,
    save_lora,
    unmerge_lora,
)


def make() -> Llama:
    return Llama(LlamaConfig.from_preset("debug", vocab_size=97, kernels="eager"))


TOKENS = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(1))


def trained(model: Llama) -> Llama:
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=g) * 0.1)
    return model


def test_adapters_begin_with_no_effect_and_alone_are_trained():
    model = make()
    before = model(TOKENS)
    add_lora(model, LoRAConfig(rank=4, targets=("qkv", "down")))
    assert torch.equal(model(TOKENS), before)
    model(TOKENS, TOKENS).backward()
    grown = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert grown == {n for n, p in model.named_parameters() if p.requires_grad and n.endswith("lora_b")}
    assert len(grown) == 4 and all(".qkv." in n or ".down." in n for n in grown)


def test_the_formula():
    model = trained(add_lora(make(), LoRAConfig(rank=3, alpha=7.0)))
    layer = adapted_layers(model)["blocks.1.mlp.down"]
    x = torch.randn(5, layer.in_features)
    whole = layer.weight + 7.0 / 3 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x), x @ whole.T, rtol=1e-5, atol=1e-5)
    a = torch.stack([layer.lora_a.flatten()[:190] for layer in adapted_layers(model).values()])
    assert len(a.unique(dim=0)) == 8  # each layer has values of its own


def test_merging_changes_nothing_and_is_taken_back_bitwise():
    model = trained(add_lora(make(), LoRAConfig()))
    before, weights = model(TOKENS), {n: p.clone() for n, p in model.named_parameters()}
    merge_lora(merge_lora(model))
    torch.testing.assert_close(model(TOKENS), before, rtol=1e-4, atol=1e-5)
    assert not torch.equal(model.get_parameter("blocks.0.mlp.down.weight"), weights["blocks.0.mlp.down.weight"])
    unmerge_lora(unmerge_lora(model))
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert torch.equal(model(TOKENS), before)
    remove_lora(model)
    assert list(model.state_dict()) == list(make().state_dict()) and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(TOKENS), before, rtol=1e-4, atol=1e-5)


def test_adapters_are_saved_alone(tmp_path: Path):
    model = trained(add_lora(make(), LoRAConfig(rank=2, alpha=3.0, targets=("output",))))
    save_lora(tmp_path / "a", lora_state(model), LoRAConfig(2, 3.0, ("output",)), {"base": "somewhere"})
    assert (tmp_path / "a" / "adapter.safetensors").stat().st_size < 4096
    again = load_lora(make(), tmp_path / "a")
    assert torch.equal(again(TOKENS), model(TOKENS))
    with pytest.raises(ValueError, match="model has adapters already"):
        load_lora(again, tmp_path / "a")
    other = Llama(LlamaConfig.from_preset("debug", vocab_size=97, dim=32, num_layers=1))
    with pytest.raises(
        ValueError, match=r"does not fit the model: blocks.0.attention.output.lora_a has shape \(2, 64\)"
    ):
        load_lora(other, tmp_path / "a")
    assert not adapted_layers(other) and all(p.requires_grad for p in other.parameters()), "it is as it was"
    (tmp_path / "a" / "adapter.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"adapter.safetensors cannot be read"):
        load_lora(make(), tmp_path / "a")
    (tmp_path / "a" / "adapter.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter.safetensors does not exist"):
        load_lora(make(), tmp_path / "a")
    (tmp_path / "a" / "adapter.json").write_text('{"rank": 2}')
    with pytest.raises(ValueError, match=r"adapter.json does not describe adapters"):
        load_lora(make(), tmp_path / "a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "rank=0: expected at least 1"),
        ({"alpha": 0.0}, r"alpha=0\.0: expected a finite number above 0"),
        ({"targets": ("q_proj",)}, r"targets=\('q_proj',\): expected some of"),
        ({"targets": ()}, r"targets=\(\)"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**values)
