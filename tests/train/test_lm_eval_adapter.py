"""What lm-evaluation-harness asks of a model, against the plain forward pass; and the harness's class around it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama
from fuselm.train.errors import UserError
from fuselm.train.lm_eval_adapter import Arguments, TextScorer, evaluate_tasks, harness_model, main
from fuselm.train.tokenizer import TextTokenizer

TEXT = "The miller went to the mill, and the miller's mule went with him. Größe — 大きい.\n" * 4


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.train([TEXT], 300)


@pytest.fixture(scope="module")
def scorer(tokenizer: TextTokenizer) -> TextScorer:
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        dim=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        ffn_dim=48,
        max_seq_len=24,
        kernels="eager",
    )
    torch.manual_seed(0)
    model = Llama(config)
    model.init_weights()
    with torch.no_grad():  # initial weights hardly prefer anything
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return TextScorer(model.eval(), tokenizer, batch_size=3)


def log_probability(scorer: TextScorer, ids: list[int], scored: int) -> tuple[float, bool]:
    """By the definition: one id after the other, each from all before it."""
    total, greedy = 0.0, True
    for end in range(len(ids) - scored, len(ids)):
        logits = scorer.model(torch.tensor([ids[:end]]))[0, -1].double()
        total += float(logits.log_softmax(-1)[ids[end]].detach())
        greedy &= int(logits.argmax()) == ids[end]
    return total, greedy


def test_continuations_have_the_log_probability_of_their_ids(scorer: TextScorer, tokenizer: TextTokenizer) -> None:
    pairs = [("The miller", " went"), ("The", " mule went with him."), ("", "mill"), ("the mill ", "er"), (" ", "went")]
    for (context, continuation), (value, greedy) in zip(pairs, scorer.loglikelihood(pairs), strict=True):
        together = tokenizer.encode(context + continuation)
        before = tokenizer.encode(context.rstrip())
        ids = together if before else [tokenizer.eos_id, *together]
        expected = log_probability(scorer, ids, len(together) - len(before))
        assert value == pytest.approx(expected[0], rel=1e-5) and greedy == expected[1]


def test_a_context_that_is_too_long_loses_its_beginning(scorer: TextScorer, tokenizer: TextTokenizer) -> None:
    window = scorer.encode_pair(TEXT, " went")
    assert len(window.ids) == 25 and window.ids == tokenizer.encode(TEXT.rstrip() + "\n went")[-25:]
    with pytest.raises(UserError, match=r"a continuation has \d+ tokens; the model takes 24"):
        scorer.encode_pair("The", TEXT)
    with pytest.raises(UserError, match="there is an empty continuation, after 'The'"):
        scorer.encode_pair("The", "")


def test_a_continuation_that_completes_a_token_is_scored_on_its_own(scorer: TextScorer) -> None:
    encode = scorer.tokenizer.encode
    assert len(encode("Größe")) <= len(encode("Grö"))
    ids = [*encode("Grö"), *encode("ße")]
    expected = log_probability(scorer, ids, len(encode("ße")))
    assert scorer.loglikelihood([("Grö", "ße")])[0] == (pytest.approx(expected[0], rel=1e-5), expected[1])


def test_what_greedy_decoding_gives_is_called_greedy(scorer: TextScorer) -> None:
    context = "The miller went"
    ids = scorer.tokenizer.encode(context)
    for _ in range(4):
        ids.append(int(scorer.model(torch.tensor([ids]))[0, -1].argmax()))
    window = type(scorer.encode_pair(context, " to"))(ids, 4)
    other = type(window)([*ids[:-1], (ids[-1] + 1) % scorer.model.config.vocab_size], 4)
    assert [greedy for _, greedy in scorer.score([window, other])] == [True, False]


@pytest.mark.parametrize("tokens", [1, 23, 24, 25, 48, 60])
def test_rolling_windows_predict_each_token_once(scorer: TextScorer, tokenizer: TextTokenizer, tokens: int) -> None:
    text = tokenizer.decode(tokenizer.encode(TEXT)[:tokens])
    ids = tokenizer.encode(text)
    windows = scorer.rolling_windows(text)
    predicted = [token for window in windows for token in window.ids[-window.scored :]]
    assert predicted == ids and all(1 <= w.scored < len(w.ids) <= 25 for w in windows)
    assert windows[0].ids[0] == tokenizer.eos_id
    if len(ids) > 24:
        assert len(windows[-1].ids) == 25  # as much context as there is room for
    expected = sum(log_probability(scorer, w.ids, w.scored)[0] for w in windows)
    assert scorer.loglikelihood_rolling([text])[0] == pytest.approx(expected, rel=1e-5)


def test_bos_comes_first_and_once(tokenizer: TextTokenizer, scorer: TextScorer) -> None:
    named = json.loads(tokenizer.to_json())
    named["added_tokens"].append({**named["added_tokens"][0], "id": tokenizer.vocab_size, "content": "<s>"})
    with_bos = TextTokenizer.from_json(json.dumps(named).encode(), bos_token="<s>")
    assert with_bos.bos_id is not None
    other = TextScorer(scorer.model, with_bos)
    for context in ("The miller", ""):
        window = other.encode_pair(context, " went")
        assert window.ids[0] == with_bos.bos_id and window.ids.count(with_bos.bos_id) == 1
    assert other.rolling_windows("The mill")[0].ids[0] == with_bos.bos_id


def test_generation_stops_at_strings_and_is_the_same_in_any_batch(scorer: TextScorer) -> None:
    contexts = ["The miller went", "", TEXT, "mule"]
    free = scorer.generate_until([(c, {"max_gen_toks": 8, "until": []}) for c in contexts])
    alone = [scorer.generate_until([(c, {"max_gen_toks": 8})])[0] for c in contexts]
    assert free == alone and free[0] and free[2]
    stop = free[0][2:4]
    cut = scorer.generate_until([(contexts[0], {"until": [stop, ""], "max_gen_toks": 8, "do_sample": False})])
    assert cut == [free[0][: free[0].index(stop)]]
    assert scorer.generate_until([(contexts[0], {"until": stop, "max_gen_toks": 8, "temperature": 0.7})]) == cut
    with pytest.raises(UserError, match=r"a task asks to generate with \{'num_beams': 4\}"):
        scorer.generate_until([("The", {"num_beams": 4})])


TASK = """
task: fuselm_choice
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ctx}}"
doc_to_choice: "{{endings}}"
doc_to_target: "{{label}}"
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the harness that the adapter uses, by their documentation, where it is not installed."""

    class LM:
        def __init__(self) -> None:
            self.kept: list[tuple[str, Any, Any]] = []
            self.cache_hook = types.SimpleNamespace(add_partial=lambda *entry: self.kept.append(entry))

    class TaskManager:
        all_tasks = ("fuselm_choice",)

        def __init__(self, include_path: str | None) -> None:
            self.include_path = include_path

    def simple_evaluate(*, model: Any, tasks: list[str], limit: int | None, task_manager: Any, **_: Any) -> dict:
        folder = Path(task_manager.include_path)
        items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()][:limit]
        right = 0
        for item in items:
            asked = [types.SimpleNamespace(args=(item["ctx"], " " + ending)) for ending in item["endings"]]
            values = [value for value, _ in model.loglikelihood(asked)]
            right += values.index(max(values)) == item["label"]
        return {"results": {tasks[0]: {"acc,none": right / len(items)}}}

    for name, content in (
        ("lm_eval", {}),
        ("lm_eval.api", {}),
        ("lm_eval.api.model", {"LM": LM}),
        ("lm_eval.evaluator", {"simple_evaluate": simple_evaluate}),
        ("lm_eval.tasks", {"TaskManager": TaskManager}),
        ("lm_eval.utils", {"make_table": lambda results: json.dumps(results["results"])}),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package where it is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        stand_in(monkeypatch)


def test_the_harness_counts_what_the_scorer_says(harness: None, scorer: TextScorer, tmp_path: Path) -> None:
    items = []
    for ctx, endings in (("The miller went", ["to the mill", "with him"]), ("the mule", ["went", "mill", "him."])):
        scores = [value for value, _ in scorer.loglikelihood([(ctx, " " + ending) for ending in endings])]
        items.append({"ctx": ctx, "endings": endings, "label": scores.index(max(scores))})
    items.append({**items[-1], "label": (items[-1]["label"] + 1) % 3})
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "fuselm_choice.yaml").write_text(TASK.replace("FILE", str(tmp_path / "items.jsonl")))
    output = tmp_path / "results" / "lm_eval.json"
    arguments = Arguments(Path("model"), tasks=("fuselm_choice",), include=tmp_path, output=output)
    table = evaluate_tasks(scorer, arguments)
    assert "acc" in table
    assert json.loads(output.read_text())["results"]["fuselm_choice"]["acc,none"] == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="has no task 'no_such_task'"):
        evaluate_tasks(scorer, Arguments(Path("model"), tasks=("no_such_task",)))


def test_each_request_is_answered_in_its_place(harness: None, scorer: TextScorer) -> None:
    model = harness_model(scorer)
    request = types.SimpleNamespace
    pairs = [("The miller", " went"), ("The", " mule")]
    assert model.loglikelihood([request(args=pair) for pair in pairs]) == scorer.loglikelihood(pairs)
    rolled = model.loglikelihood_rolling([request(args=(TEXT,)), request(args=("mill",))])
    assert rolled == scorer.loglikelihood_rolling([TEXT, "mill"])
    asked = [("The", {"max_gen_toks": 4}), ("mule", {"max_gen_toks": 3})]
    assert model.generate_until([request(args=each) for each in asked]) == scorer.generate_until(asked)


def test_errors_are_one_line(
    tmp_path: Path, scorer: TextScorer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match="pip install lm_eval"):
        harness_model(scorer)
    assert main([str(tmp_path)]) == 2
    assert "tasks is empty" in capsys.readouterr().err
    assert main([str(tmp_path / "missing"), "--tasks", "hellaswag"]) == 2
    assert "missing" in capsys.readouterr().err
