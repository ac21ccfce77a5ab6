"""Tokenizers of other programs: the same ids as those programs give, and a check on the user's own text."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fuselm.train import tokenizer_formats
from fuselm.train.corpus import BUNDLED_TEXT
from fuselm.train.data_stream import TokenDataset
from fuselm.train.errors import UserError
from fuselm.train.prepare_data import prepare
from fuselm.train.sources import FileSource
from fuselm.train.tokenizer import TextTokenizer, check_on_own_text, check_round_trip
from fuselm.train.tokenizer_formats import ENCODINGS, byte_table, tokenizer_json

FIXTURES = Path(__file__).parent / "tokenizers"
SENTENCEPIECE = json.loads((FIXTURES / "sentencepiece.json").read_text())  # ids from the library, version 0.2.3
WORDS = json.loads((FIXTURES / "words.json").read_text())  # cut by the patterns of tiktoken 0.12
TEXTS = WORDS["texts"]


def play(number: int) -> str:
    document = next(d for d in FileSource(BUNDLED_TEXT).documents(0, number))
    return "".join(document.pieces)[:60_000]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A vocabulary in the order of its merges: bytes in another order than their values, then what BPE learned."""
    coder = TextTokenizer.train([play(6), *TEXTS], 700)
    assert coder.token_bytes is not None
    return {token: i for i, token in enumerate(coder.token_bytes[1:])}  # without the end of text, which is 0


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(t) + b" " + str(r).encode() + b"\n" for t, r in ranks.items()))
    return path


def test_ranks_give_the_ids_of_the_tokenizer_that_they_come_from(ranks, tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "own.tiktoken", ranks)
    coder = TextTokenizer.load(path, encoding="gpt2")
    original = TextTokenizer.train([play(6), *TEXTS], 700)
    for text in [*TEXTS, play(9)]:
        assert [i + 1 for i in coder.encode(text)] == original.encode(text)
        assert coder.decode(coder.encode(text)) == text
    assert (coder.eos_token, coder.eos_id, coder.vocab_size) == ("<|endoftext|>", len(ranks), len(ranks) + 1)
    assert coder.token_bytes is not None and coder.token_bytes[: len(ranks)] == list(ranks)


@pytest.mark.parametrize("encoding", ["gpt2", "cl100k_base", "o200k_base", "llama3"])
def test_text_is_cut_into_words_as_by_tiktoken(encoding: str, ranks, tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "ranks", ranks)
    splitter = Tokenizer.from_buffer(tokenizer_json(path, encoding=encoding)).pre_tokenizer
    for text, words in zip(TEXTS, WORDS["words"][encoding], strict=True):
        assert [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)] == words
    coder = TextTokenizer.load(path, encoding=encoding)
    known = ENCODINGS[encoding]
    special = coder.special_tokens()
    assert special.items() >= {name: n + len(ranks) - known.ranks for name, n in known.special.items()}.items()
    assert sorted(special.values()) == list(range(len(ranks), coder.vocab_size))
    if importlib.util.find_spec("tiktoken") is not None:
        library = importlib.import_module("tiktoken").Encoding(
            "own", pat_str=known.words, mergeable_ranks=ranks, special_tokens=special
        )
        for text in [*TEXTS, play(9)]:
            assert coder.encode(text) == library.encode_ordinary(text)


def test_the_number_of_ranks_tells_the_encoding(ranks, tmp_path: Path, monkeypatch) -> None:
    path = write_ranks(tmp_path / "ranks", ranks)
    with pytest.raises(UserError, match=rf"has {len(ranks)} ranks, which no known encoding has: name one of gpt2, cl"):
        tokenizer_json(path)
    with pytest.raises(UserError, match="encoding is 'gtp2': it must be one of gpt2"):
        tokenizer_json(path, encoding="gtp2")
    known = tokenizer_formats._Encoding(len(ranks), ENCODINGS["gpt2"].words, {"<|endoftext|>": len(ranks) + 2})
    monkeypatch.setitem(ENCODINGS, "own", known)
    coder = TextTokenizer.load(path)
    assert (coder.eos_id, coder.vocab_size) == (len(ranks) + 2, len(ranks) + 3)
    assert set(coder.special_tokens()) == {"<|endoftext|>", *(f"<|unused_{len(ranks) + i}|>" for i in (0, 1))}


def test_damaged_ranks(ranks, tmp_path: Path) -> None:
    missing = {token: rank for token, rank in ranks.items() if token != b"a"}
    with pytest.raises(UserError, match="is damaged: its ranks are not 0 to"):
        tokenizer_json(write_ranks(tmp_path / "ranks", missing), encoding="gpt2")
    (tmp_path / "ranks").write_text("YQ== 0\nnot base 64\n")
    with pytest.raises(UserError, match=r"no tokenizer\.json, no tiktoken ranks and no SentencePiece model"):
        tokenizer_json(tmp_path / "ranks")


