"""lm-evaluation-harness on a fuselm model: `python train/lm_eval_adapter.py MODEL --tasks hellaswag arc_easy`.

The harness asks three things of a model: log-probabilities of continuations, those of whole texts, and continuations
drawn until a stop string. `TextScorer` answers them and needs nothing but fuselm; `harness_model` puts it into the
harness's class, which `pip install lm_eval` brings. Texts become tokens in the way that the harness's own model for
transformers does it, so that results can be compared.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import torch
import tyro

from fuselm.model.generate import generate_text
from fuselm.model.llama import Llama
from fuselm.train.command_line import parse_arguments
from fuselm.train.finetune_model import load_tuned
from fuselm.train.sample import pick_device
from fuselm.train.tokenizer import TextTokenizer

DEFAULT_NEW_TOKENS = 256  # as the harness has it
_TASK_KEYWORDS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Window:
    """Ids of which the last `scored` are to be predicted from those before them."""

    ids: list[int]
    scored: int


class TextScorer:
    """What the harness asks, of one model on one device.

    Args:
        model: as `Llama`.
        tokenizer: of the model.
        batch_size: texts at a time.

    Attributes:
        longest: tokens that the model sees at once.
        prefix_id: what stands before a text: BOS, or the end of the text before it where there is none.
    """

    def __init__(self, model: Llama, tokenizer: TextTokenizer, *, batch_size: int = 8) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.longest = model.config.max_seq_len
        self.prefix_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id

    def encode_pair(self, context: str, continuation: str) -> Window:
        """The ids of a continuation and of what stands before it.

        White space at the end of a context belongs to the first word of what follows, and both are encoded together, as
        they would stand in a text. (Where the continuation only completes the context's last token, that would leave it
        none of its own, and they are encoded apart.) Of a context that is too long the beginning is dropped.

        Raises:
            UserError: the continuation is empty, or alone too long for the model.
        """
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not continuation:
            raise UserError(f"there is an empty continuation, after {context[-60:]!r}")
        before = self._start(kept)
        ids = [*before[: len(before) - len(self.tokenizer.encode(kept))], *self.tokenizer.encode(kept + continuation)]
        if len(ids) <= len(before):
            ids = [*before, *self.tokenizer.encode(continuation)]
        scored = len(ids) - len(before)
        if scored > self.longest:
            raise UserError(
                f"a continuation has {scored} tokens; the model takes {self.longest}: {continuation[:60]!r}"
            )
        return Window(ids[-(self.longest + 1) :], scored)

    def _start(self, text: str) -> list[int]:
        """The ids of a text that others follow: with BOS where there is one, and never none at all."""
        ids = self.tokenizer.encode(text)
        return [self.prefix_id, *ids] if self.tokenizer.bos_id is not None or not ids else ids

    def rolling_windows(self, text: str) -> list[Window]:
        """Windows in which each token of a text is predicted once.

        They lie side by side, but for the last, which reaches back so that it is full.
        """
        ids = [self.prefix_id, *self.tokenizer.encode(text)]
        windows = []
        for start in range(0, len(ids) - 1, self.longest):
            end = min(start + self.longest, len(ids) - 1)
            windows.append(Window(ids[max(end - self.longest, 0) : end + 1], end - start))
        return windows

    def score(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether each id is the likeliest one) of what each window predicts."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        # Those of about the same length together: the others are filled up.
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
        for first in range(0, len(order), self.batch_size):
            some = order[first : first + self.batch_size]
            for i, result in zip(some, self._score([windows[i] for i in some]), strict=True):
                results[i] = result
        return results

    @torch.no_grad()
    def _score(self, windows: Sequence[Window]) -> Iterator[tuple[float, bool]]:
        width = max(len(window.ids) for window in windows) - 1
        tokens = torch.zeros(len(windows), width, dtype=torch.int64)  # what follows a row is not seen by it
        for row, window in enumerate(windows):
            tokens[row, : len(window.ids) - 1] = torch.tensor(window.ids[:-1])
        logits = self.model(tokens.to(self.model.embedding.weight.device))
        for row, window in enumerate(windows):
            end = len(window.ids) - 1
            wanted = torch.tensor(window.ids[-window.scored :], device=logits.device)
            scores = logits[row, end - window.scored : end].float()
            picked = scores.log_softmax(-1).gather(-1, wanted[:, None]).sum(dtype=torch.float64)
            yield float(picked), bool((scores.argmax(-1) == wanted).all())

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is what greedy decoding gives."""
        return self.score([self.encode_pair(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text."""
        windows = [self.rolling_windows(text) for text in texts]
        scores = iter(self.score([window for some in windows for window in some]))
        return [sum(next(scores)[0] for _ in some) for some in windows]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What follows each context, up to one of its stop strings or the end of the text.

        Raises:
            UserError: a request asks for what is not offered (beams, ...).
        """
        groups: dict[str, list[int]] = {}
        for i, (_, options) in enumerate(requests):
            groups.setdefault(json.dumps(dict(options), sort_keys=True), []).append(i)
        texts = [""] * len(requests)
        for key, members in groups.items():
            options = json.loads(key)
            for first in range(0, len(members), self.batch_size):
                some = members[first : first + self.batch_size]
                for i, text in zip(some, self._generate([requests[i][0] for i in some], options), strict=True):
                    texts[i] = text
        return texts

    def _generate(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        other = {k: v for k, v in options.items() if k not in _TASK_KEYWORDS and (k, v) != ("num_beams", 1)}
        if other:
            raise UserError(f"a task asks to generate with {other}; what there is: {', '.join(_TASK_KEYWORDS)}")
        until = options.get("until") or []
        new = min(int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS)), self.longest - 1)
        # As in transformers, a temperature counts where it is asked to sample, and then 1 is the default.
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        try:
            return generate_text(
                self.model,
                [self._start(context)[-(self.longest - new) :] for context in contexts],
                self.tokenizer.decode,
                max_new_tokens=new,
                stop=[until] if isinstance(until, str) else [text for text in until if text],
                eos_id=self.tokenizer.eos_id,
                temperature=temperature,
                top_k=options.get("top_k"),
                top_p=options.get("top_p"),
            )
        except ValueError as error:
            raise UserError(str(error)) from error


def harness_model(scorer: TextScorer) -> Any:
    """The scorer as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)`.

    Raises:
        UserError: lm_eval is not installed.
    """
    try:
        base: Any = importlib.import_module("lm_eval.api.model").LM
    except ImportError as error:
        raise UserError(f"lm-evaluation-harness cannot be imported ({error}): pip install lm_eval") from error

    class FuselmLM(base):
        """Hands the harness's requests to a `TextScorer`."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return self._answered("loglikelihood", requests, scorer.loglikelihood([r.args for r in requests]))

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            found = scorer.loglikelihood_rolling([r.args[0] for r in requests])
            return self._answered("loglikelihood_rolling", requests, found)

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return self._answered("generate_until", requests, scorer.generate_until([r.args for r in requests]))

        def _answered(self, kind: str, requests: Sequence[Any], answers: list[Any]) -> list[Any]:
            for request, answer in zip(requests, answers, strict=True):
                self.cache_hook.add_partial(kind, request.args, answer)  # --use_cache of the harness
            return answers

    return FuselmLM()


def evaluate_tasks(scorer: TextScorer, arguments: Arguments) -> str:
    """Runs the harness; writes --output; returns its table.

    Raises:
        UserError: the harness is missing, or knows no such task.
    """
    model = harness_model(scorer)
    harness: Any = importlib.import_module("lm_eval.evaluator")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=None if arguments.include is None else str(arguments.include)
    )
    unknown = [task for task in arguments.tasks if task not in manager.all_tasks]
    if unknown:
        raise UserError(f"lm-evaluation-harness has no task {unknown[0]!r}: `lm_eval ls tasks` lists them")
    results = harness.simple_evaluate(
        model=model,
        tasks=list(arguments.tasks),
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        task_manager=manager,
    )
    if arguments.output is not None:
        kept = {
            k: results[k] for k in ("results", "versions", "n-shot", "n-samples", "lm_eval_version") if k in results
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"model": str(arguments.model), **kept}, indent=1, default=str) + "\n")
    return importlib.import_module("lm_eval.utils").make_table(results)


@dataclass
class Arguments:
    """Evaluate a model by lm-evaluation-harness."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """Run folder, such as runs/124m, or a Hugging Face Llama folder."""
    tasks: tuple[str, ...] = field(default_factory=tuple)
    """Names of the harness's tasks."""
    include: Path | None = None
    """Folder with further tasks, as the harness's --include_path."""
    num_fewshot: int | None = None
    """Examples before each question; by default the task's own number."""
    limit: int | None = None
    """Only so many items of each task."""
    batch_size: int = 8
    """Texts at a time."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; by default a GPU where there is one."""
    eos_token: str | None = None
    """End-of-text token of the tokenizer; by default the first usual name that it has."""
    bos_token: str | None = None
    """Token that begins each text, if the model was trained with one (such as <|begin_of_text|> of Llama 3)."""
    output: Path | None = None
    """JSON file for the results."""


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    try:
        raise_on_interrupt()
        arguments = parse_arguments(Arguments, args, "lm_eval_adapter.py")
        if arguments.batch_size < 1:
            raise UserError(f"batch_size is {arguments.batch_size}; it must be at least 1")
        if not arguments.tasks:
            raise UserError("tasks is empty: name at least one, such as --tasks hellaswag")
        model, place = load_tuned(arguments.model, device=pick_device(arguments.device))
        tokenizer = TextTokenizer.load(
            place / "tokenizer.json" if place.is_dir() else place,
            eos_token=arguments.eos_token,
            bos_token=arguments.bos_token,
        )
        table = evaluate_tasks(TextScorer(model, tokenizer, batch_size=arguments.batch_size), arguments)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        report("interrupted")
        return 130
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
