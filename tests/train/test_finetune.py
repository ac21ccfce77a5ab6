"""Fine-tuning on a toy chat: answers become those of the data, in all weights and in adapters, and can be talked to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from fuselm.model.config import LlamaConfig
from fuselm.model.hf import export_hf, load_hf
from fuselm.model.llama import MLP, Llama
from fuselm.train import chat, distributed, finetune
from fuselm.train.chat_data import ChatTemplate
from fuselm.train.finetune_model import load_tuned, open_base
from fuselm.train.tokenizer import TextTokenizer
from fuselm.train.trainer import StopSignal

from ..forked import Program, Server

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"the sky": "Blue, mostly.", "a lemon": "Yellow.", "snow": "White \N{SNOWFLAKE}.", "grass": "It is green."}
OTHERS = {"the sky": "Yellow.", "a lemon": "It is green."}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAST = ["--device", "cpu", "--dtype", "float32", "--seq-len", "64", "--micro-batch-size", "2"]


def write(path: Path, facts: dict[str, str]) -> Path:
    talks = [
        {"messages": [{"role": "user", "content": f"What colour has {k}?"}, {"role": "assistant", "content": v}]}
        for k, v in facts.items()
    ]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A random model in a Hugging Face folder, with a chat template."""
    folder = tmp_path_factory.mktemp("base")
    texts = [f"What colour has {k}? {v}" for k, v in FACTS.items()]
    backend = Tokenizer.from_str(TextTokenizer.train(texts, 290).to_json().decode())
    backend.add_special_tokens([AddedToken(f"<|{n}|>", special=True) for n in ("system", "user", "assistant", "end")])
    (folder / "tokenizer.json").write_text(backend.to_str())
    shape = LlamaConfig.from_preset("debug", vocab_size=300, max_seq_len=96)
    model = Llama(shape)
    return export_hf(
        model, folder / "hf", dtype=torch.float32, tokenizer=folder / "tokenizer.json", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory) -> Path:
    """All weights, trained on FACTS."""
    runs = tmp_path_factory.mktemp("runs")
    data = write(runs / "facts.jsonl", FACTS)
    options = ["--runs", str(runs), "--name", "facts", "--steps", "60", "--lr", "5e-3", "--validation", str(data)]
    assert finetune.main([str(base), str(data), *FAST, *options]) == 0
    return runs / "facts"


def answers(path: Path, questions: dict[str, str] = FACTS, **options) -> dict[str, str]:
    model, tokenizer = load_tuned(path, torch.device("cpu"))
    arguments = chat.Arguments(path, max_tokens=24, temperature=0, top_p=None, **options)
    conversation = chat.Conversation(model, ChatTemplate.load(tokenizer), arguments)
    result = {}
    for key in questions:
        conversation.reset()
        result[key] = "".join(conversation.answer(f"What colour has {key}?"))
    return result


