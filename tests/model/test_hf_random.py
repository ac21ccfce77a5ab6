"""Hugging Face folders: random small shapes of every generation of Llama, sharded reading, templates, stop tokens."""

from __future__ import annotations

import json
import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fuselm.model import hf
from fuselm.model.config import LlamaConfig, RopeScaling
from fuselm.model.hf import export_hf, load_hf, read_parameters
from fuselm.model.hf_config import config_from_hf
from fuselm.model.llama import Llama
from fuselm.model.lora import LoRAConfig, add_lora, remove_lora
from fuselm.train.tokenizer import TextTokenizer

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported


def draw_shape(seed: int) -> LlamaConfig:
    """A small shape as Llama 2 (all heads, plain RoPE), 3 (groups, scaled) or 3.2 (tied too) has it."""
    r = random.Random(seed)
    generation = ("2", "3", "3.2")[seed % 3]
    kv_heads = r.choice([1, 2, 3])
    heads = kv_heads if generation == "2" else kv_heads * r.choice([2, 4])
    head_dim = r.choice([16, 24, 32])
    scaling = RopeScaling(r.choice([8.0, 32.0]), original_max_seq_len=r.choice([16, 32]))
    return LlamaConfig(
        vocab_size=r.randrange(50, 150),
        dim=heads * (head_dim if generation == "2" else r.choice([8, 16])),
        num_layers=r.choice([1, 2, 3]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_dim=r.randrange(20, 90),
        head_dim=head_dim,
        max_seq_len=64,
        norm_eps=r.choice([1e-5, 1e-6]),
        rope_theta=r.choice([1e4, 5e5]),
        rope_scaling=None if generation == "2" else scaling,
        tie_embeddings=generation == "3.2",
        kernels="eager",
    )


def make(shape: LlamaConfig) -> Llama:
    """Weights far from their tiny initial values, so that mistakes show."""
    model, g = Llama(shape), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.15 if p.dim() > 1 else 0.2) + (0 if p.dim() > 1 else 1))
    return model


@pytest.mark.parametrize("seed", range(9))
def test_random_shapes_are_the_same_model_to_transformers(seed: int, tmp_path: Path) -> None:
    """Logits to 1e-4 both ways, through files of any size; weights come back bitwise in every dtype."""
    from transformers import LlamaForCausalLM, __version__

    wide: dict[str, Any] = {"dtype" if int(__version__[0]) >= 5 else "torch_dtype": torch.float32}
    shape = draw_shape(seed)
    model = make(shape)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed // 3]
    exported = export_hf(model, tmp_path / "ours", dtype=dtype, max_shard_bytes=(5e9, 9000)[seed % 2])
    theirs: Any = LlamaForCausalLM.from_pretrained(exported, **wide)
    again = load_hf(exported, kernels="eager")
    for name, p in again.state_dict().items():
        assert p.dtype == dtype and torch.equal(p, model.state_dict()[name].to(dtype)), name
    tokens = torch.randint(0, shape.vocab_size, (2, 41), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        want = theirs(tokens).logits
        torch.testing.assert_close(again.float()(tokens), want, rtol=1e-4, atol=1e-4)
        assert want.std() > 0.1
        theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
        back = load_hf(tmp_path / "theirs", kernels="eager")
        torch.testing.assert_close(back(tokens), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_parameters_are_read_one_by_one(seed: int, tmp_path: Path) -> None:
    model = make(draw_shape(seed))
    folder = export_hf(model, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=6000)
    config = config_from_hf(folder / "config.json")
    want = model.state_dict()
    names = []
    for name, tensor in read_parameters(folder, config):
        assert torch.equal(tensor, want[name].bfloat16()), name
        names.append(name)
    assert sorted(names) == sorted(want)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert shard
    with pytest.raises(ValueError, match=r"has no tensor model\.norm\.weight"):
        next(read_parameters(folder, config))


class _Counting:
    """safe_open, counting how many of the tensors that it handed out are alive when the next is asked for."""

    def __init__(self, path: Any, **options: Any) -> None:
        self.real: Any = safe_open(path, **options)

    def __enter__(self) -> _Counting:
        self.file = self.real.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.real.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in given))
        tensor = self.file.get_tensor(name)
        given.append(weakref.ref(tensor))
        return tensor


given: list[weakref.ref] = []
alive: list[int] = []


def test_memory_holds_about_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files and tensors there are: one while loading, those of one parameter while reading."""
    shape = LlamaConfig(vocab_size=97, num_layers=6, kernels="eager")
    folder = export_hf(make(shape), tmp_path / "out", dtype=torch.float32, max_shard_bytes=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    monkeypatch.setattr(hf, "safe_open", _Counting)
    load_hf(folder)
    assert len(alive) == 2 + 9 * 6 and max(alive) <= 1
    alive.clear()
    for _ in read_parameters(folder, shape):
        pass
    assert len(alive) == 2 + 9 * 6 and max(alive) <= 3  # of qkv; the parameter before may still be held


def test_templates_and_stop_tokens_travel(tmp_path: Path) -> None:
    model = make(LlamaConfig(vocab_size=300, kernels="eager"))
    source = tmp_path / "tokenizer.json"
    source.write_bytes(TextTokenizer.train(["some text"], 280).to_json())
    template = "{{ messages[0].content }}<|endoftext|>"
    out = export_hf(
        model, tmp_path / "a", dtype=torch.float32, tokenizer=source, chat_template=template, stop_ids=[7, 0]
    )
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == template and settings["eos_token"] == "<|endoftext|>"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [7, 0]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    (out / "chat_template.jinja").write_text("another")  # as transformers 5 writes it
    second = export_hf(model, tmp_path / "b", dtype=torch.float32, tokenizer=out, stop_ids=[7])
    assert (second / "chat_template.jinja").read_text() == "another"
    assert json.loads((second / "tokenizer_config.json").read_text()) == settings
    assert json.loads((second / "generation_config.json").read_text())["eos_token_id"] == 7
    third = export_hf(model, tmp_path / "c", dtype=torch.float32, tokenizer=out, chat_template="mine")
    assert not (third / "chat_template.jinja").exists()
    assert json.loads((third / "tokenizer_config.json").read_text()) == settings | {"chat_template": "mine"}


def test_exports_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    model = make(LlamaConfig(vocab_size=97, kernels="eager"))
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="chat_template without a tokenizer"):
        export_hf(model, out, dtype=torch.float32, chat_template="x")
    with pytest.raises(ValueError, match="stop_ids has 97: expected ids from 0 to 96"):
        export_hf(model, out, dtype=torch.float32, stop_ids=[3, 97])
    add_lora(model, LoRAConfig(rank=2))
    with pytest.raises(ValueError, match="the model has adapters: merge them first"):
        export_hf(model, out, dtype=torch.float32)
    assert not out.exists()
    assert export_hf(remove_lora(model), out, dtype=torch.float32) == out
