"""Text from a trained run: `python train/sample.py RUN --prompt TEXT`, or `fuselm-sample`."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import torch
import tyro

from fuselm.model.generate import generate_stream
from fuselm.model.llama import Llama
from fuselm.model.text_stream import TextStream
from fuselm.train.checkpointing import latest_checkpoint, load_model, step_folder
from fuselm.train.command_line import parse_arguments
from fuselm.train.config import config_from_json
from fuselm.train.tokenizer import TextTokenizer


def load_run(
    run: Path,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    eos_token: str | None = None,
    bos_token: str | None = None,
) -> tuple[Llama, TextTokenizer]:
    """The model and tokenizer of a run folder.

    Args:
        run: a folder with config.json, tokenizer.json and checkpoints.
        step: which checkpoint; None takes the newest complete one.
        device: where the model goes, in bf16 on a GPU and in fp32 on a CPU.
        eos_token: the tokenizer's end-of-text token; None looks for the usual names.
        bos_token: the token that begins each document of the data, if one does.

    Raises:
        UserError: something of it is missing, damaged, or does not belong together.
    """
    device = torch.device(device)
    if not run.is_dir():
        raise UserError(f"run folder {run} {'is not a folder' if run.exists() else 'does not exist'}")
    shape = config_from_json(run).model
    tokenizer = TextTokenizer.load(run / "tokenizer.json", eos_token=eos_token, bos_token=bos_token)
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"{run / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, the model of {run} only {shape.vocab_size}"
        )
    checkpoint = latest_checkpoint(run) if step is None else step_folder(run, step)
    if checkpoint is None:
        raise UserError(f"run folder {run} has no complete checkpoint")
    if not checkpoint.is_dir():
        raise UserError(f"checkpoint {checkpoint} does not exist")
    # Whatever it was trained with: another backend may be missing here, or not take this device.
    kernels = "eager" if device.type == "cpu" else "auto"
    shape = dataclasses.replace(shape, kernels=kernels, attention_backend="fuselm")
    with torch.device("meta"):
        model = Llama(shape)
    model.to_empty(device="cpu")
    load_model(checkpoint, model)
    return model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16).eval(), tokenizer


def sample(
    model: Llama,
    tokenizer: TextTokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    meter: Meter | None = None,
) -> Iterator[str]:
    """Yields the text that follows a prompt, as it comes, until the end-of-text token, a stop string or `max_tokens`.

    Args:
        model: on any device.
        tokenizer: of the model.
        prompt: plain text; an empty one starts a new document.
        max_tokens: tokens to draw; fewer where the model's max_seq_len is reached.
        temperature: as `generate` has it; so are top_k, top_p and seed.
        stop: strings that end the text; they are not part of it.
        meter: hears of each token.

    Raises:
        UserError: the prompt is too long, or a value is out of range.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not UTF-8 text: byte or surrogate at character {error.start}") from error
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [*start, *tokenizer.encode(prompt)] or [tokenizer.eos_id]
    limit = model.config.max_seq_len
    if len(ids) >= limit:
        raise UserError(f"the prompt has {len(ids)} tokens; the model takes {limit} with at least one new one")
    device = model.embedding.weight.device
    meter = Meter() if meter is None else meter
    meter.start(len(ids))
    try:
        text = TextStream(tokenizer.decode, stop=stop, stop_ids=[tokenizer.eos_id])
        stream = generate_stream(
            model,
            torch.tensor([ids], device=device),
            max_new_tokens=min(max_tokens, limit - len(ids)),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eos_id=tokenizer.eos_id,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return pieces_of(stream, text, meter)


def pieces_of(stream: Iterator[torch.Tensor], text: TextStream, meter: Meter) -> Iterator[str]:
    """The text of one sequence's tokens, piece by piece.

    Args:
        stream: (1,) tokens.
        text: makes text of them, and says when it ends.
        meter: hears of each token.
    """
    for drawn in stream:
        token = int(drawn)
        meter.tick()
        yield text.push(token)
        if text.ended:
            return
    yield text.flush()


class Meter:
    """Tokens a second of one text: the prompt and the first token apart from those that follow."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, prompt: int) -> None:
        """A prompt of so many tokens begins."""
        self.prompt, self.tokens = prompt, 0
        self._began = self._first = self._last = time.perf_counter()

    def tick(self) -> None:
        """One more token has come."""
        self.tokens += 1
        self._last = time.perf_counter()
        if self.tokens == 1:
            self._first = self._last

    def __str__(self) -> str:
        line = f"{self.tokens} tokens; the prompt's {self.prompt} and the first took {self._first - self._began:.2f} s"
        if self.tokens < 2:
            return line
        seconds = self._last - self._first
        return f"{line}, then {(self.tokens - 1) / max(seconds, 1e-9):,.1f} tok/s"


@dataclass
class Arguments:
    """Print text from a trained run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/debug."""
    prompt: str = ""
    """Text to go on from; without one a new document begins."""
    max_tokens: int = 200
    """Tokens to draw; fewer where the text ends or the model's context is full."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together reach this probability."""
    stop: str | None = None
    """The text ends before this string."""
    seed: int | None = None
    """The same seed gives the same text on the same kind of device."""
    step: int | None = None
    """Step of the checkpoint; by default the newest complete one."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; by default a GPU where there is one."""
    eos_token: str | None = None
    """End-of-text token of the tokenizer; by default the first usual name that it has."""
    bos_token: str | None = None
    """Token that begins each document, if the data was prepared with one."""


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    raise_on_interrupt()
    try:
        arguments = parse_arguments(Arguments, args, "sample.py")
        device = pick_device(arguments.device)
        model, tokenizer = load_run(
            arguments.run,
            step=arguments.step,
            device=device,
            eos_token=arguments.eos_token,
            bos_token=arguments.bos_token,
        )
        meter = Meter()
        pieces = sample(
            model,
            tokenizer,
            arguments.prompt,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
            stop=[] if arguments.stop is None else [arguments.stop],
            meter=meter,
        )
        print(arguments.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        print(meter, file=sys.stderr)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or a GPU where there is one.

    Raises:
        UserError: it cannot be used.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


if __name__ == "__main__":
    sys.exit(main())
