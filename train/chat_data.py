"""Conversations: a chat template, the tokens that are answers, and packed rows of them.

A line of the data is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}.
The template is Jinja, as tokenizers carry it, rendered in a sandbox. Only what the assistant says counts in the loss,
with the special token that ends it; a conversation never sees another in its row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jinja2
import numpy as np
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from fuselm.model.hf_tokenizer import BOS_NAMES, EOS_NAMES
from fuselm.train.data_stream import Batch, permuted
from fuselm.train.errors import UserError
from fuselm.train.evaluation import IGNORE_INDEX
from fuselm.train.packing import best_fit

ROLES = ("system", "user", "assistant")
# For tokenizers without a template, such as those that prepare_data.py trains: headings in plain text, and the token
# that ends a text behind each answer.
BUILT_IN = (
    "{{ bos_token }}{% for message in messages %}### {{ message['role'] | capitalize }}\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant\n{% endif %}"
)


class Message(TypedDict):
    """One turn."""

    role: str
    content: str


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens.

    Attributes:
        ids: (tokens,) int64.
        answers: (tokens,) bool, those that the assistant says, the special token that ends an answer included.
    """

    ids: NDArray[np.int64]
    answers: NDArray[np.bool_]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """Turns messages into tokens.

    Args:
        tokenizer: a Hugging Face tokenizer, whose special tokens the template may use.
        source: Jinja text; None takes the built-in template.
        bos_token, eos_token: what the template calls so; None looks for the usual names.

    Attributes:
        stop_ids: tokens that end an answer.

    Raises:
        UserError: the template is wrong, or ends answers with no special token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | None = None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = False  # the template's special tokens are meant as such
        self.tokenizer, self.source = tokenizer, source or BUILT_IN
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self.bos_token = bos_token or next((name for name in BOS_NAMES if name in vocabulary), "")
        self.eos_token = eos_token or next((name for name in EOS_NAMES if name in vocabulary), "")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        # Marks of answers for other libraries; what is an answer is found without them here.
        text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", self.source)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template is not valid Jinja: {error}") from error
        ending = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        last = int(ending.ids[np.flatnonzero(ending.answers)[-1]])
        if last not in self.special.values():
            raise UserError(
                "the chat template puts no special token behind an answer, so that a model could not learn to stop; "
                f"the tokenizer has {', '.join(map(repr, self.special)) or 'none'}"
            )
        eos = vocabulary.get(self.eos_token)
        self.stop_ids = [last, *([] if eos is None or eos == last else [eos])]

    @classmethod
    def load(cls, path: Path, template: Path | None = None) -> ChatTemplate:
        """That of a tokenizer.json, or of a folder with one and, maybe, a template.

        Args:
            path: the file or folder. A chat_template.jinja or tokenizer_config.json beside it is read.
            template: a file with a Jinja template to use instead.

        Raises:
            UserError: a file is missing or wrong.
        """
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"tokenizer {path} does not exist")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer {path} cannot be read: {error}") from error
        settings: dict[str, Any] = {}
        beside = path.with_name("tokenizer_config.json")
        try:
            if beside.is_file():
                settings = json.loads(beside.read_text(encoding="utf-8"))
            source = settings.get("chat_template")
            if isinstance(source, list):  # several, by name
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            jinja = template or path.with_name("chat_template.jinja")
            if template is not None or jinja.is_file():
                source = _text_of(jinja)
            names = [settings.get(key) for key in ("bos_token", "eos_token")]
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{beside} is not a tokenizer's configuration: {error}") from error
        bos, eos = (name.get("content") if isinstance(name, dict) else name for name in names)
        return cls(tokenizer, source, bos_token=bos, eos_token=eos)

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The text of messages; with `ask`, up to where the assistant's answer begins.

        Raises:
            UserError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=ask,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except Exception as error:  # a template is a program: it divides by zero, recurses, asks for too long a range
            raise UserError(f"the chat template refuses these messages: {error}") from error

    def _check(self, messages: Sequence[Message]) -> None:
        for message in messages:
            lone = re.search(r"[\ud800-\udfff]", message["content"])
            if lone is not None:  # half of a pair, which JSON can write and UTF-8 cannot
                raise UserError(
                    f"a message of role {message['role']} holds {lone[0]!a} at character {lone.start() + 1}, half of a "
                    "character: the text was cut in the middle of one, or read in the wrong encoding"
                )
            found = next((token for token in self.special if token in message["content"]), None)
            if found is not None:
                raise UserError(
                    f"a message of role {message['role']} holds the special token {found!r}, which would act as one: "
                    "take it out or write it otherwise"
                )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens up to where the assistant's next answer begins.

        Raises:
            UserError: the template refuses the messages, or one holds a special token or half of a character.
        """
        self._check(messages)
        return self.tokenizer.encode(self.render(messages, ask=True), add_special_tokens=False).ids

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """The tokens of a conversation, as transformers' apply_chat_template gives them, and which are answers.

        Raises:
            UserError: as `prompt`; or the template changes earlier turns when later ones come, so that it is not known
                what the model was asked.
        """
        self._check(messages)
        text = self.render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self.render(messages[:number], ask=True)
            content = message["content"]
            if not text.startswith(asked + content):
                content = content.strip()  # as some templates do
            if not text.startswith(asked + content):
                raise UserError(
                    f"the chat template writes message {number + 1} otherwise than as its answer to the messages "
                    "before; split the conversation, or give another --template"
                )
            end = len(asked) + len(content)
            behind = text[end:].lstrip()
            token = next((t for t in sorted(self.special, key=len, reverse=True) if behind.startswith(t)), None)
            spans.append((len(asked), end if token is None else len(text) - len(behind) + len(token)))
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        answers = np.zeros(len(starts), np.bool_)
        for first, last in spans:
            answers |= (starts < last) & (ends > first)
        return Encoded(np.asarray(encoding.ids, np.int64), answers)


