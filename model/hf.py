"""Llama folders of Hugging Face: read one into a `Llama`, write one that `transformers` loads.

Weights stream: beside the model itself, memory holds about one tensor. Both sides turn halves of a head in RoPE, so
rows are stacked and cut but never permuted, and a model that goes out and comes back in its dtype is bitwise the same.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fuselm.model.config import AttentionBackend, Kernels, LlamaConfig
from fuselm.model.hf_config import config_from_hf, config_to_hf, generation_config, model_card, read_json
from fuselm.model.hf_tokenizer import TokenizerFiles, read_tokenizer
from fuselm.model.llama import Llama

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WRITTEN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Tables that folders written by old versions carry; they follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class _Rows:
    """One tensor of the folder: `count` rows from `start` on of one of our parameters."""

    parameter: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Stored:
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def _layout(config: LlamaConfig) -> dict[str, _Rows]:
    """Where each tensor of a folder lies in our parameters, in the order of the forward pass."""
    dim, ffn = config.dim, config.ffn_dim
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layout = {_EMBEDDING: _Rows("embedding.weight", 0, (config.vocab_size, dim))}
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        qkv, gate_up = f"{ours}.attention.qkv.weight", f"{ours}.mlp.gate_up.weight"
        layout |= {
            f"{theirs}.input_layernorm.weight": _Rows(f"{ours}.attention_norm.weight", 0, (dim,)),
            f"{theirs}.self_attn.q_proj.weight": _Rows(qkv, 0, (queries, dim)),
            f"{theirs}.self_attn.k_proj.weight": _Rows(qkv, queries, (keys, dim)),
            f"{theirs}.self_attn.v_proj.weight": _Rows(qkv, queries + keys, (keys, dim)),
            f"{theirs}.self_attn.o_proj.weight": _Rows(f"{ours}.attention.output.weight", 0, (dim, queries)),
            f"{theirs}.post_attention_layernorm.weight": _Rows(f"{ours}.mlp_norm.weight", 0, (dim,)),
            f"{theirs}.mlp.gate_proj.weight": _Rows(gate_up, 0, (ffn, dim)),
            f"{theirs}.mlp.up_proj.weight": _Rows(gate_up, ffn, (ffn, dim)),
            f"{theirs}.mlp.down_proj.weight": _Rows(f"{ours}.mlp.down.weight", 0, (dim, ffn)),
        }
    layout["model.norm.weight"] = _Rows("norm.weight", 0, (dim,))
    if not config.tie_embeddings:
        layout[_HEAD] = _Rows("lm_head.weight", 0, (config.vocab_size, dim))
    return layout


def load_hf(
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kernels: Kernels = "auto",
    attention_backend: AttentionBackend = "fuselm",
) -> Llama:
    """The model of a Hugging Face Llama folder (Llama 2, 3, 3.1, 3.2, 3.3 and others of that architecture).

    Args:
        folder: holds config.json and model.safetensors, or the shards named by model.safetensors.index.json.
        dtype: of the parameters; None keeps the stored one (the widest, where they differ).
        device: where the parameters go, tensor by tensor.
        kernels: as in `LlamaConfig`.
        attention_backend: as in `LlamaConfig`.

    Returns:
        The model; its configuration has `max_seq_len` from max_position_embeddings.

    Raises:
        FileNotFoundError: the folder, its config.json or a weight file is missing.
        ValueError: a field has a value that this model does not compute, or weights do not fit the configuration; the
            message names field or tensor, and value.
    """
    folder = Path(folder)
    config = replace(config_from_hf(folder / "config.json"), kernels=kernels, attention_backend=attention_backend)
    stored = _stored_tensors(folder)
    layout = _layout(config)
    _check_names_and_shapes(folder, config, layout, stored)
    if dtype is None:
        dtype = stored[_EMBEDDING].dtype
        for name in layout:
            dtype = torch.promote_types(dtype, stored[name].dtype)
    with torch.device("meta"):
        model = Llama(config)
    model = model.to(dtype).to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in _read(stored, layout):
            rows = layout[name]
            parameters[rows.parameter][rows.start : rows.start + rows.shape[0]].copy_(tensor)
        if config.tie_embeddings and _HEAD in stored:
            _check_tied_head(folder, stored)
    return model


def read_parameters(folder: Path | str, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a folder one after the other, whole and in the stored dtype, for models that are sharded.

    Args:
        folder: as for `load_hf`.
        config: from its config.json (`config_from_hf`).

    Yields:
        (name in `Llama`, CPU tensor); memory holds one at a time.

    Raises:
        FileNotFoundError, ValueError: as `load_hf`, at the first one.
    """
    folder = Path(folder)
    stored, layout = _stored_tensors(folder), _layout(config)
    _check_names_and_shapes(folder, config, layout, stored)
    if config.tie_embeddings and _HEAD in stored:
        _check_tied_head(folder, stored)
    parts: dict[str, list[str]] = {}
    for name, rows in layout.items():
        parts.setdefault(rows.parameter, []).append(name)
    for parameter, names in parts.items():
        tensors = dict(_read(stored, dict.fromkeys(names)))
        yield parameter, tensors[names[0]] if len(names) == 1 else torch.cat([tensors[name] for name in names])


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files, and for a sharded folder the name of the file of each tensor."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: weight_map is {weight_map!r}, expected file names by tensor")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{index}: {name} is in {file!r}, expected the name of a file in the folder")
        files = [folder / file for file in sorted(set(weight_map.values()))]
    else:
        weight_map, files = None, [folder / SINGLE]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; weights are read from {SINGLE} or the shards of {INDEX}")
    return files, weight_map


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """File, shape and dtype of each tensor, from the files' headers."""
    files, weight_map = _weight_files(folder)
    stored: dict[str, _Stored] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    if name.endswith(_DERIVED) or (weight_map is not None and weight_map.get(name) != path.name):
                        continue
                    view = file.get_slice(name)
                    if view.get_dtype() not in _STORED:
                        raise ValueError(
                            f"{path}: {name} has dtype {view.get_dtype()}, expected one of {', '.join(_STORED)}"
                        )
                    stored[name] = _Stored(path, tuple(view.get_shape()), _STORED[view.get_dtype()])
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return stored


