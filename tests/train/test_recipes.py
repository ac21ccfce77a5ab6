"""The recipes: their commands parse, mean what the text says, and their prices follow from the measured speed."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
import types
from pathlib import Path

import pytest

from fuselm.model.config import LlamaConfig
from fuselm.model.flops import flops_per_token
from fuselm.train import compare, multiple_choice, prepare_data, source_loss
from fuselm.train.command_line import parse_arguments
from fuselm.train.config import TrainConfig, parse_command_line, resolve
from fuselm.train.mixture import Mixture
from fuselm.train.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gpt2_124m.md"
TOKENS_A_STEP = 524_288
STEPS = {"124m": 18_865, "350m": 60_000}
DOLLARS = 3.5


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", RECIPE.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def pretraining() -> list[tuple[int, TrainConfig]]:
    """(GPUs, configuration) of each training command."""
    found = []
    for words in commands():
        if any(word.endswith("pretrain.py") for word in words):
            ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
            at = next(i for i, word in enumerate(words) if word.endswith("pretrain.py"))
            found.append((ranks, resolve(parse_command_line(words[at + 1 :], PRESETS, ""), ranks)))
    return found


def test_training_commands_are_what_llm_c_published() -> None:
    runs = pretraining()
    assert [(ranks, config.preset) for ranks, config in runs] == [(1, "124m"), (8, "124m"), (8, "350m")]
    for _, config in runs:
        training, optimizer, schedule = config.training, config.optimizer, config.schedule
        assert training.global_batch_size * training.seq_len == TOKENS_A_STEP and training.seq_len == 1024
        assert training.steps == STEPS[config.preset]
        assert optimizer.lr == {"124m": 6e-4, "350m": 3e-4}[config.preset]
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)
        assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.1, 1.0)
        assert (schedule.kind, schedule.warmup_steps, schedule.min_lr_ratio) == ("cosine", 700, 0.0)
        assert config.evaluation.every == 250 and config.model.vocab_size >= 50_257


def test_other_commands_parse() -> None:
    programs = {
        "prepare_data.py": prepare_data.Arguments,
        "multiple_choice.py": multiple_choice.Arguments,
        "source_loss.py": source_loss.Arguments,
        "compare.py": compare.Arguments,
    }
    seen = set()
    for words in commands():
        name = Path(words[1]).name
        if words[0] == "python" and name in programs:
            assert (ROOT / words[1]).is_file()
            parse_arguments(programs[name], words[2:], name)
            seen.add(name)
    assert seen == set(programs)


def test_mix_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return [{"text": "a page"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (content,) = re.findall(r"^```toml\n(.*?)^```", RECIPE.read_text(), re.MULTILINE | re.DOTALL)
    assert list(tomllib.loads(content)) == ["source"]
    (tmp_path / "fineweb.toml").write_text(content)
    mixture = Mixture.open(tmp_path / "fineweb.toml")
    assert mixture.names == ["fineweb"] and asked == [("HuggingFaceFW/fineweb", "sample-10BT", "train", True)]


def test_prices_follow_from_the_measured_speed() -> None:
    """Where this fails after a new measurement, the recipe has to be written anew from the numbers in the message."""
    results = ROOT / "benchmarks" / "results"
    alone = json.loads((results / "python_sources" / "report.json").read_text())
    assert (alone["preset"], alone["training"]["seq_len"]) == ("124m", 1024)
    sharded = json.loads((results / "step_124m.json").read_text())["runs"][0]
    one, two = json.loads((results / "step_124m_2gpus.json").read_text())["runs"]
    assert (sharded["kernels"], sharded["gpus"], one["gpus"], two["gpus"]) == ("triton", 1, 1, 2)
    kept = two["tokens_per_second"] / one["tokens_per_second"] / 2
    flops = {preset: flops_per_token(LlamaConfig.from_preset(preset), 1024) for preset in STEPS}
    rates = {1: alone["training"]["tokens_per_second"] * flops["124m"], 8: sharded["tflops"] * 1e12}
    text = " ".join(RECIPE.read_text().split())
    rows = {}
    for preset in STEPS:
        tokens = STEPS[preset] * TOKENS_A_STEP
        speeds = {gpus: rate / flops[preset] for gpus, rate in rates.items()}
        for gpus, speed in speeds.items():
            assert f"{speed:,.0f}" in text, f"{preset} on {gpus}: {speed:,.0f} tokens a second and GPU"
        hours = [tokens / speed / 3600 for speed in (speeds[1], 8 * speeds[8], 8 * kept * speeds[8])]
        dollars = [h * gpus * DOLLARS for h, gpus in zip(hours, (1, 8, 8), strict=True)]
        cells = [f"{hours[0]:.1f} hours, ${dollars[0]:.0f}"]
        cells += [f"{h:.2f} hours, ${d:.0f}" for h, d in zip(hours[1:], dollars[1:], strict=True)]
        rows[preset] = f"| {preset.upper()} | {tokens / 1e9:.3g} B | {' | '.join(cells)} |"
    for row in rows.values():
        assert row in text, "\n".join(rows.values())
    assert f"the {kept:.0%}".replace("%", " %") in text
    assert all(f"{rate / 1e12:.0f} TFLOP/s" in text for rate in rates.values()), rates
    assert "extrapolation" in text and f"${DOLLARS:.2f} per GPU" in text
