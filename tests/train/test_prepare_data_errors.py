"""fuselm-prepare-data with bad input: one line that names what is wrong, exit code 2, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuselm.train.prepare_data import main


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (None, [], "source {source} does not exist"),
        ({"a.md": "text"}, [], "source {source} holds no text: expected files ending in .txt, .jsonl"),
        ({"a.txt": "", "b.txt": ""}, [], "source {source} holds no text: all 2 documents are empty"),
        ({"a.jsonl": '{"text": "x"}\n{"text": \n'}, [], "a.jsonl:2 is not a JSON line"),
        ({"a.jsonl": '{"body": "x"}\n'}, [], 'a.jsonl:1 has no string under the key "text"'),
        ({"a.jsonl": '["x"]\n'}, [], 'a.jsonl:1 has no string under the key "text"'),
        ({"a.jsonl": '{"text": "a\\ud800"}\n'}, [], "a.jsonl:1 holds half of a surrogate pair at character 1"),
        ({"a.txt": "x"}, ["--vocab-size", "256"], "vocab_size is 256; a byte-level vocabulary needs at least 257"),
        ({"a.txt": "x"}, ["--validation-fraction", "1"], "validation_fraction is 1.0"),
        ({"a.jsonl": "[" * 100_000 + "\n"}, [], "a.jsonl:1 is not a JSON line"),
        ({"a.jsonl": '{"text": "x", "n": ' + "9" * 5000 + "}\n"}, [], "a.jsonl:1 is not a JSON line"),
        ({"a.txt": "x"}, ["--vocab-size", str(10**15)], "vocab_size is 1000000000000000; at most 4194304"),
        ({"a.txt": "x"}, ["--eos-token", "</s>"], "eos_token '</s>' belongs to a given tokenizer"),
        ({"a.txt": "x"}, ["--bos-token", "<s>"], "bos_token '<s>' belongs to a given tokenizer"),
        ({"a.txt": "x"}, ["--encoding", "gpt2"], "encoding 'gpt2' belongs to a given tokenizer"),
        ({"a.txt": "x"}, ["--workers", "-1"], "workers is -1"),
        ({"a.txt": "x"}, ["--vocab-sise", "300"], "unknown option --vocab-sise (did you mean --vocab-size?)"),
        ({"a.txt": "x"}, ["--vocab-size", "3e2"], "--vocab-size wants a whole number, got '3e2'"),
        ({"a.txt": "x"}, ["--overwrite", "yes"], "unexpected argument 'yes'"),
        ({"a.txt": "x"}, ["--shard-tokens", "0"], "shard_tokens is 0"),
        ({"a.txt": "x"}, ["--tokenizer-chars", "0"], "tokenizer_chars is 0; it must be at least 1"),
        ({"a.txt": "x"}, ["--tokenizer", "/nowhere/t.json"], "tokenizer /nowhere/t.json does not exist"),
        ({"a.txt": "x", "t.json": "{}"}, ["--tokenizer", "{source}/t.json"], "t.json cannot be read"),
    ],
)
def test_bad_input_is_one_line(files, options, message, tmp_path: Path, capfd) -> None:
    source, out = tmp_path / "source", tmp_path / "place" / "out"
    out.parent.mkdir()
    if files is not None:
        source.mkdir()
        for name, text in files.items():
            (source / name).write_text(text)
    options = [option.format(source=source) for option in options]
    assert main([str(source), str(out), *options]) == 2
    output, errors = capfd.readouterr()
    assert message.format(source=source) in errors and errors.startswith("error: ") and errors.count("\n") == 1
    assert output == ""
    assert list(out.parent.iterdir()) == []


def test_missing_arguments_are_named(tmp_path: Path, capfd) -> None:
    for arguments, name in (([], "SOURCE"), ([str(tmp_path)], "OUTPUT")):
        assert main(arguments) == 2
        errors = capfd.readouterr().err
        assert errors.startswith(f"error: {name} is missing") and errors.count("\n") == 1
