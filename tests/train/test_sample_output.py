"""What sampling prints beside the text, and where a text ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama
from fuselm.train import sample as module
from fuselm.train.sample import Meter, main, sample
from fuselm.train.tokenizer import TextTokenizer


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> tuple[Llama, TextTokenizer]:
    """A model that says the letters of its vocabulary one after the other, and ends nowhere."""
    tokenizer = TextTokenizer.train(["abc"], 260)
    shape = LlamaConfig(
        vocab_size=260, dim=260, num_layers=1, num_heads=2, ffn_dim=8, max_seq_len=64, tie_embeddings=False
    )
    model = Llama(shape)
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("attention.output.weight").zero_()
            block.get_parameter("mlp.down.weight").zero_()
        model.embedding.weight.copy_(torch.eye(260))
        model.head_weight.copy_(torch.eye(260).roll(1, 0))
    monkeypatch.setattr(module, "load_run", lambda *_, **__: (model, tokenizer))
    return model, tokenizer


def test_a_stop_string_ends_the_text(parrot: tuple[Llama, TextTokenizer]) -> None:
    meter = Meter()
    text = "".join(sample(*parrot, "a", max_tokens=30, temperature=0, stop=["ghi", "fg"], meter=meter))
    assert text == "bcde" and meter.tokens == 6 and meter.prompt == 1
    assert "".join(sample(*parrot, "a", max_tokens=3, temperature=0, stop=["cdx"])) == "bcd"


def test_command_prints_the_rate_beside_the_text(
    parrot: tuple[Llama, TextTokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["RUN", "--prompt", "a", "--temperature", "0", "--device", "cpu"]
    assert main([*arguments, "--max-tokens", "9", "--stop", "fg"]) == 0
    output, errors = capsys.readouterr()
    assert output == "abcde\n"
    assert re.fullmatch(r"6 tokens; the prompt's 1 and the first took \d\.\d\d s, then [\d,]+\.\d tok/s\n", errors)
    assert main([*arguments, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().err.startswith("1 tokens; the prompt's 1 and the first took")
    assert main([*arguments, "--stop", ""]) == 2
    assert "error: stop=[''] expected" in capsys.readouterr().err.replace("]:", "]")
    assert not Path("RUN").exists()