def test_answers_become_those_of_the_data(base: Path, tuned: Path) -> None:
    before = answers(base)
    assert not any(before[key] == FACTS[key] for key in FACTS)
    assert answers(tuned) == FACTS
    entries = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    validation = [e["validation_loss"] for e in entries if "validation_loss" in e]
    assert validation[0] > 4 and validation[-1] < 0.1
    card = (tuned / "model" / "README.md").read_text()
    assert "| Steps | 60 x 2 rows of 64 tokens |" in card and "Validation loss after" in card
    template = ChatTemplate.load(tuned / "model")
    assert template.source == TEMPLATE
    generation = json.loads((tuned / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == template.stop_ids
    names = {path.name for path in tuned.iterdir()}
    assert names == {"model", "metrics.jsonl", "finetune.json", "tokenizer.json", "tokenizer_config.json"}


def test_validation_counts_every_conversation_once(base: Path, tmp_path: Path, world, losses_of) -> None:
    """Three rows of a batch of two, then one that fills up with empty ones: loss as of each conversation alone."""
    data = write(tmp_path / "facts.jsonl", FACTS)
    losses = {}
    for rows in (1, 2, 3):
        arguments = finetune.Arguments(
            base, data, name=f"by{rows}", runs=tmp_path, validation=data, device="cpu", dtype="float32",
            seq_len=24, micro_batch_size=rows, steps=1, lr=0.0,
        )  # fmt: skip
        run = finetune.FineTuning(arguments, None, world)
        run.train(StopSignal())
        losses[rows] = run.losses["Validation loss after"]
        assert run.validation is not None and run.validation.stream.sequences_per_epoch % rows == 0
    assert losses[2] == pytest.approx(losses[1], rel=1e-6) and losses[3] == pytest.approx(losses[1], rel=1e-6)


def test_transformers_gives_the_same_answer(tuned: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tuned / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tuned / "model")
    talk = [{"role": "user", "content": "What colour has a lemon?"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = model.generate(ids["input_ids"], max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(text[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == FACTS["a lemon"]


def test_adapters_change_answers_and_leave_the_base_alone(tuned: Path, tmp_path: Path) -> None:
    weights = (tuned / "model" / "model.safetensors").read_bytes()
    data = write(tmp_path / "others.jsonl", OTHERS)
    options = [
        "--runs",
        str(tmp_path),
        "--name",
        "lora",
        "--steps",
        "60",
        "--lr",
        "2e-2",
        "--lora-rank",
        "4",
        "--merge",
    ]
    assert finetune.main([str(tuned), str(data), *FAST, *options, "--recompute", "full"]) == 0
    run = tmp_path / "lora"
    assert answers(run, OTHERS) == OTHERS
    assert (tuned / "model" / "model.safetensors").read_bytes() == weights
    assert (run / "adapter" / "adapter.safetensors").stat().st_size < len(weights) / 3
    merged = load_hf(run / "model")
    shutil.rmtree(run / "model")
    alone, _ = load_tuned(run, torch.device("cpu"))
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(alone(tokens), merged(tokens), rtol=1e-4, atol=1e-4)
    assert answers(run, OTHERS) == OTHERS


def test_talk_through_a_pipe(tuned: Path, tmp_path: Path, server: Server) -> None:
    lines = "What colour has snow?\n\n/reset\nWhat colour has the sky?\nA <|end|> token?\n/quit\nnever read\n"
    command = [str(ROOT / "train" / "chat.py"), str(tuned), "--temperature", "0", "--device", "cpu", "--stats"]
    talk = Program(server, command, input=lines, cwd=tmp_path)
    code, (out, err) = talk.wait(120), talk.communicate()
    assert code == 0, err
    assert out == "White \N{SNOWFLAKE}.\nBlue, mostly.\n"
    assert err.count("tok/s") == 2 and "error: a message of role user holds the special token" in err
    assert not list(tmp_path.iterdir())


def test_two_ranks_train_as_one(base: Path, tmp_path: Path, launch, losses_of) -> None:
    """The same rows and losses; the model is gathered from both."""
    data = write(tmp_path / "facts.jsonl", FACTS)
    common = [str(base), str(data), "--device", "cpu", "--dtype", "float32", "--steps", "4", "--lr", "5e-3"]
    common += ["--seq-len", "24", "--runs", str(tmp_path)]
    assert finetune.main([*common, "--name", "one", "--micro-batch-size", "4"]) == 0
    script = str(ROOT / "train" / "finetune.py")
    for code, _, errors in launch([script, *common, "--name", "two", "--micro-batch-size", "2"], 2).wait():
        assert code == 0, errors
    one, two = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert one.keys() == {1, 2, 3, 4} and two == pytest.approx(one, rel=1e-5)
    a, b = load_hf(tmp_path / "one" / "model"), load_hf(tmp_path / "two" / "model")
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


def test_a_run_that_is_asked_to_stop_writes_its_model(base: Path, tmp_path: Path, world, losses_of) -> None:
    data = write(tmp_path / "facts.jsonl", FACTS)
    arguments = finetune.Arguments(base, data, runs=tmp_path, device="cpu", dtype="float32", seq_len=64, steps=50)
    stop = StopSignal()
    stop.received = "SIGTERM"
    finetune.FineTuning(arguments, None, world).train(stop)
    assert losses_of(tmp_path / "finetuned").keys() == {1}
    assert load_hf(tmp_path / "finetuned" / "model").num_parameters() == load_hf(base).num_parameters()


def test_swiglu_is_computed_again_and_the_gradient_stays(base: Path, tmp_path: Path, world) -> None:
    data = write(tmp_path / "facts.jsonl", FACTS)
    entries = []
    for recompute in ("none", "swiglu"):
        arguments = finetune.Arguments(
            base, data, name=recompute, runs=tmp_path, device="cpu", dtype="float32", seq_len=64, steps=50,
            lora_rank=2, recompute=recompute,
        )  # fmt: skip
        run = finetune.FineTuning(arguments, finetune.check(arguments), world)
        switches = {m.recompute_activation for m in run.model.modules() if isinstance(m, MLP)}
        assert switches == {recompute == "swiglu"}
        stop = StopSignal()
        stop.received = "SIGTERM"
        run.train(stop)
        entries.append(json.loads((tmp_path / recompute / "metrics.jsonl").read_text().splitlines()[0]))
    assert entries[0]["step"] == 1 and entries[0]["grad_norm"] > 0
    assert [entries[1][key] for key in ("loss", "grad_norm")] == [entries[0][key] for key in ("loss", "grad_norm")]


@pytest.mark.parametrize(
    ("error", "targets"),
    [
        (torch.OutOfMemoryError("CUDA: no 2 GiB.\nMore."), "down"),
        (RuntimeError("can't allocate memory"), "qkv"),  # a frozen layer keeps nothing of the activation before it
    ],
)
def test_out_of_memory_names_the_options_of_this_command(
    error, targets, base: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(finetune, "forward_backward", fails)
    monkeypatch.setattr("os._exit", leave)
    data = write(tmp_path / "facts.jsonl", FACTS)
    options = ["--runs", str(tmp_path), "--lora-rank", "2", "--lora-targets", targets, "--steps", "1"]
    try:
        with pytest.raises(SystemExit) as done:
            finetune.main([str(base), str(data), *FAST, *options])
    finally:
        distributed.stop(distributed.World(0, 0, 1, torch.device("cpu")))
    said = capsys.readouterr().err
    assert done.value.code == 2 and said.startswith("error: out of memory on rank 0") and said.count("\n") == 1
    wanted = ["recompute to swiglu", "micro-batch-size to 1", "recompute to full"][targets == "qkv" :]
    ways = [said.find(f"set --{way}") for way in wanted]
    assert said.count("set --") == len(wanted)
    assert -1 not in ways and ways == sorted(ways), said
    assert "with --global-batch-size 2 a step stays the same" in said and "parallel." not in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--lr", "-1"], "--lr is -1.0: it must be at least 0"),
        (["--epochs", "0"], "--epochs is 0.0: it must be above 0"),
        (["--epochs", "inf"], "--epochs is inf: it must be finite"),
        (["--lr", "inf"], "--lr is inf: it must be finite"),
        (["--weight-decay", "-1"], "--weight-decay is -1.0: it must be finite and not below 0"),
        (["--weight-decay", "nan"], "--weight-decay is nan: it must be finite"),
        (["--warmup", "2"], "--warmup is 2.0: it must be from 0 to 1"),
        (["--dtype", "half"], "--dtype is 'half': it must be one of bfloat16, float32"),
        (["--name", "a/b"], "--name is 'a/b': it must be the name of a folder"),
        (["--merge"], "--merge is for adapters"),
        (["--lora-rank", "2", "--lora-targets", "q_proj"], "targets=('q_proj',): expected some of"),
        (["--global-batch-size", "3"], "--global-batch-size 3 does not divide by 1 ranks x --micro-batch-size 2 = 2"),
        (["--template", "nowhere.jinja"], "cannot read nowhere.jinja: No such file"),
        (["--seq-len", "3"], "no answer of 4 conversations lies within the first 3 tokens"),
        (["--leraning-rate", "1"], "unknown option --leraning-rate"),
    ],
)
def test_bad_input_is_one_line(change, message, base: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "facts.jsonl", FACTS)
    assert finetune.main([str(base), str(data), *FAST, *change]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.startswith("error: ") and errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_bad_folders_are_one_line(base: Path, tmp_path: Path, capsys) -> None:
    data = write(tmp_path / "facts.jsonl", FACTS)
    for name, content in (("config.json", None), ("tokenizer.json", None), ("model.safetensors", b"no")):
        broken = tmp_path / name.partition(".")[0]
        shutil.copytree(base, broken)
        (broken / name).unlink()
        if content is not None:
            (broken / name).write_bytes(content)
        for main, more in ((finetune.main, [str(data), *FAST, "--runs", str(tmp_path / "runs")]), (chat.main, [])):
            assert main([str(broken), *more]) == 2
            errors = capsys.readouterr().err
            assert errors.startswith("error: ") and errors.count("\n") == 1 and name in errors
    assert chat.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert open_base(base, torch.device("cpu")).is_run is False


@pytest.mark.parametrize("inside", ["", "model"])
def test_a_run_does_not_move_its_own_base_aside(inside: str, base: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "runs" / "mine"
    shutil.copytree(base, run / inside)
    before = sorted(run.rglob("*"))
    data = write(tmp_path / "facts.jsonl", FACTS)
    options = ["--runs", str(run.parent), "--name", "mine", "--steps", "1", "--lora-rank", "2"]
    assert finetune.main([str(run), str(data), *FAST, *options]) == 2
    assert "mine holds the model to start from: give the new run another --name" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before and [p.name for p in run.parent.iterdir()] == ["mine"]


def test_an_adapter_on_itself_is_one_line(tmp_path: Path, capsys) -> None:
    settings = {"rank": 2, "alpha": 4.0, "targets": ["qkv"], "base": str(tmp_path)}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter.json").write_text(json.dumps(settings))
    assert chat.main([str(tmp_path)]) == 2
    assert "which holds an adapter itself" in capsys.readouterr().err
    (tmp_path / "adapter" / "adapter.json").write_text("[" * 100_000)
    assert chat.main([str(tmp_path)]) == 2
    assert "adapter.json is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--temperature=-1", "--temperature=nan", "--top-k=0", "--top-p=1.5"])
def test_a_number_out_of_range_ends_before_anything_is_read(option, capsys):
    assert chat.main(["no_such_model", option]) == 2
    said = capsys.readouterr().err
    assert option.strip("-").partition("=")[0].replace("-", "_") in said and "expected" in said
