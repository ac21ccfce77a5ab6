"""Multiple choice: the right tokens are scored, in the right places, by each of the three ways."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama
from fuselm.train.config import to_json
from fuselm.train.errors import UserError
from fuselm.train.multiple_choice import Item, encode_item, ending_losses, evaluate_items, main, read_items, score
from fuselm.train.tokenizer import TextTokenizer

FILE = Path(__file__).parent / "multiple_choice.jsonl"


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return read_items(FILE)


@pytest.fixture(scope="module")
def tokenizer(items: list[Item]) -> TextTokenizer:
    return TextTokenizer.train([item.context + " " + " ".join(item.endings) for item in items], 320)


class Bigrams(nn.Module):
    """The loss of a token given the one before it, from a table of log-probabilities."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        logits = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(1))
        self.table = nn.Parameter(logits.log_softmax(1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "none" and tokens.shape == targets.shape
        found = -self.table[tokens, targets.clamp(min=0)]
        return torch.where(targets == -100, torch.zeros(()), found)


def test_published_format(items: list[Item]) -> None:
    assert [item.label for item in items] == [2, 0, 3] and [len(item.endings) for item in items] == [4, 4, 4]
    assert items[1].context == "A man kneels in front of a flower bed. he"
    assert items[2].endings[0] == "They melt."


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_losses_are_those_of_the_endings(items, tokenizer, batch_size: int) -> None:
    model = Bigrams(tokenizer.vocab_size)
    results = list(evaluate_items(model, tokenizer, items, longest=10**6, batch_size=batch_size))
    assert [item for item, _, _ in results] == items
    for item, losses, lengths in results:
        for ending, loss, length in zip(item.endings, losses, lengths, strict=True):
            ids = [*tokenizer.encode(item.context), *tokenizer.encode(" " + ending)]
            expected = -sum(model.table[ids[i - 1], ids[i]].item() for i in range(len(ids) - length, len(ids)))
            assert length == len(tokenizer.encode(" " + ending)) and loss == pytest.approx(expected, rel=1e-5)


def test_three_ways_to_count(tokenizer: TextTokenizer) -> None:
    """Hand-made: the answer by the sum is the shortest, by tokens the second, by bytes the third."""
    model = Bigrams(tokenizer.vocab_size)
    endings = ("e", "They melt", "eggs and eggs and eggs")
    sizes = [(len(tokenizer.encode(" " + e)), len(e.encode())) for e in endings]

    def with_losses(losses: list[float]) -> list[int]:
        rights = []
        for label in range(3):
            item = Item("They", endings, label)
            with torch.no_grad():
                model.table.fill_(-1e9)
            before = tokenizer.encode("They")[-1]
            for ending, loss in zip(endings, losses, strict=True):
                ids = [before, *tokenizer.encode(" " + ending)]
                with torch.no_grad():
                    for a, b in pairwise(ids):
                        model.table[a, b] = 0.0
                    model.table[ids[0], ids[1]] = -loss
            result = score(model, tokenizer, [item], longest=100)
            rights.append((result.by_sum, result.by_token, result.by_byte))
        return [next(i for i in range(3) if rights[i][way]) for way in range(3)]

    firsts = [tokenizer.encode(" " + e)[0] for e in endings]
    assert len(set(firsts)) == 3  # so that each loss can be set by itself
    for losses in ([1.0, 9.0, 9.0], [5.0, 5.1, 30.0], [5.0, 20.0, 21.0], [3.0, 5.0, 40.0]):
        chosen = with_losses(losses)
        expected = []
        for divisors in ([1, 1, 1], [tokens for tokens, _ in sizes], [size for _, size in sizes]):
            means = [loss / n for loss, n in zip(losses, divisors, strict=True)]
            expected.append(means.index(min(means)))
        assert chosen == expected


def test_padding_and_neighbours_do_not_change_a_loss(items, tokenizer) -> None:
    shape = LlamaConfig(
        vocab_size=320, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=128, kernels="eager"
    )
    model = Llama(shape)
    model.init_weights(0)
    rows, lengths = encode_item(items[2], tokenizer, 128)
    together = ending_losses(model, rows, lengths)
    alone = torch.cat([ending_losses(model, [row], [n]) for row, n in zip(rows, lengths, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
    # and it is what the logits say
    logits = model(torch.tensor([rows[1][:-1]]))[0].log_softmax(1)
    picked = logits[torch.arange(len(rows[1]) - 1), torch.tensor(rows[1][1:])][-lengths[1] :]
    assert -picked.sum().item() == pytest.approx(alone[1].item(), rel=1e-5)


def test_a_long_context_loses_its_beginning(items, tokenizer) -> None:
    rows, lengths = encode_item(items[0], tokenizer, 30)
    whole, _ = encode_item(items[0], tokenizer, 10**6)
    assert max(map(len, rows)) == 30 and all(row == full[-30:] for row, full in zip(rows, whole, strict=True))
    assert lengths == [len(tokenizer.encode(" " + ending)) for ending in items[0].endings]
    with pytest.raises(UserError, match=rf"an ending has {max(lengths)} tokens; the model takes {max(lengths)}"):
        encode_item(items[0], tokenizer, max(lengths))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f.jsonl:2 is not a JSON line"),
        ("[1]", "f.jsonl:2 is not an item"),
        ('{"endings": ["a", "b"], "label": 0}', 'f.jsonl:2 has no text under the key "ctx"'),
        ('{"ctx": "c", "endings": ["a"], "label": 0}', "must have two texts or more"),
        ('{"ctx": "c", "endings": ["a", 1], "label": 0}', "must have two texts or more"),
        ('{"ctx": "c", "endings": ["a", "b"], "label": 2}', "label is 2; it must be 0 to 1"),
        ('{"ctx": "c", "endings": ["a", "b"], "label": ""}', r"label is ''; it must be 0 to 1 \(test splits have none"),
    ],
)
def test_a_wrong_item_is_named(line: str, message: str, tmp_path: Path) -> None:
    good = json.dumps({"ctx": "c", "endings": ["a", "b"], "label": 1})
    (tmp_path / "f.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(UserError, match=message):
        read_items(tmp_path / "f.jsonl")
    (tmp_path / "f.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no items"):
        read_items(tmp_path / "f.jsonl")


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_only_newlines_end_a_line(inside: str, tmp_path: Path) -> None:
    entry = {"ctx": f"a{inside}b", "endings": [f"c{inside}", "d"], "label": 1}
    text = (json.dumps(entry, ensure_ascii=False) + "\r\n") * 2
    (tmp_path / "f.jsonl").write_bytes(text.encode("utf-8-sig"))
    assert read_items(tmp_path / "f.jsonl") == [Item(f"a{inside}b", (f"c{inside}", "d"), 1)] * 2


def test_half_a_character_is_named(tokenizer: TextTokenizer) -> None:
    item = Item("a", ("b", "c\udc80"), 0)
    with pytest.raises(UserError, match=r"the text holds '\\udc80' at character 3, half of a character"):
        encode_item(item, tokenizer, 10)


def test_command(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_run), str(FILE), "--device", "cpu", "--batch-size", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("3 items: accuracy ") and output.count("%") == 3
    assert main([str(tiny_run), str(FILE), "--device", "cpu", "--limit", "1"]) == 0
    assert capsys.readouterr().out.startswith("1 items: accuracy ")
    assert main([str(tiny_run), str(FILE.with_name("none")), "--device", "cpu"]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main([str(tiny_run), str(FILE), "--batch-size", "0"]) == 2
    assert "batch_size is 0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, make_config, launch) -> Path:
    """A run of two steps with a context that an item fits in."""
    runs = tmp_path_factory.mktemp("runs")
    config = make_config(runs, training__steps=1, evaluation__batches=0, checkpoint__every=0)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_seq_len=160),
        training=dataclasses.replace(config.training, seq_len=32),
    )
    (runs / "config.json").write_text(to_json(config))
    worker = Path(__file__).parent / "run_configs.py"
    ((code, _, errors),) = launch([str(worker), str(runs / "config.json")], 1).wait()
    assert code == 0, errors[-2000:]
    return runs / "tiny"
