"""Hugging Face folders both ways, held against transformers' own Llama. Nothing here needs a network."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from fuselm.model import hf_tokenizer
from fuselm.model.config import LlamaConfig, RopeScaling
from fuselm.model.hf import export_hf, load_hf
from fuselm.model.llama import Llama
from fuselm.train import tokenizer as training_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}


def _llama3(factor: float) -> dict:
    """Frequencies low, blended and high within the short sequences of these tests."""
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_type": "llama3", "factor": factor, **bounds}


SHAPES = {
    "llama2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama3": {"num_key_value_heads": 2, "rope_theta": 500_000.0, "rope_scaling": _llama3(8.0)},
    "llama3.2": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_theta": 500_000.0,
        "rope_scaling": _llama3(32.0),
        "tie_word_embeddings": True,
    },
    "rope_parameters": {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e5, **_llama3(8.0)}},
}
OURS = {
    "plain": {"tie_embeddings": False, "num_kv_heads": 4},
    "scaled": {"tie_embeddings": False, "rope_theta": 5e5, "rope_scaling": RopeScaling(8.0, original_max_seq_len=32)},
    "tied": {"head_dim": 32, "rope_scaling": RopeScaling(32.0, original_max_seq_len=32)},
}


def _tokens(seq: int = 61) -> torch.Tensor:
    return torch.randint(0, 97, (2, seq), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def _shake(model: torch.nn.Module) -> None:
    """Weights far from their tiny initial values, so that mistakes show."""
    g = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=g) * (0.15 if p.dim() > 1 else 0.2) + (0 if p.dim() > 1 else 1))


def _theirs(folder: Path, shape: dict, **save):
    """A random model of transformers, saved by itself. Any version of it takes the older form of RoPE's parameters."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    shape = SMALL | shape
    if "rope_parameters" in shape:
        rope = dict(shape.pop("rope_parameters"))
        shape |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    model = LlamaForCausalLM(TheirConfig(**shape)).eval()
    _shake(model)
    model.save_pretrained(folder, **save)
    return model


def _ours(**overrides) -> Llama:
    shape = {"vocab_size": 97, "ffn_dim": 48, "max_seq_len": 128, "kernels": "eager"}
    model = Llama(LlamaConfig.from_preset("debug", **(shape | overrides)))
    _shake(model)
    return model


def _same_parameters(a: Llama, b: Llama) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype and torch.equal(value, right[name]), name


