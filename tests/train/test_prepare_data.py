"""Text to token shards: nothing lost, nothing half-written, and each way a source can be wrong is one line."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fuselm.train import documents, prepare_data, shards, sources
from fuselm.train.corpus import BUNDLED_TEXT, prepare_bundled
from fuselm.train.data_stream import TokenDataset
from fuselm.train.documents import Split, cut_pieces
from fuselm.train.errors import UserError
from fuselm.train.prepare_data import main, prepare
from fuselm.train.shards import DataError, SplitWriter, write_index
from fuselm.train.tokenizer import END_OF_TEXT, TextTokenizer, first_difference

ROOT = Path(__file__).resolve().parents[2]
# Everything that a careless reader or tokenizer would change.
AWKWARD = {
    "a.txt": "\ufeffone\ttab  two spaces\r\nwindows\n\n\nlines \n",
    "b.txt": "the string <|endoftext|> in somebody's text, \N{REPLACEMENT CHARACTER} and \N{GRINNING FACE} e\u0301",
    "c.txt": "x",
    "d.txt": "",
    "sub/e.txt": " leading and trailing \n\t",
}


def write_source(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def jsonl(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def texts_of(folder: Path, split: Split) -> list[str]:
    """The documents of a split, decoded; checks that each ends with the only EOS that it has."""
    data = TokenDataset.open(folder, split)
    coder = TextTokenizer.load(folder / "tokenizer.json")
    result = []
    for start, end in pairwise(data.borders.tolist()):
        ids = data.read(start, end - start).tolist()
        assert ids[-1] == data.eos_id and data.eos_id not in ids[:-1]
        result.append(coder.decode(ids[:-1]))
    return result


def byte_tokenizer(**parts) -> Tokenizer:
    """A byte-level tokenizer without merges: ids 0..255 in the alphabet's order, 256 ends a text, 257 begins one."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, "<|begin|>"])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def saved(tokenizer: Tokenizer, path: Path) -> Path:
    tokenizer.save(str(path))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", AWKWARD)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "data"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def assert_nothing_written(out: Path) -> None:
    assert not out.exists() and (not out.parent.exists() or list(out.parent.iterdir()) == [])


def test_bundled_text_is_whole() -> None:
    with lzma.open(BUNDLED_TEXT, "rt", encoding="utf-8") as lines:
        plays = [json.loads(line) for line in lines]
    assert [len(plays), plays[6]["title"]] == [42, "hamlet"]
    assert sum(len(play["text"].encode()) for play in plays) == 5_057_239
    digest = hashlib.sha256("".join(play["text"] for play in plays).encode()).hexdigest()
    assert digest == "93d1b7634835a511cfcbf25f9e9ee80d53c07420e39b7e937c623ece2e93ecdf"
    assert BUNDLED_TEXT.stat().st_size < 3_000_000


def test_bundled_data_is_made_once_by_whoever_comes_first(tmp_path: Path) -> None:
    out = tmp_path / "plays"
    code = f"from fuselm.train.corpus import *; prepare_bundled(Path({str(out)!r}), 512)"
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        assert process.communicate()[1] == b"" and process.returncode == 0
    made = (out / "index.json").stat().st_mtime_ns
    assert prepare_bundled(out, 512) == out and (out / "index.json").stat().st_mtime_ns == made
    train, validation = (TokenDataset.open(out, split) for split in ("train", "validation"))
    assert train.vocab_size == validation.vocab_size == 512 and train.num_documents == validation.num_documents == 42
    share = validation.num_tokens / (train.num_tokens + validation.num_tokens)
    assert 0.04 < share < 0.06
    # The two splits are of the same kind: a token stands for as much text in one as in the other.
    assert train.bytes_per_token == pytest.approx(validation.bytes_per_token, rel=0.03)
    with pytest.raises(DataError, match=r"vocabulary of 512, not 1024"):
        prepare_bundled(out)
    assert [p.name for p in tmp_path.iterdir()] == ["plays"]


