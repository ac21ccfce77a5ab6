"""The tokenizer's files of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuselm.model.config import LlamaConfig
from fuselm.model.hf_config import read_json

# What published tokenizers call the tokens that end and begin a text; the first that a vocabulary holds is taken.
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")


@dataclass(frozen=True)
class TokenizerFiles:
    """Files to write, by name, and the ids that begin and end a text where there are such."""

    contents: dict[str, bytes]
    bos_id: int | None
    eos_id: int | None


def read_tokenizer(path: Path, config: LlamaConfig, chat_template: str | None = None) -> TokenizerFiles:
    """tokenizer.json as it is, and the tokenizer_config.json beside it or else one of our own.

    Args:
        path: a tokenizer.json under any name, or a folder that holds one.
        config: of the model that is to read its ids.
        chat_template: Jinja text, in place of the one that stands beside the tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no tokenizer.json, or has ids that the model has not.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    vocabulary = _vocabulary(path, read_json(path))
    largest = max(vocabulary.values())
    if largest >= config.vocab_size:
        raise ValueError(f"{path} has ids up to {largest}, the model has vocab_size={config.vocab_size}")
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        settings = read_json(beside)
        bos, eos = (_token(settings.get(key)) for key in ("bos_token", "eos_token"))
        content = beside.read_bytes()
    else:
        bos, eos = (next((n for n in names if n in vocabulary), None) for names in (BOS_NAMES, EOS_NAMES))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # decoding gives the text back as it was
            "model_max_length": config.max_seq_len,
        }
        settings |= {key: token for key, token in (("bos_token", bos), ("eos_token", eos)) if token is not None}
        content = _text(settings)
    if chat_template is not None:
        content = _text(settings | {"chat_template": chat_template})
    ids = [None if token is None else vocabulary.get(token) for token in (bos, eos)]
    contents = {"tokenizer.json": path.read_bytes(), beside.name: content}
    jinja = path.with_name("chat_template.jinja")
    if chat_template is None and jinja.is_file():  # where transformers 5 writes it
        contents[jinja.name] = jinja.read_bytes()
    return TokenizerFiles(contents, ids[0], ids[1])


def _text(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()


def _token(value: Any) -> str | None:
    """A token of tokenizer_config.json, which is written as a string or as an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _vocabulary(path: Path, tokenizer: dict[str, Any]) -> dict[str, int]:
    """Ids by token, of the model and those added to it."""
    try:
        vocab = tokenizer["model"]["vocab"]
        # Unigram models list (piece, score) in the order of their ids.
        ids = dict(vocab) if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no tokenizer.json: it lacks {error}") from error
    if not ids:
        raise ValueError(f"{path} has an empty vocabulary")
    return ids
