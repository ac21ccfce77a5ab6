"""config.json, generation_config.json and the card of a Hugging Face Llama folder, from and to a `LlamaConfig`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fuselm.model.config import LlamaConfig, RopeScaling
from fuselm.model.flops import parameter_counts

# Fields that change what is computed, and the values that this model computes; a field left out has the first.
_FIXED: dict[str, tuple[Any, ...]] = {
    "architectures": (["LlamaForCausalLM"], None),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
}
_ROPE_TYPES = ("default", "llama3")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def config_from_hf(path: Path) -> LlamaConfig:
    """The configuration that a config.json describes; left-out fields have transformers' defaults.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a field is missing or has a value that this model does not compute.
    """
    raw = read_json(path)
    if raw.get("model_type") != "llama":
        raise ValueError(f"{path}: model_type={raw.get('model_type')!r}, expected 'llama'")
    for field, allowed in _FIXED.items():
        value = raw.get(field, allowed[0])
        if value not in allowed:
            raise ValueError(f"{path}: {field}={value!r}, expected {allowed[0]!r}")

    def required(field: str) -> Any:
        if raw.get(field) is None:
            raise ValueError(f"{path} has no {field}")
        return raw[field]

    theta, scaling = _rope(path, raw)
    heads = required("num_attention_heads")
    kv_heads = raw.get("num_key_value_heads")
    try:
        return LlamaConfig(
            vocab_size=required("vocab_size"),
            dim=required("hidden_size"),
            num_layers=required("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            ffn_dim=required("intermediate_size"),
            head_dim=raw.get("head_dim"),
            max_seq_len=raw.get("max_position_embeddings", 2048),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    rope = raw.get(field)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise ValueError(f"{path}: {field}={rope!r}, expected an object")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"{path}: partial_rotary_factor={partial!r}, expected 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ValueError(f"{path}: {field}.rope_type={kind!r}, expected one of {_ROPE_TYPES}")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if kind == "default":
        return theta, None
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if not isinstance(rope.get(key), int | float):
            raise ValueError(f"{path}: {field}.{key}={rope.get(key)!r}, expected a number")
    # transformers, too, takes the longest sequence where the original one is left out.
    original = rope.get("original_max_position_embeddings", raw.get("max_position_embeddings", 2048))
    try:
        return theta, RopeScaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {field}: {error}") from error


def config_to_hf(config: LlamaConfig, dtype: torch.dtype, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """The config.json of a model, in the form that transformers 4.45 and later read.

    Raises:
        ValueError: the Llama architecture has no such model; the message names the field.
    """
    if config.qk_norm:
        raise ValueError("qk_norm=True: Hugging Face's Llama has no norms on queries and keys, expected False")
    if config.dim % config.num_heads:
        raise ValueError(f"dim={config.dim} does not divide by num_heads={config.num_heads}, which transformers asks")
    scaling = None
    if config.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            # transformers 4 warns about factors that are integers
            "factor": float(config.rope_scaling.factor),
            "low_freq_factor": float(config.rope_scaling.low_freq_factor),
            "high_freq_factor": float(config.rope_scaling.high_freq_factor),
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": float(config.rope_theta),
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos_id,  # null, not left out: transformers' defaults are Llama 2's ids
        "eos_token_id": eos_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def generation_config(bos_id: int | None, eos_id: int | list[int] | None) -> dict[str, Any]:
    """The generation_config.json: what begins and what ends a text, one token or any of several."""
    if isinstance(eos_id, list) and len(eos_id) == 1:
        eos_id = eos_id[0]
    return {"bos_token_id": bos_id, "eos_token_id": eos_id}


def model_card(
    config: LlamaConfig, name: str, dtype: torch.dtype, *, has_tokenizer: bool, facts: Mapping[str, object]
) -> str:
    """README.md: what the model is, how it is loaded, and the facts of its training that the caller gives."""
    total, _ = parameter_counts(config)
    rope = f"base {config.rope_theta:g}"
    if config.rope_scaling is not None:
        rope += f", llama3 scaling by {config.rope_scaling.factor:g}"
    shape = {
        "Architecture": "Llama (LlamaForCausalLM)",
        "Parameters": f"{total:,}",
        "Weights": str(dtype).removeprefix("torch."),
        "Layers": config.num_layers,
        "Width": config.dim,
        "Heads": f"{config.num_heads} query, {config.num_kv_heads} key/value, {config.head_size} wide",
        "Feed-forward width": config.ffn_dim,
        "Vocabulary": f"{config.vocab_size:,} tokens",
        "Longest sequence": f"{config.max_seq_len:,} tokens",
        "RoPE": rope,
        "Embedding and head": "one matrix" if config.tie_embeddings else "two matrices",
    }
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if has_tokenizer else ""
    imports = "AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"
    card = (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- llama\n- fuselm\n---\n\n"
        f"# {name}\n\nA causal language model, exported from fuselm.\n\n{_table(shape)}\n## Load\n\n"
        f"```python\nfrom transformers import {imports}\n\n{tokenizer}"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n```\n'
    )
    return card + (f"\n## Training\n\n{_table(facts)}" if facts else "")


def _table(rows: Mapping[str, object]) -> str:
    def cell(value: object) -> str:
        return " ".join(str(value).split()).replace("|", "\\|")

    return "| | |\n|---|---|\n" + "".join(f"| {cell(key)} | {cell(value)} |\n" for key, value in rows.items())
