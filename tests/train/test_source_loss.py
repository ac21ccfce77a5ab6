"""Loss and bits a byte of each source, against a sum over every token by hand."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama
from fuselm.train.config import EvaluationConfig, to_json
from fuselm.train.data_stream import DataStream, TokenDataset
from fuselm.train.evaluation import Feed
from fuselm.train.prepare_data import prepare
from fuselm.train.source_loss import SourceLoss, document_sources, main, source_losses, table
from fuselm.train.tokenizer import TextTokenizer
from fuselm.train.validation import Validation


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    web = [f"Some words of page {i}, and {i * i} more é. " * (1 + i % 4) for i in range(30)]
    code = [f"def f{i}(x):\n    return x + {i}\n" for i in range(25)]
    for name, texts in (("web", web), ("code", code)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "mix.toml").write_text(
        '[[source]]\npath = "web.jsonl"\nname = "web"\n[[source]]\npath = "code.jsonl"\nname = "code"\n'
    )
    prepare(folder / "mix.toml", folder / "data", vocab_size=300, validation_fraction=0.3)
    return folder / "data"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    shape = LlamaConfig(
        vocab_size=300, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=24, kernels="eager"
    )
    model = Llama(shape)
    model.init_weights(0)
    return model


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_sums_are_those_of_every_document_by_itself(mixed: Path, model: nn.Module, batch_size: int) -> None:
    data = TokenDataset.open(mixed, "validation")
    tokenizer = TextTokenizer.load(mixed / "tokenizer.json")
    results = source_losses(model, data, tokenizer, seq_len=24, batch_size=batch_size)
    index = json.loads((mixed / "index.json").read_text())
    _, sources = document_sources(data)
    assert [r.name for r in results] == ["web", "code"]
    for number, result in enumerate(results):
        row = index["statistics"]["validation"][result.name]
        assert (result.documents, result.tokens, result.text_bytes) == (
            row["documents"],
            row["tokens"],
            row["text_bytes"],
        )
        nats = 0.0
        for (start, end), source in zip(pairwise(data.borders.tolist()), sources.tolist(), strict=True):
            if source != number:
                continue
            ids = [data.eos_id, *data.read(start, end - start).tolist()]
            for first in range(0, len(ids) - 1, 24):
                window = ids[first : first + 25]
                with torch.no_grad():
                    logits = model(torch.tensor([window[:-1]]))[0].double().log_softmax(1)
                nats -= logits[torch.arange(len(window) - 1), torch.tensor(window[1:])].sum().item()
        assert result.nats == pytest.approx(nats, rel=1e-5)
        assert result.loss == pytest.approx(nats / result.tokens, rel=1e-5)
        assert result.bits_per_byte == pytest.approx(nats / math.log(2) / row["text_bytes"], rel=1e-5)
    assert results[0].documents > 10 and results[1].documents > 10


@pytest.mark.parametrize("rows", [2, 7])
def test_a_run_validates_the_first_documents_of_each_source(mixed: Path, model: nn.Module, world, rows: int) -> None:
    data = TokenDataset.open(mixed, "validation")
    tokenizer = TextTokenizer.load(mixed / "tokenizer.json")
    stream = DataStream(data, seq_len=24, global_batch_size=rows, seed=0)
    validate = Validation(Feed(stream, world, rows), data, EvaluationConfig(batches=2, source_documents=4), 24)
    expected = source_losses(model, data, tokenizer, seq_len=24, max_documents=4)
    for _ in range(2):  # the second time from what the first has kept
        found = validate(model)
        assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) / data.bytes_per_token)
        for ours, theirs in zip(found.sources, expected, strict=True):
            assert (ours.name, ours.documents, ours.tokens) == (theirs.name, 4, theirs.tokens)
            assert ours.text_bytes == theirs.text_bytes and ours.nats == pytest.approx(theirs.nats, rel=1e-5)


def test_bos_is_given_and_not_predicted(tmp_path: Path, model: nn.Module) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text of a few words")
    coder = TextTokenizer.train(["some text of a few words"], 270)
    backend = coder._backend
    backend.add_special_tokens(["<|begin|>"])
    (tmp_path / "t.json").write_text(backend.to_str())
    for name, bos in (("with", "<|begin|>"), ("without", None)):
        prepare(tmp_path / "text", tmp_path / name, tokenizer=tmp_path / "t.json", bos_token=bos, validation_fraction=0)
    results = []
    for name, bos in (("with", "<|begin|>"), ("without", None)):
        data = TokenDataset.open(tmp_path / name, "train")
        own = TextTokenizer.load(tmp_path / "t.json", bos_token=bos)
        results += source_losses(model, data, own, seq_len=24)
    assert results[0].tokens == results[1].tokens and results[0].text_bytes == results[1].text_bytes == 24
    assert results[0].nats != results[1].nats and results[0].name == "text"


def test_only_the_first_documents_of_each_source(mixed: Path, model: nn.Module) -> None:
    data = TokenDataset.open(mixed, "validation")
    tokenizer = TextTokenizer.load(mixed / "tokenizer.json")
    some = source_losses(model, data, tokenizer, seq_len=24, max_documents=3)
    assert [r.documents for r in some] == [3, 3]


def test_data_of_one_source_has_no_file_of_sources(tiny_data: Path) -> None:
    data = TokenDataset.open(tiny_data, "validation")
    names, sources = document_sources(data)
    assert names == ["texts"] and len(sources) == data.num_documents and not sources.any()


def test_table_adds_up() -> None:
    lines = table([SourceLoss("a", 1, 100, 400, 200.0), SourceLoss("b", 2, 300, 600, 300.0)]).splitlines()
    assert lines[1].split()[-2:] == ["2.0000", f"{200 / math.log(2) / 400:.4f}"]
    assert lines[3].split() == ["all", "together", "3", "400", "1,000", "1.2500", f"{500 / math.log(2) / 1000:.4f}"]
    assert table([SourceLoss("a")]).splitlines()[1].split()[-2:] == ["-", "-"]


def test_command(tmp_path: Path, tiny_data: Path, make_config, launch, mixed: Path, capsys) -> None:
    config = make_config(tmp_path, training__steps=1, evaluation__batches=1, checkpoint__every=0)
    (tmp_path / "config.json").write_text(to_json(config))
    worker = Path(__file__).parent / "run_configs.py"
    ((code, _, errors),) = launch([str(worker), str(tmp_path / "config.json")], 1).wait()
    assert code == 0, errors[-2000:]
    run = str(tmp_path / "tiny")
    assert main([run, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("texts ")
    assert 5.0 < float(lines[1].split()[-2]) < 6.0  # about ln 261 after one step
    assert main([run, "--device", "cpu", "--data", str(mixed)]) == 2
    assert "is not the one of" in capsys.readouterr().err
    assert main([run, "--split", "test"]) == 2
    assert "split is 'test'" in capsys.readouterr().err
    assert main([run, "--data", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
