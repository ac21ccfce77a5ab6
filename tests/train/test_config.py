"""Configuration: JSON round trips, the command line, and a clear line for each way to get it wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from fuselm.model.config import PRESETS as MODEL_PRESETS
from fuselm.train.config import (
    TrainConfig,
    config_from_json,
    from_dict,
    option_names,
    parse_command_line,
    resolve,
    to_json,
)
from fuselm.train.errors import UserError
from fuselm.train.presets import PRESETS


def parse(*arguments: str) -> TrainConfig:
    return parse_command_line(list(arguments), PRESETS, "Train.")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips_and_resolves(name, tmp_path):
    config = resolve(PRESETS[name](), ranks=1)
    assert config.preset == config.name == name
    assert config.model == MODEL_PRESETS[name]
    (tmp_path / "config.json").write_text(to_json(config))
    assert config_from_json(tmp_path) == config
    assert from_dict(TrainConfig, json.loads(to_json(config))) == config


def test_presets_of_models_and_runs_agree():
    assert set(PRESETS) == set(MODEL_PRESETS)


def test_overrides_of_every_kind():
    config = parse(
        *("--preset", "llama3_1b", "--optimizer.lr", "1e-4", "--data.path", "a/b", "--parallel.compile", "False"),
        *("--optimizer.max-grad-norm=None", "--model.rope_scaling.factor", "8", "--schedule.kind", "wsd"),
        *("--model.head_dim", "128", "--name=x"),
    )
    assert config.optimizer.lr == 1e-4
    assert str(config.data.path) == "a/b"
    assert config.parallel.compile is False
    assert config.optimizer.max_grad_norm is None
    assert config.model.rope_scaling is not None and config.model.rope_scaling.factor == 8.0
    assert (config.schedule.kind, config.model.head_dim, config.name, config.preset) == ("wsd", 128, "x", "llama3_1b")
    assert from_dict(TrainConfig, json.loads(to_json(config))) == config


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--preset", "lama3_1b"], ["unknown preset 'lama3_1b'", "did you mean llama3_1b?"]),
        (["--preset"], ["--preset"]),
        (["--optimizer.lrr", "1"], ["unknown option --optimizer.lrr", "did you mean --optimizer.lr?"]),
        (["--lr", "1"], ["unknown option --lr", "--optimizer.lr"]),
        (["--training.global_batch", "1"], ["--training.global_batch_size"]),
        (["--optimizer.lr", "fast"], ["--optimizer.lr wants a number", "'fast'"]),
        (["--training.steps"], ["--training.steps wants a whole number", "nothing"]),
        (["--schedule.kind", "linear"], ["--schedule.kind", "cosine, wsd, constant", "'linear'"]),
        (["--parallel.compile", "maybe"], ["True or False or None"]),
        (["--model.num_heads", "3"], ["num_heads", "3"]),
        (["debug"], ["'debug'", "--section.field"]),
    ],
)
def test_mistakes_are_one_line_with_the_nearest_name(arguments, parts, capsys):
    with pytest.raises(UserError) as error:
        parse(*arguments)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert capsys.readouterr() == ("", ""), "only the entry point prints"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"training": {"seq_len": 512}}, ["512", "256"]),
        ({"training": {"global_batch_size": 12, "micro_batch_size": 4}}, ["12", "2 ranks", "4 = 8"]),
        ({"training": {"steps": 0}}, ["training.steps is 0"]),
        ({"schedule": {"warmup_steps": -1}}, ["schedule.warmup_steps is -1"]),
        ({"checkpoint": {"keep": 0}}, ["checkpoint.keep is 0"]),
        ({"name": "a/b", "training": {"micro_batch_size": 1}}, ["'a/b'"]),
    ],
)
def test_contradictions_are_refused_with_their_numbers(overrides, parts):
    config = PRESETS["debug"]()
    for section, values in overrides.items():
        value = dataclasses.replace(getattr(config, section), **values) if isinstance(values, dict) else values
        config = dataclasses.replace(config, **{section: value})
    with pytest.raises(UserError) as error:
        resolve(config, ranks=2)
    for part in parts:
        assert part in str(error.value)


NUMBERS = {
    f"{section.name}.{entry.name}": entry.type
    for section in dataclasses.fields(TrainConfig)
    if dataclasses.is_dataclass(getattr(PRESETS["debug"](), section.name))
    for entry in dataclasses.fields(getattr(PRESETS["debug"](), section.name))
    if re.search(r"\b(int|float)\b", str(entry.type)) and section.name != "model"
}


@pytest.mark.parametrize("name", sorted(NUMBERS.keys() - {"training.seed"}))
def test_no_number_goes_unchecked(name):
    """Each number of the configuration refuses -1, and each float NaN, naming itself; LlamaConfig has its own tests."""
    section, _, field = name.partition(".")
    for value in (-1, *([math.nan] if "float" in str(NUMBERS[name]) else [])):
        config = PRESETS["debug"]()
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        with pytest.raises(UserError, match=rf"{name} is {value}: it must be "):
            resolve(dataclasses.replace(config, **{section: changed}), ranks=1)


@pytest.mark.parametrize("name", ["..", ".", " ", "a/b", "/a", "a\0b", "x" * 201, "é" * 101, "data"])
def test_names_that_are_no_folder_of_a_run(name):
    with pytest.raises(UserError, match=r"^name "):
        resolve(dataclasses.replace(PRESETS["debug"](), name=name), ranks=1)


def test_global_batch_follows_the_ranks_when_it_is_0():
    assert resolve(PRESETS["llama3_1b"](), ranks=8).training.global_batch_size == 32


def test_an_unreadable_config_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        config_from_json(tmp_path)
    for content in ("[1]", "[" * 100_000, "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match="not a run's configuration"):
            config_from_json(tmp_path)
    (tmp_path / "config.json").write_text('{"optimiser": {}}')
    with pytest.raises(UserError, match="did you mean optimizer"):
        config_from_json(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": None}, "field model is None: it must be a section"),
        ({"model": {"dim": "64"}}, "field model.dim is '64': it must be a whole number"),
        ({"model": {"tie_embeddings": 1}}, "field model.tie_embeddings is 1: it must be True or False"),
        ({"model": {"kernels": "cuda"}}, "field model.kernels is 'cuda': it must be one of auto, triton, eager"),
        ({"training": [1]}, r"field training is \[1\]: it must be a section"),
        ({"training": {"steps": 1.5}}, "field training.steps is 1.5: it must be a whole number"),
        ({"optimizer": {"lr": "fast"}}, "field optimizer.lr is 'fast': it must be a number"),
        ({"data": {"path": 3}}, "field data.path is 3: it must be a path or None"),
    ],
)
def test_values_of_another_type_are_named(values, message):
    with pytest.raises(UserError, match=message):
        from_dict(TrainConfig, values)


def test_help_names_every_option_and_preset(capsys):
    with pytest.raises(SystemExit) as done:
        parse("--help")
    assert done.value.code in (0, None)
    text = capsys.readouterr().out
    for name in [*option_names(PRESETS["debug"]()), *PRESETS]:
        assert name in text
    for section in ("training", "data", "optimizer", "schedule", "parallel", "evaluation", "checkpoint", "logging"):
        fields = dataclasses.fields(getattr(PRESETS["debug"](), section))
        assert all(f"--{section}.{field.name}" in text for field in fields)