@torch.no_grad()
def _same_logits(ours: Llama, theirs) -> None:
    want = theirs(_tokens()).logits
    assert want.std() > 0.3
    torch.testing.assert_close(ours(_tokens().to(DEVICE)).cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["eager", "auto"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_a_loaded_folder_equal_transformers(name, kernels, tmp_path):
    theirs = _theirs(tmp_path, SHAPES[name])
    (tmp_path / "config.json").write_text(json.dumps(SMALL | SHAPES[name]))  # as published, not as rewritten now
    ours = load_hf(tmp_path, kernels=kernels, device=DEVICE)
    assert ours.config.kernels == kernels and ours.config.max_seq_len == 128
    assert ours.config.tie_embeddings == ("lm_head.weight" not in ours.state_dict()) == (name == "llama3.2")
    _same_logits(ours, theirs)


@pytest.mark.parametrize("shard", [5e9, 30_000])
@pytest.mark.parametrize("name", OURS)
def test_transformers_loads_what_is_exported(name, shard, tmp_path):
    """The same logits, every weight found, and back again bitwise."""
    from transformers import AutoModelForCausalLM

    model = _ours(**OURS[name])
    folder = export_hf(model, tmp_path / "new" / "out", dtype=torch.float32, max_shard_bytes=shard)
    assert [p.name for p in folder.parent.iterdir()] == ["out"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    theirs, info = loaded
    assert not any(info.values()), info
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == torch.float32
    _same_logits(model.to(DEVICE), theirs.eval())
    back = load_hf(folder, kernels="eager")
    assert back.config == replace(model.config, head_dim=model.config.head_size)
    _same_parameters(back, model.cpu())


def test_shards_are_bounded_and_indexed(tmp_path):
    folder = export_hf(_ours(tie_embeddings=False), tmp_path / "out", dtype=torch.float32, max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and {p.name for p in files} == set(index["weight_map"].values())
    tensors = {p.name: load_file(p) for p in files}
    for name, held in tensors.items():
        assert {k for k, v in index["weight_map"].items() if v == name} == set(held)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in tensors.values() for t in held.values())


def test_a_folder_sharded_by_transformers(tmp_path):
    """And with the config.json that its version writes."""
    theirs = _theirs(tmp_path, SHAPES["llama3"], max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    _same_logits(load_hf(tmp_path, kernels="eager", device=DEVICE), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_asked_for(dtype, tmp_path):
    """Export rounds once; loading keeps the stored dtype, or gives the one asked for."""
    from transformers import AutoModelForCausalLM

    model = _ours()
    folder = export_hf(model, tmp_path / "out", dtype=dtype)
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {dtype}
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto").dtype == dtype
    _same_parameters(load_hf(folder), model.to(dtype))
    assert {p.dtype for p in load_hf(folder, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    again = export_hf(load_hf(folder), tmp_path / "again", dtype=dtype)
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_mixed_dtypes_take_the_widest(tmp_path):
    folder = export_hf(_ours(), tmp_path / "out", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((64,), 1 / 3)
    save_file(tensors, folder / "model.safetensors")
    model = load_hf(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.norm.weight, torch.full((64,), 1 / 3))


def _tokenizer(path: Path) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the quick brown fox " * 9], trainer)
    backend.save(str(path))
    return backend


def test_names_of_the_end_of_text_are_those_of_training():
    assert hf_tokenizer.EOS_NAMES == training_tokenizer.EOS_NAMES


def test_tokenizer_generation_config_and_card(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    backend = _tokenizer(tmp_path / "any.json")
    facts = {"Tokens seen": "1,000", "Data | mix": "two\nlines"}
    model = _ours(vocab_size=288)
    folder = export_hf(model, tmp_path / "out", dtype=torch.float32, tokenizer=tmp_path / "any.json", facts=facts)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = " the quick\n\n\tfox , it 's \u00e9\u4e2d \U0001f600 ."
    assert theirs.encode(text) == backend.encode(text).ids and theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token == "<|endoftext|>" and theirs.eos_token_id == 0 and theirs.bos_token is None
    config = GenerationConfig.from_pretrained(folder)
    assert config.eos_token_id == 0 and config.bos_token_id is None
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "| Data \\| mix | two lines |" in card
    assert f"| Parameters | {model.num_parameters():,} |" in card

    # A tokenizer_config.json that lies beside the tokenizer goes along as it is.
    settings = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "fox", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    second = export_hf(model, tmp_path / "second", dtype=torch.float32, tokenizer=folder)
    assert json.loads((second / "tokenizer_config.json").read_text()) == settings
    written = json.loads((second / "config.json").read_text())
    assert written["bos_token_id"] == 0 and written["eos_token_id"] == backend.token_to_id("fox")
    with pytest.raises(ValueError, match=r"has ids up to \d+, the model has vocab_size=97"):
        export_hf(_ours(), tmp_path / "third", dtype=torch.float32, tokenizer=folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type='mistral', expected 'llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=.*LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias=True, expected False"),
        ({"mlp_bias": True}, "mlp_bias=True, expected False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', expected 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*, expected None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear', expected one of"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type='yarn', expected one of"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor=None, expected a number"),
        ({"rope_scaling": {**_llama3(8.0), "factor": -1}}, "rope_scaling: rope_scaling: factor=-1"),
        ({"rope_scaling": 3}, "rope_scaling=3, expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, expected 1"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_attention_heads": "4"}, "config.json: num_heads='4'"),
        ({"num_key_value_heads": 3}, "config.json: num_kv_heads=3 does not divide num_heads=4"),
        ({"hidden_size": 32}, r"embed_tokens.weight has shape \(97, 64\), its config.json makes it \(97, 32\)"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "has 9 tensors that a Llama has not, the first is model.layers.1."),
        ({"tie_word_embeddings": False}, r"has no tensor lm_head.weight \(tie_word_embeddings is false\)"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_this_model_cannot_be_is_named(change, message, tmp_path):
    folder = export_hf(_ours(), tmp_path / "out", dtype=torch.float32)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        load_hf(folder)


def test_broken_folders_are_named(tmp_path):
    folder = export_hf(_ours(), tmp_path / "out", dtype=torch.float32)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    head = tensors["model.embed_tokens.weight"]
    # An old folder's rotary tables and a tied head that is stored twice say nothing new.
    again = {"lm_head.weight": head.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | again, weights)
    _same_parameters(load_hf(folder), _ours())
    for extra, message in (
        ({"lm_head.weight": head + 1}, "tie_word_embeddings is true, yet lm_head.weight differs"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "model.norm.weight has dtype I8"),
    ):
        save_file(tensors | extra, weights)
        with pytest.raises(ValueError, match=message):
            load_hf(folder)
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load_hf(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    with pytest.raises(ValueError, match=r"model.norm.weight is in '../other.safetensors'"):
        load_hf(folder)
    index.unlink()
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors does not exist"):
        load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        load_hf(folder)
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        load_hf(tmp_path / "nowhere")


def test_exports_that_cannot_be_leave_nothing_behind(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="qk_norm=True: Hugging Face's Llama has no norms"):
        export_hf(_ours(qk_norm=True), out, dtype=torch.float32)
    with pytest.raises(ValueError, match="dim=64 does not divide by num_heads=3"):
        export_hf(_ours(num_heads=3, num_kv_heads=1, head_dim=16), out, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"dtype=torch.float64: expected one of torch.float32"):
        export_hf(_ours(), out, dtype=torch.float64)
    with pytest.raises(ValueError, match="max_shard_bytes=0: expected a number > 0"):
        export_hf(_ours(), out, dtype=torch.float32, max_shard_bytes=0)
    with pytest.raises(ValueError, match=r"embedding.weight is on the meta device"):
        export_hf(_ours().to("meta"), out, dtype=torch.float32)
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json does not exist"):
        export_hf(_ours(), out, dtype=torch.float32, tokenizer=tmp_path / "tokenizer.json")
    model = _ours()
    with torch.no_grad():
        model.norm.weight[3] = 1e5
    with pytest.raises(ValueError, match=r"model.norm.weight has values beyond float16's largest"):
        export_hf(model, out, dtype=torch.float16)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export_hf(model, out, dtype=torch.float32)
    assert not list(tmp_path.iterdir())
    out.mkdir()
    with pytest.raises(FileExistsError, match="out exists"):
        export_hf(model, out, dtype=torch.float32)
    assert not list(out.iterdir())
