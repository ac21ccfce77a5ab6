"""Talk to a model in the terminal: `python train/chat.py runs/my_chat`, or `fuselm-chat`.

Each line is a message; the answer comes as it is drawn. /reset forgets the conversation, /quit ends it, and so does the
end of the input, so that lines can come from a pipe.
"""

from __future__ import annotations

import importlib.util
import sys
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

from fuselm.model.generate import Sampling, generate_stream
from fuselm.model.llama import Llama
from fuselm.model.text_stream import TextStream
from fuselm.train.chat_data import ChatTemplate, Message
from fuselm.train.command_line import parse_arguments
from fuselm.train.finetune_model import load_tuned
from fuselm.train.sample import Meter, pick_device, pieces_of


@dataclass
class Arguments:
    """Talk to a model."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """Run folder of finetune.py, or a Hugging Face Llama folder."""
    system: str = ""
    """A system message before the conversation."""
    template: Path | None = None
    """File with a Jinja chat template; by default the model's own."""
    max_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 0.7
    """Divides the logits; 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = 0.95
    """Draw from the likeliest tokens that together reach this probability."""
    seed: int | None = None
    """The same seed gives the same answers to the same messages on the same kind of device."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; by default a GPU where there is one."""
    stats: bool = False
    """Print tokens a second after each answer, on stderr."""


class Conversation:
    """Messages so far, and the model that answers.

    Args:
        model: on any device.
        template: of its tokenizer.
        arguments: how to draw.

    Raises:
        UserError: a number is out of range.
    """

    def __init__(self, model: Llama, template: ChatTemplate, arguments: Arguments) -> None:
        self.model, self.template, self.arguments = model, template, arguments
        self.meter = Meter()
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        system = self.arguments.system
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a message as it comes; both are then part of the conversation.

        Raises:
            UserError: the conversation is too long for the model, or the message cannot be put.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        ids = self.template.prompt(asked)
        limit = self.model.config.max_seq_len
        if len(ids) >= limit:
            raise UserError(f"the conversation has {len(ids)} tokens, the model takes {limit}: /reset begins anew")
        arguments = self.arguments
        self.meter.start(len(ids))
        # One token may end an answer in the model's loop; the further ones are looked for here.
        try:
            stream = generate_stream(
                self.model,
                torch.tensor([ids], device=self.model.embedding.weight.device),
                max_new_tokens=min(arguments.max_tokens, limit - len(ids)),
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                seed=arguments.seed,
                eos_id=self.template.stop_ids[0],
            )
        except ValueError as error:
            raise UserError(str(error)) from error
        decode = TextStream(self._decode, stop_ids=self.template.stop_ids)
        said = ""
        for piece in pieces_of(stream, decode, self.meter):
            said += piece
            yield piece
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.template.tokenizer.decode(list(ids), skip_special_tokens=True)


def talk(conversation: Conversation, *, stats: bool) -> None:
    """Reads messages from stdin and prints answers, until /quit or the end of the input."""
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            conversation.reset()
            continue
        if not line.strip():
            continue
        try:
            for piece in conversation.answer(line.rstrip("\n")):
                print(piece, end="", flush=True)
            print(flush=True)
        except UserError as error:  # of this message; the conversation goes on
            report(error)
            continue
        except KeyboardInterrupt:  # of this answer
            print()
            if not terminal:
                raise
            continue
        if stats:
            print(conversation.meter, file=sys.stderr)


@command
def main(given: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    raise_on_interrupt()
    try:
        arguments = parse_arguments(Arguments, given, "chat.py")
        if arguments.max_tokens < 1:
            raise UserError(f"--max-tokens is {arguments.max_tokens}: it must be at least 1")
        try:
            Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
        except ValueError as error:
            raise UserError(str(error)) from error
        model, tokenizer = load_tuned(arguments.model, pick_device(arguments.device))
        template = ChatTemplate.load(tokenizer, arguments.template)
        if template.vocab_size > model.config.vocab_size:
            raise UserError(f"{tokenizer} has {template.vocab_size} tokens, the model {model.config.vocab_size}")
        talk(Conversation(model, template, arguments), stats=arguments.stats)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