def test_encoding_belongs_to_ranks(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="encoding 'gpt2' belongs to a tiktoken file"):
        tokenizer_json(tmp_path / "tokenizer.json", encoding="gpt2")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_models_give_the_ids_of_the_library(kind: str) -> None:
    coder = TextTokenizer.load(FIXTURES / f"{kind}.model")
    for text, ids in zip(SENTENCEPIECE["texts"], SENTENCEPIECE["ids"][kind], strict=True):
        if "<sep>" in text and kind == "bpe":  # a user-defined symbol and a dummy prefix: refused, not changed
            with pytest.raises(UserError, match="character 11"):
                check_round_trip(coder, [text], coder.encode_batch([text]), ["here"])
            continue
        assert coder.encode(text) == ids
        assert coder.decode(ids) == text
    assert (coder.eos_token, coder.eos_id) == ("</s>", 2)
    assert set(coder.special_tokens()) == {"<s>", "</s>"}


def test_damaged_sentencepiece_model(tmp_path: Path) -> None:
    whole = (FIXTURES / "bpe.model").read_bytes()
    for damaged in (whole[:-3], whole[:1000], b"\x00" * 50, b"\xff" * 50, b""):
        (tmp_path / "t.model").write_bytes(damaged)
        with pytest.raises(UserError, match=r"no tokenizer\.json, no tiktoken ranks and no SentencePiece model"):
            tokenizer_json(tmp_path / "t.model")


@pytest.mark.parametrize("kind", ["bpe.model", "unigram.model", "ranks"])
def test_prepared_with_any_kind(kind: str, ranks, tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "ranks", ranks) if kind == "ranks" else FIXTURES / kind
    (tmp_path / "source").mkdir()
    text = "Some <s> text </s> with\n\n\ttabs, é and 😀 <|endoftext|>.\n"
    (tmp_path / "source" / "a.txt").write_text(text * 3)
    encoding = "gpt2" if kind == "ranks" else None
    prepare(tmp_path / "source", tmp_path / "out", tokenizer=path, encoding=encoding, validation_fraction=0)
    data = TokenDataset.open(tmp_path / "out", "train")
    ids = data.read(0, data.num_tokens).tolist()
    coder = TextTokenizer.load(tmp_path / "out" / "tokenizer.json")
    assert ids[-1] == data.eos_id == coder.eos_id and coder.decode(ids[:-1]) == text * 3


def test_byte_table_is_what_the_decoder_does(ranks, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_buffer(tokenizer_json(write_ranks(tmp_path / "ranks", ranks), encoding="gpt2"))
    tokenizer.add_tokens(["é and more"])
    table = byte_table(tokenizer)
    assert table is not None and table[-1] == "é and more".encode()
    draw = np.random.default_rng(0)
    for ids in draw.integers(0, len(table), (200, 5)).tolist():
        joined = b"".join(table[i] for i in ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == joined.decode(errors="replace")
    tokenizer.decoder = decoders.WordPiece()
    assert byte_table(tokenizer) is None


def byte_level(**parts) -> TextTokenizer:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "[MASK]"])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return TextTokenizer(tokenizer)


SEQUENCE = [decoders.ByteLevel(), decoders.Strip("_", 1, 0)]


@pytest.mark.parametrize(
    ("coder", "message"),
    [
        (byte_level(), None),
        (byte_level(normalizer=normalizers.Replace("\t", " ")), r"first difference at character 0"),
        (byte_level(normalizer=normalizers.Replace("\r\n", "\n")), r"white space added"),
        (byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")), r"white space added"),
        (byte_level(normalizer=normalizers.Strip()), r"white space added"),
        (byte_level(normalizer=normalizers.Prepend("_"), decoder=decoders.Sequence(SEQUENCE)), r"cut in two"),
    ],
)
def test_own_text_with_what_it_does_not_hold(coder: TextTokenizer, message: str | None) -> None:
    """The text itself comes back from all of these; what is like it, but with other white space, does not."""
    text = "Words, é and 中, in one line."
    check_round_trip(coder, [text], coder.encode_batch([text]), ["here"])
    if message is None:
        check_on_own_text(coder, text, origin="here", joined=True)
        return
    with pytest.raises(UserError, match=message):
        check_on_own_text(coder, text, origin="here", joined=True)


def test_a_special_token_that_text_can_turn_into_is_refused() -> None:
    coder = byte_level()
    coder._backend.encode_special_tokens = False  # as it is by default in the library
    with pytest.raises(UserError, match=r"text 'some words<\|endoftext\|> .* special '<\|endoftext\|>'"):
        check_on_own_text(coder, "some words", origin="here", joined=False)


def test_a_table_of_bytes_that_is_wrong_is_found() -> None:
    coder = byte_level()
    assert coder.token_bytes is not None
    coder.token_bytes[coder.encode("é")[0]] = b"?"
    with pytest.raises(UserError, match="not the beginning of the text"):
        check_on_own_text(coder, "caf\u00e9s", origin="here", joined=False)