def test_every_text_comes_back_with_one_eos(source: Path, out: Path) -> None:
    write_source(source, {"more.jsonl": jsonl(["first", "", "line\nbreak\u2028"]) + "\n"})
    made = prepare(source, out, vocab_size=300, validation_fraction=0)
    expected = [AWKWARD["a.txt"], AWKWARD["b.txt"], "x", "first", "line\nbreak\u2028", AWKWARD["sub/e.txt"]]
    assert texts_of(out, "train") == expected
    assert made.empty_documents == 2 and made.splits["train"].documents == 6
    assert made.splits["train"].text_bytes == sum(len(text.encode()) for text in expected)
    data = TokenDataset.open(out, "train")
    assert np.diff(data.borders)[2] == 2  # "x" and the end
    assert (made.dtype, data.vocab_size, data.eos_id) == ("uint16", made.vocab_size, 0)
    assert (
        data.tokenizer_hash == hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest() == made.tokenizer_hash
    )
    assert out.stat().st_mode & 0o777 == source.stat().st_mode & 0o777


def test_exact_ids_of_a_given_tokenizer(source: Path, out: Path, tmp_path: Path) -> None:
    # Padding, truncation and tokens that a post-processor adds are for other uses of the same file.
    wrap = processors.TemplateProcessing(
        single=f"<|begin|> $A {END_OF_TEXT}", special_tokens=[("<|begin|>", 257), (END_OF_TEXT, 256)]
    )
    tokenizer = byte_tokenizer(post_processor=wrap)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    path = saved(tokenizer, tmp_path / "tokenizer.json")
    prepare(source, out, tokenizer=path, validation_fraction=0, bos_token="<|begin|>")
    data = TokenDataset.open(out, "train")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert data.read(*data.borders[2:4] - [0, data.borders[2]]).tolist() == [257, alphabet.index("x"), 256]
    starts, ends = data.borders[:-1], data.borders[1:]
    everything = data.read(0, data.num_tokens)
    assert np.flatnonzero(everything == 257).tolist() == starts.tolist()
    assert np.flatnonzero(everything == 256).tolist() == (ends - 1).tolist()
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
    assert data.num_tokens == sum(len(text.encode()) + 2 for text in AWKWARD.values() if text)


def test_the_tokenizer_learns_from_so_many_characters_of_all_files(tmp_path: Path) -> None:
    """Each file has its own word; a third of the text has those of about a third of the files, from all over."""
    texts = tmp_path / "texts"
    texts.mkdir()
    letters = str.maketrans("0123456789", "ghijklmnop")
    words = [hashlib.sha256(bytes([number])).hexdigest().translate(letters) for number in range(30)]
    for number, word in enumerate(words):
        (texts / f"{number:02d}.txt").write_text(f"{word[:8]} " * 100)
    learned = {}
    for name, chars in (("whole", 10**6), ("part", 9000)):
        prepare(texts, tmp_path / name, vocab_size=2000, tokenizer_chars=chars, workers=1)
        known = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        learned[name] = [n for n, word in enumerate(words) if len(known.encode(f" {word[:8]}").ids) == 1]
    assert learned["whole"] == list(range(30))
    assert 9 <= len(learned["part"]) <= 12
    assert min(learned["part"]) < 5 and max(learned["part"]) > 24
    index = json.loads((tmp_path / "part" / "index.json").read_text())
    assert index["settings"]["tokenizer_chars"] == 9000


