"""Sampling from a run folder, as a command and as functions."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from fuselm.model.config import LlamaConfig
from fuselm.model.generate import generate
from fuselm.model.llama import Llama
from fuselm.train.checkpoint_writer import Retention, save_checkpoint
from fuselm.train.config import TrainConfig, to_json
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.sample import load_run, main, sample
from fuselm.train.tokenizer import TextTokenizer

from ..forked import Program, Server

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the cat and the dog sat on the mat\nwith a \N{GRINNING FACE} and a h\u00e9\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints: the model of step 1 says only "a", that of step 2 is random."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    run.mkdir()
    tokenizer = TextTokenizer.train([TEXT], 300)
    (run / "tokenizer.json").write_bytes(tokenizer.to_json())
    shape = LlamaConfig(vocab_size=320, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=48)
    config = dataclasses.replace(TrainConfig(), model=shape)
    (run / "config.json").write_text(to_json(config))
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    for step in (1, 2):
        model = Llama(shape)
        with torch.no_grad():
            if step == 1:
                model.norm.weight.fill_(1.0)
                model.embedding.weight.fill_(0.1)
                head = model.head_weight
                head[tokenizer.encode("a")[0]] = 5.0
            else:
                for parameter in model.parameters():
                    parameter.mul_(4)
        optimizer = torch.optim.AdamW(model.parameters())
        save_checkpoint(
            run, model, optimizer, world=world, retention=Retention(5), config={}, position={}, progress={"step": step}
        )
    return run


def test_the_text_is_what_the_model_draws(run: Path) -> None:
    model, tokenizer = load_run(run)
    assert not model.training and next(model.parameters()).dtype == torch.float32
    prompt = "the cat"
    ids = tokenizer.encode(prompt)
    drawn = generate(
        model,
        torch.tensor([ids]),
        max_new_tokens=20,
        temperature=0.9,
        top_k=50,
        top_p=0.9,
        seed=4,
        eos_id=tokenizer.eos_id,
    )[0, len(ids) :].tolist()
    if tokenizer.eos_id in drawn:
        drawn = drawn[: drawn.index(tokenizer.eos_id)]
    text = "".join(sample(model, tokenizer, prompt, max_tokens=20, temperature=0.9, top_k=50, top_p=0.9, seed=4))
    assert text == tokenizer.decode(drawn) and len(drawn) > 2


def test_command_prints_prompt_and_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run), "--prompt", "the \n\ttwo", "--max-tokens", "6", "--device", "cpu"]
    assert main([*arguments, "--step", "1", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "the \n\ttwoaaaaaa\n"
    texts = []
    for seed in ("3", "3", "4"):
        assert main([*arguments, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]  # and the newest checkpoint was taken, which says more than "a"
    assert texts[0].startswith("the \n\ttwo") and texts[0] != "the \n\ttwoaaaaaa\n"


def test_empty_prompt_and_full_context(run: Path) -> None:
    model, tokenizer = load_run(run, step=1)
    assert "".join(sample(model, tokenizer, "", max_tokens=5, temperature=0)) == "aaaaa"
    full = "a " * 20
    room = 48 - len(tokenizer.encode(full))
    assert "".join(sample(model, tokenizer, full, max_tokens=500, temperature=0)) == "a" * room
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens; the model takes 48 with at least one new one"):
        sample(model, tokenizer, "a " * 100, max_tokens=1)


def test_text_ends_at_the_end_of_text(run: Path) -> None:
    model, tokenizer = load_run(run, step=1)
    with torch.no_grad():
        model.head_weight[tokenizer.eos_id] = 50.0
    assert "".join(sample(model, tokenizer, "the", max_tokens=9, temperature=0)) == ""


def test_model_trained_with_other_kernels_runs_on_a_cpu(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    model, _ = load_run(run)
    shape = dataclasses.replace(model.config, kernels="triton", attention_backend="cudnn")
    (other / "config.json").write_text(to_json(dataclasses.replace(TrainConfig(), model=shape)))
    again, tokenizer = load_run(other)
    texts = ["".join(sample(m, tokenizer, "the", max_tokens=9, temperature=0)) for m in (model, again)]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda run: shutil.rmtree(run), [], "run folder {run} does not exist"),
        (lambda run: (shutil.rmtree(run), run.touch()), [], "run folder {run} is not a folder"),
        (lambda run: (run / "config.json").unlink(), [], "cannot read {run}/config.json"),
        (lambda run: (run / "tokenizer.json").unlink(), [], "tokenizer {run}/tokenizer.json does not exist"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "run folder {run} has no complete checkpoint"),
        (lambda run: None, ["--step", "3"], "checkpoint {run}/checkpoints/step_00000003 does not exist"),
        (lambda run: None, ["--top-p", "2"], "top_p=2.0: expected above 0"),
        (lambda run: None, ["--max-tokens", "-1"], "max_new_tokens=-1"),
        (lambda run: None, ["--device", "gpu0"], "device 'gpu0' cannot be used"),
        (lambda run: None, ["--device", "meta"], "device 'meta' cannot be used"),
        (lambda run: None, ["--promt", "x"], "unknown option --promt (did you mean --prompt?)"),
        (lambda run: None, ["--top-k", "many"], "--top-k wants a whole number or None, got 'many'"),
        (lambda run: None, ["--temperature"], "--temperature wants a number, got nothing"),
        (lambda run: None, ["more"], "unexpected argument 'more'"),
        (lambda run: None, ["--seed", str(2**64)], "seed=18446744073709551616: expected"),
        (lambda run: None, ["--prompt", "a\udcff"], "the prompt is not UTF-8 text"),
        (lambda run: (run / "config.json").write_text('{"model": null}'), [], "field model is None"),
        (
            lambda run: (run / "tokenizer.json").write_bytes(
                TextTokenizer.train([TEXT * 9 + str([*range(99)])], 330).to_json()
            ),
            [],
            "tokens, the model of {run} only 320",
        ),
    ],
)
def test_bad_input_is_one_line(change, options: list[str], message: str, run: Path, tmp_path: Path, capsys) -> None:
    mine = tmp_path / "run"
    shutil.copytree(run, mine)
    change(mine)
    assert main([str(mine), "--max-tokens", "2", *options]) == 2
    output, errors = capsys.readouterr()
    assert message.format(run=mine) in errors and errors.startswith("error: ") and errors.count("\n") == 1
    assert output == ""


def test_runs_as_a_script(run: Path, tmp_path: Path, server: Server) -> None:
    command = [str(ROOT / "train" / "sample.py"), str(run), "--max-tokens", "3", "--temperature", "0"]
    program = Program(server, [*command, "--prompt", "a", "--step", "1"], cwd=tmp_path)
    code, (out, err) = program.wait(120), program.communicate()
    assert (code, out) == (0, "aaaa\n"), err