def _check_names_and_shapes(
    folder: Path, config: LlamaConfig, layout: dict[str, _Rows], stored: dict[str, _Stored]
) -> None:
    for name, rows in layout.items():
        if name not in stored:
            hint = " (tie_word_embeddings is false)" if name == _HEAD else ""
            raise ValueError(f"{folder} has no tensor {name}{hint}")
        if stored[name].shape != rows.shape:
            raise ValueError(f"{folder}: {name} has shape {stored[name].shape}, its config.json makes it {rows.shape}")
    extra = [name for name in stored if name not in layout and not (config.tie_embeddings and name == _HEAD)]
    if extra:
        raise ValueError(f"{folder} has {len(extra)} tensors that a Llama has not, the first is {min(extra)}")


def _read(stored: dict[str, _Stored], names: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `names`, file by file, one in memory at a time."""
    for path in sorted({stored[name].file for name in names}):
        with safe_open(path, framework="pt") as file:
            for name in names:
                if stored[name].file == path:
                    yield name, file.get_tensor(name)


def _check_tied_head(folder: Path, stored: dict[str, _Stored]) -> None:
    """A folder may store the shared matrix under both names, but not two matrices."""
    head, embedding = (next(_read(stored, {name: None}))[1] for name in (_HEAD, _EMBEDDING))
    if not torch.equal(head, embedding):
        raise ValueError(f"{folder}: tie_word_embeddings is true, yet {_HEAD} differs from {_EMBEDDING}")


def export_hf(
    model: Llama,
    folder: Path | str,
    *,
    dtype: torch.dtype,
    tokenizer: Path | str | None = None,
    max_shard_bytes: float = 5e9,
    facts: Mapping[str, object] | None = None,
    chat_template: str | None = None,
    stop_ids: Sequence[int] = (),
) -> Path:
    """Writes a folder that `transformers` loads as LlamaForCausalLM, and `load_hf` too.

    It appears whole or not at all: everything goes into a temporary folder beside it, which is renamed last.

    Args:
        model: whole parameters on any device; sharded ones are to be gathered first.
        folder: to be made; must not exist.
        dtype: of the written weights: float32, bfloat16 or float16.
        tokenizer: a tokenizer.json, or a folder with one. A tokenizer_config.json beside it is taken over as it is;
            else one is written, with BOS and EOS found by their usual names.
        max_shard_bytes: most bytes of tensors in a weight file; a larger tensor has a file for itself.
        facts: lines for the model card, for instance data, tokens seen and validation loss.
        chat_template: Jinja text for tokenizer_config.json, in place of the one there; needs a tokenizer.
        stop_ids: tokens that end a text when transformers generates; the tokenizer's EOS by default.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder exists.
        FileNotFoundError: there is no such tokenizer.
        TypeError: another dtype.
        ValueError: the Llama architecture cannot say this model (qk_norm), a parameter is not here as a whole, a value
            does not fit into float16, or the tokenizer has more tokens than the model.
    """
    folder = Path(folder).absolute()
    if dtype not in _WRITTEN:
        raise TypeError(f"dtype={dtype}: expected one of {', '.join(map(str, _WRITTEN))}")
    if not max_shard_bytes > 0 or math.isnan(max_shard_bytes):
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: expected a number > 0")
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} exists; export_hf writes a new folder")
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "full_tensor"):
            raise ValueError(f"{name} is {'on the meta device' if parameter.is_meta else 'sharded'}: expected it whole")
    if any(name.endswith(".lora_a") for name, _ in model.named_parameters()):
        raise ValueError("the model has adapters: merge them first (fuselm.model.lora.remove_lora)")
    if tokenizer is not None:
        files = read_tokenizer(Path(tokenizer), model.config, chat_template)
    elif chat_template is not None:
        raise ValueError("chat_template without a tokenizer: it is part of the tokenizer's configuration")
    else:
        files = TokenizerFiles({}, None, None)
    wrong = [i for i in stop_ids if not 0 <= i < model.config.vocab_size]
    if wrong:
        raise ValueError(f"stop_ids has {wrong[0]}: expected ids from 0 to {model.config.vocab_size - 1}")
    documents = {
        "config.json": config_to_hf(model.config, dtype, files.bos_id, files.eos_id),
        "generation_config.json": generation_config(files.bos_id, list(stop_ids) or files.eos_id),
    }
    card = model_card(model.config, folder.name, dtype, has_tokenizer=tokenizer is not None, facts=facts or {})
    contents = {name: _json(document) for name, document in documents.items()} | files.contents
    contents["README.md"] = card.encode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        for name, content in contents.items():
            _write(partial / name, [content])
        _write_weights(model, partial, dtype, max_shard_bytes)
        if os.path.lexists(folder):  # made by somebody else meanwhile
            raise FileExistsError(f"{folder} exists; export_hf writes a new folder")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes bytes-like parts one after the other, onto the disk itself: the rename must not overtake them."""
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _write_weights(model: Llama, folder: Path, dtype: torch.dtype, max_shard_bytes: float) -> None:
    layout = _layout(model.config)
    sizes = {name: math.prod(rows.shape) * dtype.itemsize for name, rows in layout.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    parameters = dict(model.named_parameters())
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        _write(folder / file, _safetensors({name: layout[name] for name in names}, parameters, dtype))
    if len(shards) > 1:
        _write(folder / INDEX, [_json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})])


def _safetensors(
    layout: dict[str, _Rows], parameters: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, tensor by tensor; the library's own writer would need all of them at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, rows in layout.items():
        start, end = end, end + math.prod(rows.shape) * dtype.itemsize
        header[name] = {"dtype": _WRITTEN[dtype], "shape": rows.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin aligned
    yield struct.pack("<Q", len(text)) + text
    for name, rows in layout.items():
        source = parameters[rows.parameter].detach()[rows.start : rows.start + rows.shape[0]]
        tensor = source.to(device="cpu", dtype=dtype).contiguous()
        if dtype == torch.float16 and bool((tensor.isinf() & source.cpu().isfinite()).any()):
            raise ValueError(f"{name} has values beyond float16's largest, 65504; export it in bfloat16 or float32")
        yield tensor.view(torch.uint8).numpy().data