def test_same_text_same_shards(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(source, tmp_path / name, vocab_size=300)
    one, two = (contents(tmp_path / name) for name in ("one", "two"))
    assert one == two and len(one) == 7


@pytest.mark.parametrize(
    ("normalizer", "text", "got"),
    [
        (normalizers.Replace("\n", ""), "two\nlines", "'twolines'"),
        (normalizers.Replace("\t", " "), "a\tb", "'a b'"),
        (normalizers.Strip(), "end \n", "'end'"),
        (normalizers.NFC(), "e\u0301", "'é'"),
        (normalizers.Lowercase(), "Upper", "'upper'"),
    ],
)
def test_tokenizer_that_loses_something_is_refused(normalizer, text, got, tmp_path: Path, out: Path) -> None:
    source = write_source(tmp_path / "source", {"a.txt": "fine", "b.txt": text})
    path = saved(byte_tokenizer(normalizer=normalizer), tmp_path / "tokenizer.json")
    with pytest.raises(UserError) as caught:
        prepare(source, out, tokenizer=path, validation_fraction=0)
    assert f"text of {source / 'b.txt'} back" in str(caught.value) and f"give {got}" in str(caught.value)
    assert_nothing_written(out)


def test_loss_after_the_sample_leaves_nothing(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_data, "SAMPLE_CHARS", 1)
    monkeypatch.setattr(prepare_data, "BATCH_CHARS", 1)
    source = write_source(tmp_path / "source", {"a.txt": "fine", "b.txt": "two\nlost lines"})
    # (A newline that is dropped would be found with the sample, whose texts are tried with white space added.)
    path = saved(byte_tokenizer(normalizer=normalizers.Replace("lost", "")), tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"character 4 \(line 2\)"):
        prepare(source, out, tokenizer=path)
    assert_nothing_written(out)


def test_tokenizer_that_marks_each_text_fails_on_joined_pieces(tmp_path: Path, out: Path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 8)
    metaspace = byte_tokenizer(
        normalizer=normalizers.Prepend("_"),
        decoder=decoders.Sequence([decoders.ByteLevel(), decoders.Strip("_", 1, 0)]),
    )
    path = saved(metaspace, tmp_path / "tokenizer.json")
    short = write_source(tmp_path / "short", {"a.txt": "a b c"})
    prepare(short, out, tokenizer=path, validation_fraction=0)
    assert texts_of(out, "train") == ["a b c"]
    long = write_source(tmp_path / "long", {"a.txt": "one\ntwo\nthree\nfour\n"})
    with pytest.raises(UserError, match="first difference"):
        prepare(long, out.with_name("other"), tokenizer=path, validation_fraction=0)


def test_eos_that_is_not_marked_special_is_refused(tmp_path: Path, out: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    path = saved(tokenizer, tmp_path / "tokenizer.json")
    source = write_source(tmp_path / "source", {"a.txt": "html </s> tag"})
    with pytest.raises(UserError, match='mark that token as "special"'):
        prepare(source, out, tokenizer=path, eos_token="</s>")
    assert_nothing_written(out)


def test_first_difference() -> None:
    assert first_difference("same", "same") is None
    assert (
        first_difference("a\nbc", "a\nbd") == r"character 3 (line 2): the text has 'a\nbc', decoded tokens give 'a\nbd'"
    )
    assert (
        first_difference("longer", "long") == "character 4 (line 1): the text has 'longer', decoded tokens give 'long'"
    )


def test_tails_go_to_validation_and_nothing_is_lost(tmp_path: Path, out: Path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 500)  # the border falls into a later piece
    lines = [f"line {i} has its own words\n" for i in range(400)]
    texts = {
        "a.txt": "".join(lines),
        "b.txt": "word " * 200,
        "c.txt": "tiny",
        "d.txt": "\u00e9" * 100,
        "e.txt": "t\n" + "x" * 80,
    }
    prepare(write_source(tmp_path / "source", texts), out, vocab_size=300, validation_fraction=0.1)
    train, validation = texts_of(out, "train"), texts_of(out, "validation")
    assert len(train) == 5 and len(validation) == 4
    assert [a + b for a, b in zip(train, [*validation[:2], "", *validation[2:]], strict=True)] == list(texts.values())
    assert train[0] == "".join(lines[: train[0].count("\n")])  # cut between lines
    assert [len(train[i]) / len(text) for i, text in enumerate(texts.values())] == [
        pytest.approx(0.9, abs=0.01),
        pytest.approx(0.9, abs=0.01),
        1.0,
        0.9,
        pytest.approx(0.9, abs=0.02),
    ]


def test_many_documents_go_to_validation_whole(tmp_path: Path, out: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MANY_DOCUMENTS", 400)
    texts = [f"document {i % 350}\n" for i in range(400)]  # the last 50 are copies
    source = write_source(tmp_path / "source", {"all.jsonl": jsonl(texts)})
    prepare(source, out, vocab_size=300, validation_fraction=0.1)
    train, validation = texts_of(out, "train"), texts_of(out, "validation")
    assert sorted(train + validation) == sorted(set(texts))
    assert not set(train) & set(validation)
    assert 20 <= len(validation) <= 60


def test_pieces_join_and_do_not_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f'Words of line {i}, "quoted" and 12{i}.\n{"" if i % 5 else chr(10)}' for i in range(200))
    coder = TextTokenizer.train([text], 400)
    whole = coder.encode(text)
    monkeypatch.setattr(documents, "PIECE_CHARS", 100)
    pieces = list(cut_pieces(text[i : i + 37] for i in range(0, len(text), 37)))
    assert len(pieces) > 50 and max(map(len, pieces)) <= 100 and "".join(pieces) == text
    assert [i for piece in pieces for i in coder.encode(piece)] == whole
    for hard in ("x" * 350, "a b " * 100, "\n" * 350, "\r\n" * 150, " " * 101, ""):
        assert "".join(cut_pieces([hard])) == hard
        assert all(0 < len(piece) <= 100 for piece in cut_pieces([hard]))


def test_shards_are_one_run_of_tokens(tmp_path: Path) -> None:
    text = "some words that come again " * 40
    source = write_source(tmp_path / "source", {"a.txt": text, "b.txt": text})
    one = prepare(source, tmp_path / "one", vocab_size=300, validation_fraction=0)
    many = prepare(source, tmp_path / "many", vocab_size=300, validation_fraction=0, shard_tokens=7)
    assert len(one.splits["train"].shards) == 1
    total = one.splits["train"].tokens
    assert [s["tokens"] for s in many.splits["train"].shards] == [7] * (total // 7) + [total % 7] * (total % 7 > 0)
    first, second = (TokenDataset.open(tmp_path / name, "train") for name in ("one", "many"))
    for start, count in ((0, total), (6, 2), (7, 7), (total - 1, 1), (13, 30), (3, 0)):
        assert second.read(start, count).tolist() == first.read(start, count).tolist()
    with pytest.raises(DataError, match=rf"\[{total - 1}, {total + 1}\) asked of a split of {total}"):
        second.read(total - 1, 2)


def test_compressed_lines(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(["zipped"]).encode()))
    (source / "b.jsonl.xz").write_bytes(lzma.compress(jsonl(["pressed"]).encode()))
    prepare(source, out, vocab_size=300, validation_fraction=0)
    assert texts_of(out, "train") == ["zipped", "pressed"]
    (source / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(["zipped"]).encode())[:-9])
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.gz"):
        prepare(source, out.with_name("other"), vocab_size=300)


def test_ids_beyond_uint16_are_refused_or_kept(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="uint16 holds ids up to 65535, but the vocabulary has ids up to 128255"):
        SplitWriter(tmp_path, "wrong", vocab_size=128_256, shard_tokens=10, dtype=np.dtype("<u2"))
    (tmp_path / "tokenizer.json").write_text("{}")
    splits = {}
    for split in ("train", "validation"):
        writer = SplitWriter(tmp_path, split, vocab_size=128_256, shard_tokens=10)
        assert writer.dtype == np.uint32
        writer.append(np.asarray([128_000, 62_464, 128_255]))
        for wrong in (128_256, -1):
            with pytest.raises(DataError, match=f"token id {wrong} lies outside the vocabulary of 128256"):
                writer.append(np.asarray([1, wrong]))
        writer.end_document()
        splits[split] = writer.close()
    digest = hashlib.sha256(b"{}").hexdigest()
    content = {"dtype": "uint32", "vocab_size": 128_256, "eos_id": 0, "tokenizer_sha256": digest}
    write_index(tmp_path, content, splits)
    assert TokenDataset.open(tmp_path, "train").read(0, 3).tolist() == [128_000, 62_464, 128_255]
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "dtype": "uint16"}))
    with pytest.raises(DataError, match="uint16 holds ids up to 65535"):
        TokenDataset.open(tmp_path, "train")


