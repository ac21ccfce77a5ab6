"""Byte-level BPE tokenizers (Hugging Face `tokenizers`) that give every text back exactly.

Text is always encoded as plain text: a string such as `<|endoftext|>` that stands in somebody's document becomes
ordinary tokens, never the special id, and no post-processor adds tokens of its own. Special ids come from the caller.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fuselm.train.errors import UserError
from fuselm.train.tokenizer_formats import byte_table, tokenizer_json

END_OF_TEXT = "<|endoftext|>"
# What published tokenizers call the token that ends a document; the first that a vocabulary holds is taken.
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
MIN_VOCAB_SIZE = 257  # all bytes and the end of text
MAX_VOCAB_SIZE = 1 << 22  # 16 times the largest in use; the trainer takes memory for all of it at once


class TextTokenizer:
    """A tokenizer with the id that ends a document.

    Args:
        backend: the Hugging Face tokenizer; its truncation and padding are switched off here.
        eos_token: the token that ends a document; None takes the first of `EOS_NAMES` that the vocabulary holds.
        bos_token: the token that begins a document; None for none.

    Raises:
        UserError: the vocabulary does not hold such a token.
    """

    def __init__(self, backend: Tokenizer, *, eos_token: str | None = None, bos_token: str | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = (
            True  # "encode special tokens as text", which is the opposite of what it sounds like
        )
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("the tokenizer has an empty vocabulary")
        if eos_token is None:
            eos_token = next((name for name in EOS_NAMES if name in vocabulary), None)
            if eos_token is None:
                raise UserError(
                    f"the tokenizer has none of {', '.join(EOS_NAMES)}: name its end-of-text token (eos_token)"
                )
        for name, token in (("eos_token", eos_token), ("bos_token", bos_token)):
            if token is not None and token not in vocabulary:
                raise UserError(f"{name} {token!r} is not in the tokenizer's vocabulary of {len(vocabulary)} tokens")
        #: One more than the largest id, which is more than the number of tokens where ids have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_token = eos_token
        self.eos_id = vocabulary[eos_token]
        self.bos_token = bos_token
        self.bos_id = vocabulary[bos_token] if bos_token is not None else None
        #: For each id its bytes, where a text is simply the bytes of its tokens.
        self.token_bytes = byte_table(backend)

    @classmethod
    def load(
        cls, path: Path, *, eos_token: str | None = None, bos_token: str | None = None, encoding: str | None = None
    ) -> TextTokenizer:
        """Reads a tokenizer.json, or what `tokenizer_json` reads; raises UserError where that cannot be done."""
        content = tokenizer_json(path, encoding=encoding)
        return cls.from_json(content, eos_token=eos_token, bos_token=bos_token, origin=path)

    @classmethod
    def from_json(
        cls, content: bytes, *, eos_token: str | None = None, bos_token: str | None = None, origin: Path | str = ""
    ) -> TextTokenizer:
        """The tokenizer of a tokenizer.json's content; `origin` is what errors call it."""
        try:
            backend = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer {origin} cannot be read: {error}") from error
        return cls(backend, eos_token=eos_token, bos_token=bos_token)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> TextTokenizer:
        """Trains a byte-level BPE: id 0 ends a document, then the 256 bytes, then merges.

        Args:
            texts: the text to learn from. The same texts give the same tokenizer.
            vocab_size: tokens wanted, at least `MIN_VOCAB_SIZE`; a short text gives fewer.
        """
        check_vocab_size(vocab_size)
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS or EOS.

        Raises:
            UserError: it holds half of a character (a lone surrogate), as JSON and command lines can.
        """
        lone = re.search(r"[\ud800-\udfff]", text)
        if lone is not None:
            raise UserError(
                f"the text holds {lone[0]!a} at character {lone.start() + 1}, half of a character: it was cut in the "
                "middle of one, or is not UTF-8"
            )
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The ids of many texts, on all cores."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.int64) for e in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_batch(self, batch: Sequence[NDArray[np.int64]]) -> list[str]:
        """The texts of many runs of ids, on all cores."""
        return self._backend.decode_batch([ids.tolist() for ids in batch], skip_special_tokens=False)

    def special_tokens(self) -> dict[str, int]:
        """The tokens that are marked special and stand for no text, with their ids."""
        added = self._backend.get_added_tokens_decoder()
        model = json.loads(self._backend.to_str())["model"]
        unknown = model.get("unk_id") if "unk_id" in model else self._backend.token_to_id(model.get("unk_token") or "")
        return {token.content: number for number, token in added.items() if token.special and number != unknown}

    def to_json(self) -> bytes:
        """The tokenizer.json of this tokenizer."""
        return self._backend.to_str(pretty=True).encode()


def check_vocab_size(vocab_size: int) -> None:
    """Raises UserError where no byte-level BPE of this size can be trained."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"vocab_size is {vocab_size}; a byte-level vocabulary needs at least {MIN_VOCAB_SIZE}")
    if vocab_size > MAX_VOCAB_SIZE:
        raise UserError(f"vocab_size is {vocab_size}; at most {MAX_VOCAB_SIZE} tokens can be trained")