def _text_of(template: Path) -> str:
    try:
        text = template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"template {template} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise UserError(f"template {template} is empty")
    return text


# --- Reading --------------------------------------------------------------------------------------------------------


def read_conversations(path: Path) -> list[list[Message]]:
    """The conversations of a chat .jsonl; empty lines are passed over.

    Raises:
        UserError: the file cannot be read, or a line is no conversation with an answer; the message has its number.
    """
    conversations = []
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors put a byte-order mark first
            for number, line in enumerate(file, 1):
                if line.strip():
                    conversations.append(_conversation(line, f"{path}:{number}"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not conversations:
        raise UserError(f"{path} has no conversations")
    return conversations


def _conversation(line: str, where: str) -> list[Message]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # nested too deep
        raise UserError(f"{where} is not JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where} has no list of messages: expected {{"messages": [{{"role": ..., "content": ...}}]}}')
    result: list[Message] = []
    for index, message in enumerate(messages, 1):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in ROLES:
            raise UserError(f"{where}, message {index}: role is {role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"{where}, message {index}: content is a {type(content).__name__}, expected text")
        result.append({"role": str(role), "content": content})
    if not any(message["role"] == "assistant" for message in result):
        raise UserError(f"{where} has no message of role assistant: there is nothing to learn")
    return result


# --- Packing --------------------------------------------------------------------------------------------------------


class ChatStream:
    """Endless batches of packed conversations: each epoch takes every row once, in an order of its own.

    Args:
        conversations: encoded; one of n tokens takes n - 1 places, and is cut off behind the last that fits.
        seq_len: places of a row.
        global_batch_size: rows a step, over all ranks and micro-steps.
        seed: of the order.
        whole_steps: add empty rows, so that an epoch is whole steps and each conversation is in exactly one of them.

    Attributes:
        sequences_per_epoch: rows, with the empty ones.
        cut: conversations that were cut off.
        dropped: those of which no answer was left.

    Raises:
        UserError: no answer is left at all.
    """

    def __init__(
        self,
        conversations: Sequence[Encoded],
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        whole_steps: bool = False,
    ) -> None:
        self.seq_len, self.global_batch_size, self.seed = seq_len, global_batch_size, seed
        self.cut = sum(len(c.ids) > seq_len + 1 for c in conversations)
        kept = [c for c in conversations if c.answers[1 : seq_len + 1].any()]
        self.dropped = len(conversations) - len(kept)
        if not kept:
            raise UserError(f"no answer of {len(conversations)} conversations lies within the first {seq_len} tokens")
        lengths = np.asarray([min(len(c.ids) - 1, seq_len) for c in kept])
        rows, self.sequences_per_epoch = best_fit(lengths, seq_len)
        if whole_steps:
            self.sequences_per_epoch += -self.sequences_per_epoch % global_batch_size
        self._tokens = np.zeros((self.sequences_per_epoch, seq_len), np.int32)
        self._targets = np.full((self.sequences_per_epoch, seq_len), IGNORE_INDEX, np.int32)
        self._borders: list[list[int]] = [[0] for _ in range(self.sequences_per_epoch)]
        for conversation, row, length in zip(kept, rows.tolist(), lengths.tolist(), strict=True):
            start = self._borders[row][-1]
            place = slice(start, start + length)
            self._tokens[row, place] = conversation.ids[:length]
            following = slice(1, length + 1)
            self._targets[row, place] = np.where(
                conversation.answers[following], conversation.ids[following], IGNORE_INDEX
            )
            self._borders[row].append(start + length)

    def batch(
        self,
        step: int,
        *,
        rank: int,
        world_size: int,
        micro_step: int = 0,
        accumulation: int = 1,
        document_mask: bool = True,
    ) -> Batch:
        """The rows of one rank in one micro-step, on the CPU. Borders are always given: rows are packed."""
        del document_mask
        local = self.global_batch_size // (world_size * accumulation)
        first = step * self.global_batch_size + (micro_step * world_size + rank) * local
        ids = [self._row(place) for place in range(first, first + local)]
        borders = [0]
        for number, row in enumerate(ids):
            borders += [number * self.seq_len + border for border in self._borders[row][1:]]
            if borders[-1] != (number + 1) * self.seq_len:  # what stays free is a document of its own
                borders.append((number + 1) * self.seq_len)
        # A power of two of documents, so that the shape seldom changes; the further ones are empty.
        room = 1 << (max(len(borders) - 1, 2 * local) - 1).bit_length()
        borders += [borders[-1]] * (room + 1 - len(borders))
        tokens, targets = (torch.from_numpy(x[ids].astype(np.int64)) for x in (self._tokens, self._targets))
        return Batch(tokens, targets, torch.tensor(borders, dtype=torch.int32), self.seq_len)

    def _row(self, place: int) -> int:
        epoch, within = divmod(place, self.sequences_per_epoch)
        return int(permuted(np.asarray([within]), self.sequences_per_epoch, seed=self.seed, epoch=epoch)[0])

    def documents(self, step: int, *, rank: int, world_size: int, accumulation: int = 1) -> list[tuple[int, int]]:
        """Rows of the packed data that a rank's part of a step has, as ranges of one."""
        local = self.global_batch_size // (world_size * accumulation)
        places = [
            step * self.global_batch_size + (micro * world_size + rank) * local + i
            for micro in range(accumulation)
            for i in range(local)
        ]
        return [(row, row) for row in sorted({self._row(place) for place in places})]