def test_vocabulary_of_65536_still_fits_uint16() -> None:
    assert shards.token_dtype(65_536) == np.uint16 and shards.token_dtype(65_537) == np.uint32


def test_folder_of_a_living_process_is_left_alone(source: Path, out: Path) -> None:
    with shards.whole_folder(out) as partial:
        prepare(source, out, vocab_size=300)
        assert partial.is_dir()
        with pytest.raises(UserError, match="exists already"), shards.whole_folder(out):
            pass
        shutil.rmtree(out)
        (partial / "mine").touch()
    assert [p.name for p in out.iterdir()] == ["mine"]


def test_overwrite_replaces_shards_only(source: Path, out: Path) -> None:
    prepare(source, out, vocab_size=300)
    with pytest.raises(UserError, match=r"exists already: choose another name or pass --overwrite"):
        prepare(source, out, vocab_size=310)
    assert prepare(source, out, vocab_size=280, overwrite=True).vocab_size == 280
    assert TokenDataset.open(out, "train").vocab_size == 280
    assert [p.name for p in out.parent.iterdir()] == ["data"]
    before = sorted(source.rglob("*"))
    with pytest.raises(UserError, match="something other than token shards"):
        prepare(source, source, vocab_size=300, overwrite=True)
    assert sorted(source.rglob("*")) == before