def tokenizer_hash(content: bytes) -> str:
    """SHA-256 of a tokenizer.json, in hex: shards and checkpoints with the same one speak the same language."""
    return hashlib.sha256(content).hexdigest()


def first_difference(expected: str, got: str, *, context: int = 20) -> str | None:
    """Where two texts part, in words, or None where they are equal."""
    if expected == got:
        return None
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    line = expected.count("\n", 0, at) + 1
    around = slice(max(at - context, 0), at + context)
    return f"character {at} (line {line}): the text has {expected[around]!r}, decoded tokens give {got[around]!r}"


def check_round_trip(
    tokenizer: TextTokenizer, texts: Sequence[str], ids: Sequence[NDArray[np.int64]], where: Sequence[str]
) -> None:
    """Checks that ids decode to exactly the texts that they came from, and hold no BOS or EOS.

    Args:
        tokenizer: what encoded them.
        texts: the texts.
        ids: `tokenizer.encode_batch(texts)`.
        where: for each text, the file (and line) to name in an error.

    Raises:
        UserError: with the first difference.
    """
    table = tokenizer.token_bytes
    doubtful = range(len(texts))
    if table is not None:  # many times faster than to decode
        spelled = (b"".join(map(table.__getitem__, run.tolist())) for run in ids)
        doubtful = [i for i, (text, data) in enumerate(zip(texts, spelled, strict=True)) if data != text.encode()]
    for i, decoded in zip(doubtful, tokenizer.decode_batch([ids[i] for i in doubtful]), strict=True):
        difference = first_difference(texts[i], decoded)
        if difference is not None:
            raise UserError(
                f"the tokenizer does not give the text of {where[i]} back: first difference at {difference}"
            )
    special = [i for i in (tokenizer.eos_id, tokenizer.bos_id) if i is not None]
    for run, origin in zip(ids, where, strict=True):
        if any((run == i).any() for i in special):
            raise UserError(
                f"the text of {origin} holds the string {tokenizer.eos_token!r} or the BOS token, and the tokenizer "
                'turns it into the special id: mark that token as "special": true in tokenizer.json'
            )


def check_on_own_text(tokenizer: TextTokenizer, text: str, *, origin: str, joined: bool) -> None:
    """Tries what goes wrong with tokenizers on some of the user's own text, changed in the ways that matter.

    White space of all kinds around it; every special token's name within it; characters of several bytes, of which
    every first part of the ids must give the first bytes; and, where long documents are encoded in pieces, a cut at
    each place.

    Args:
        tokenizer: the tokenizer.
        text: some text; a few hundred characters are used.
        origin: where it stands, for errors.
        joined: check that pieces of the text join to the whole.

    Raises:
        UserError: with what was lost or turned into a special id.
    """
    wide_at = next((i for i, letter in enumerate(text) if ord(letter) > 127), 0)
    wide = text[max(wide_at - 60, 0) : wide_at + 60]
    text = text[:200].strip() or "text"
    spaces = [f"\n{text}", f"{text}\n\n\n", f"\t{text}\t\t{text}", f"{text}\r\n{text}\r", f"  {text}   {text} "]
    check_round_trip(tokenizer, spaces, tokenizer.encode_batch(spaces), [f"{origin} (white space added)"] * len(spaces))
    special = tokenizer.special_tokens()
    for name in special:
        named = f"{text[:20]}{name}{text[20:40]} {name}"
        ids = set(tokenizer.encode(named))
        for other, number in special.items():
            if number in ids:
                raise UserError(
                    f"the tokenizer turns the text {named!r} into ids with the one of the special {other!r}"
                )
    if tokenizer.token_bytes is not None:
        ids = tokenizer.encode(wide)
        for end in range(len(ids) + 1):
            start = b"".join(tokenizer.token_bytes[i] for i in ids[:end])
            decoded = tokenizer.decode(ids[:end])
            if not wide.encode().startswith(start) or decoded != start.decode(errors="replace"):
                raise UserError(f"the first {end} tokens of {wide!r} give {decoded!r}, not the beginning of the text")
    for cut in range(1, len(wide)) if joined else ():
        both = [i for part in (wide[:cut], wide[cut:]) for i in tokenizer.encode(part)]
        check_round_trip(tokenizer, [wide], [np.asarray(both, np.int64)], [f"{origin} (cut in two)"])
