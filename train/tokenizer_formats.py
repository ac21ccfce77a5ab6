"""Tokenizers as other programs publish them, turned into a tokenizer.json: tiktoken ranks and SentencePiece models.

Neither library is needed: both formats are simple, and the `tokenizers` library computes the same ids from what they
hold. (The exception: after a user-defined symbol in text a SentencePiece model with a dummy prefix gets a second one,
and such text is refused.) A tokenizer.json is taken as it is, byte for byte.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fuselm.train.errors import UserError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Encoding:
    """What a ranks file does not say: the words that merges stay within, and the special tokens with their ids."""

    ranks: int
    words: str
    special: dict[str, int]


_LLAMA3_NAMES = [
    *("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4))),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
]
ENCODINGS = {
    "gpt2": _Encoding(50_256, _GPT2, {"<|endoftext|>": 50_256}),
    "cl100k_base": _Encoding(
        100_256,
        _CL100K,
        {
            "<|endoftext|>": 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    "o200k_base": _Encoding(199_998, _O200K, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}),
    "llama3": _Encoding(128_000, _CL100K, {name: 128_000 + i for i, name in enumerate(_LLAMA3_NAMES)}),
}


def tokenizer_json(path: Path, *, encoding: str | None = None) -> bytes:
    """Reads a tokenizer of any known format.

    Args:
        path: a tokenizer.json; a tiktoken file of ranks (a line a token: base64 and rank), of any name; or a
            SentencePiece model.
        encoding: for a ranks file, one of `ENCODINGS`; None tells by the number of ranks.

    Returns:
        The content of a tokenizer.json that gives the same ids.

    Raises:
        UserError: there is no such file, or it is none of these.
    """
    if not path.is_file():
        raise UserError(f"tokenizer {path} does not exist")
    content = path.read_bytes()
    if content.lstrip()[:1] == b"{":
        if encoding is not None:
            raise UserError(
                f"encoding {encoding!r} belongs to a tiktoken file of ranks, but {path} is a tokenizer.json"
            )
        return content
    ranks = _read_ranks(content)
    if ranks is not None:
        return _from_ranks(path, ranks, encoding).to_str(pretty=True).encode()
    try:
        return _from_sentencepiece(path, content).to_str(pretty=True).encode()
    except (ValueError, IndexError, struct.error) as error:
        raise UserError(
            f"tokenizer {path} cannot be read: it is no tokenizer.json, no tiktoken ranks and no SentencePiece model"
        ) from error


# --- tiktoken -------------------------------------------------------------------------------------------------------


def _read_ranks(content: bytes) -> dict[bytes, int] | None:
    ranks: dict[bytes, int] = {}
    for line in content.splitlines():
        parts = line.split()
        if not parts:
            continue
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (IndexError, ValueError, binascii.Error):
            return None
        ranks[token] = rank
    return ranks or None


def _from_ranks(path: Path, ranks: dict[bytes, int], encoding: str | None) -> Tokenizer:
    if encoding is None:
        encoding = next((name for name, known in ENCODINGS.items() if known.ranks == len(ranks)), None)
        if encoding is None:
            raise UserError(f"{path} has {len(ranks)} ranks, which no known encoding has: name one of {_names()}")
    if encoding not in ENCODINGS:
        raise UserError(f"encoding is {encoding!r}: it must be one of {_names()}")
    known = ENCODINGS[encoding]
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([i]) not in ranks for i in range(256)):
        raise UserError(f"{path} is damaged: its ranks are not 0 to {len(ranks) - 1} with all 256 bytes among them")
    shift = len(ranks) - known.ranks  # ranks of another number under a known encoding's rules
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    special = {name: number + shift for name, number in known.special.items()}
    taken = set(special.values())
    for unused in set(range(len(ranks), max(taken) + 1)) - taken:
        special[f"<|unused_{unused}|>"] = unused
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _merged(token, ranks, rank) if len(token) > 1 else []
        if len(parts) == 2:
            merges.append((spelled(parts[0]), spelled(parts[1])))
    tokenizer = Tokenizer(models.BPE({**vocabulary, **special}, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(known.words), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(special, key=special.__getitem__))
    return tokenizer


def _names() -> str:
    return ", ".join(ENCODINGS)


def _byte_letters() -> list[str]:
    """The printable character by which byte-level tokenizers spell each byte (those of GPT-2)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def _merged(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """The parts of a token after all merges of a rank below its own, in the order of their ranks."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], below) for i in range(len(parts) - 1)]
        best = min(pairs)
        if best >= below:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def byte_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """For each id the bytes that it stands for; None where tokens of this kind do not simply join."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    values = {letter: byte for byte, letter in enumerate(_byte_letters())}
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        spelled = [values.get(letter) for letter in token]
        # As the decoder has it: a token with any other character in it stands for itself.
        table[number] = token.encode() if None in spelled else bytes(b for b in spelled if b is not None)
    return table


# --- SentencePiece --------------------------------------------------------------------------------------------------

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_NEVER = -1e6  # a score (log-probability) that no other way to cut a text is as low as


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protocol buffer message: integers, floats as 4 bytes, and bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind, 0) if kind != 2 else varint()
        if (not size and kind != 2) or at + size > len(message):
            raise ValueError("no protocol buffer")
        yield key >> 3, message[at : at + size]
        at += size


def _from_sentencepiece(path: Path, content: bytes) -> Tokenizer:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(content):
        if number == 1:
            entry = dict(_fields(value))
            score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
            pieces.append((entry[1].decode(), score, entry.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces or not trainer:
        raise ValueError("no SentencePiece model")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise UserError(f"{path} is a SentencePiece model of words or characters; only BPE and unigram are read")
    unknown = next((i for i, piece in enumerate(pieces) if piece[2] == _UNKNOWN), None)
    byte_fallback = any(piece[2] == _BYTE for piece in pieces)
    if kind == _BPE:
        vocabulary = {piece: i for i, (piece, _, _) in enumerate(pieces)}
        name = None if unknown is None else pieces[unknown][0]
        model: Any = models.BPE(vocabulary, _merges(pieces), unk_token=name, fuse_unk=True, byte_fallback=byte_fallback)
    else:
        # Only these kinds may be found in text; a vocabulary of this library has no way to say so but the score.
        scores = [(piece, score if kind in (_NORMAL, _USER_DEFINED) else _NEVER) for piece, score, kind in pieces]
        model = models.Unigram(scores, unknown, byte_fallback)
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Precompiled(normalizer[2])] if normalizer.get(2) else []
    if normalizer.get(4, 1):
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    prefix = normalizer.get(3, 1)
    if prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    special = [piece for piece, _, kind in pieces if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    added = [AddedToken(piece, normalized=False) for piece, _, kind in pieces if kind == _USER_DEFINED]
    tokenizer.add_tokens(added)
    return tokenizer


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, the best score of the whole first, as SentencePiece chooses them."""
    numbers = {piece: i for i, (piece, _, kind) in enumerate(pieces) if kind in (_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, number in numbers.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in numbers and right in numbers:
                found.append((-pieces[number][1], numbers[left], numbers[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