def test_space_is_checked_first(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_data.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(UserError, match=r"needs about 0\.0\d\d MB, but .* has 0\.000 MB free"):
        prepare(source, out, vocab_size=300)
    assert_nothing_written(out)


def test_where_a_file_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "READ_BYTES", 4)
    (tmp_path / "a.txt").write_bytes("é€\N{GRINNING FACE}abc".encode() + b"\xe2\x82" + b"\xff")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text: invalid continuation byte at byte 12"):
        for document in sources.FileSource(tmp_path).documents(0):
            list(document.pieces)


def test_unwritable_output(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file/deeper: Not a directory"):
        prepare(source, tmp_path / "file" / "deeper" / "data", vocab_size=300)


def test_tokenizer_without_a_known_eos(source: Path, out: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "<end>": 1}, []))
    path = saved(tokenizer, tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="name its end-of-text token"):
        prepare(source, out, tokenizer=path)
    with pytest.raises(UserError, match="eos_token '<wrong>' is not in the tokenizer's vocabulary of 2 tokens"):
        prepare(source, out, tokenizer=path, eos_token="<wrong>")


def test_command_says_what_it_wrote(tmp_path: Path, out: Path, capsys) -> None:
    source = write_source(tmp_path / "source", {"a.txt": "abcdefghij" * 10})
    assert main([str(source), str(out), "--vocab-size", "257", "--validation-fraction", "0.2"]) == 0
    output = capsys.readouterr().out
    assert f"wrote {out}: vocabulary 257 (uint16)" in output
    assert "encoded 0.0 MB at " in output and "MB/s (1 process(es))" in output
    lines = {line.split()[0]: line.split()[1:] for line in output.splitlines()[2:]}
    assert lines["train"] == ["source", "1", "81", "80", "0.988", "64+", "81"]
    assert lines["64"] == ["to", "127", "1", "50.00%"] and lines["32"] == ["to", "63", "0", "0.00%"]
    assert lines["validation"] == ["source", "1", "21", "20", "0.952", "16+", "21"]


def test_runs_as_a_script_in_a_clone(source: Path, out: Path) -> None:
    """Without an installation, from another folder, with train/ first on sys.path as Python and torchrun put it."""
    script = ROOT / "train" / "prepare_data.py"
    code = f"""
import runpy, sys
from pathlib import Path
sys.path[:] = [{str(script.parent)!r}] + [p for p in sys.path if not (Path(p or ".") / "fuselm").exists()]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
import importlib.util
assert importlib.util.find_spec("fuselm") is None
sys.argv[1:] = [{str(source)!r}, {str(out)!r}, "--vocab-size", "300"]
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"wrote {out}" in done.stdout and time.monotonic() - began < 120
    assert TokenDataset.open(out, "train").num_documents == 4
