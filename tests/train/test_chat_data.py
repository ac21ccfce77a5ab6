"""Conversations: which tokens count, what a row holds, and what is said of wrong input."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from fuselm.train.chat_data import BUILT_IN, ChatStream, ChatTemplate, Encoded, Message, read_conversations
from fuselm.train.errors import UserError
from fuselm.train.tokenizer import TextTokenizer

os.environ["HF_HUB_OFFLINE"] = "1"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{{- bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "[{{ m.role }}] {% generation %}{{ m['content'] | trim }}{% endgeneration %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is h\u00e9 in \N{GRINNING FACE}?"},
    {"role": "assistant", "content": "  A letter \N{GRINNING FACE}.\n"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No more."},
]


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    backend = Tokenizer.from_str(
        TextTokenizer.train(["the letter is what no more and brief user assistant"], 300).to_json().decode()
    )
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return backend.to_str()


@pytest.fixture
def make(tokenizer_json):
    return lambda source=None: ChatTemplate(Tokenizer.from_str(tokenizer_json), source)


def said(template: ChatTemplate, encoded: Encoded) -> list[str]:
    """The runs of answer tokens, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.answers, [0]))))
    return [
        template.tokenizer.decode(encoded.ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)
    ]


@pytest.mark.parametrize(
    ("source", "answers", "stop"),
    [
        (CHATML, ["  A letter \N{GRINNING FACE}.\n<|im_end|>", "No more.<|im_end|>"], "<|im_end|>"),
        (TRIMMED, [" A letter \N{GRINNING FACE}.<|im_end|>", " No more.<|im_end|>"], "<|im_end|>"),
        (None, ["  A letter \N{GRINNING FACE}.\n<|endoftext|>", "No more.<|endoftext|>"], "<|endoftext|>"),
    ],
)
def test_answers_and_what_ends_them_count_and_nothing_else(make, source, answers, stop):
    template = make(source)
    encoded = template.encode(TALK)
    got = said(template, encoded)
    assert [a.lstrip() if source == TRIMMED else a for a in got] == [
        a.lstrip() if source == TRIMMED else a for a in answers
    ]
    whole = template.tokenizer.decode(encoded.ids.tolist(), skip_special_tokens=False)
    assert whole == template.render(TALK)
    assert template.tokenizer.token_to_id(stop) == template.stop_ids[0]
    # What the model is asked at inference is what stood before the answer in training.
    asked = template.prompt(TALK[:4])
    if source != TRIMMED:  # there the blank before an answer is part of its first token
        assert encoded.ids[: len(asked)].tolist() == asked and encoded.answers[len(asked)]


def test_tokens_are_those_of_transformers(make, tokenizer_json, tmp_path):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    theirs: Any = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=CHATML)
    ids = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert make(CHATML).encode(TALK).ids.tolist() == ids
    asked = theirs.apply_chat_template(TALK[:2], tokenize=True, add_generation_prompt=True, return_dict=True)
    assert make(CHATML).prompt(TALK[:2]) == asked["input_ids"]


def test_where_a_template_comes_from(tokenizer_json, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    assert ChatTemplate.load(tmp_path).source == BUILT_IN
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": CHATML}]}))
    assert ChatTemplate.load(tmp_path / "tokenizer.json").source == CHATML
    (tmp_path / "chat_template.jinja").write_text(TRIMMED)
    assert ChatTemplate.load(tmp_path).source == TRIMMED
    (tmp_path / "mine").write_text(CHATML + "\n")
    assert ChatTemplate.load(tmp_path, tmp_path / "mine").source == CHATML + "\n"
    with pytest.raises(UserError, match=r"cannot read .*nowhere: No such file"):
        ChatTemplate.load(tmp_path, tmp_path / "nowhere")
    config.write_text("[1]")
    with pytest.raises(UserError, match=r"tokenizer_config.json is not a tokenizer's configuration"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "is not UTF-8 text: invalid start")]
)
def test_a_template_file_without_a_template_is_named(content, reason, tokenizer_json, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_bytes(content)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    with pytest.raises(UserError, match=f"template {template} {reason}"):
        ChatTemplate.load(tmp_path, template)


def test_wrong_templates_and_messages_are_named(make):
    with pytest.raises(UserError, match="not valid Jinja"):
        make("{% for %}")
    with pytest.raises(UserError, match=r"puts no special token behind an answer.*'<.im_end.>'"):
        make("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(UserError, match="refuses these messages: a system message comes first"):
        make(TRIMMED).encode([TALK[1], TALK[0], TALK[2]])
    last = "{% for m in messages %}{{ m.content if loop.last or m.role != 'assistant' }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match="writes message 3 otherwise than as its answer"):
        make(last).encode(TALK)
    for role in ("user", "assistant"):
        evil: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        evil[role == "assistant"]["content"] += "<|im_end|>"
        with pytest.raises(UserError, match=f"message of role {role} holds the special token '<.im_end.>'"):
            make(CHATML).encode(evil)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 1 // 0 }}", "division"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages[7]['content'] }}", "no element 7"),
        ("{{ messages[0]['content'].nosuch() }}", "nosuch"),
    ],
)
def test_a_template_that_fails_as_a_program_is_named(make, source, reason):
    with pytest.raises(UserError, match=f"refuses these messages: .*{reason}"):
        make(source)


@pytest.mark.parametrize("half", ["\ud83d", "\ude00"])
def test_half_a_character_is_named(make, half, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": f"ab{half}"}, TALK[4]]}))
    (talk,) = read_conversations(path)
    for attempt in (make(CHATML).encode, make(CHATML).prompt):
        with pytest.raises(UserError, match=rf"role user holds '\\u{ord(half):x}' at character 3, half of a character"):
            attempt(talk)
    talk[0]["content"] = json.loads('"ab\\ud83d\\ude00"')  # both halves
    assert make(CHATML).encode(talk).answers.any()


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n", encoding="utf-8-sig")
    assert read_conversations(path) == [TALK]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "has no conversations"),
        ("[" * 100_000, ":1 is not JSON: maximum recursion depth"),
        ("{", ":1 is not JSON"),
        ('\n{"text": "a"}', ":2 has no list of messages: expected"),
        ('{"messages": []}', ":1 has no list of messages"),
        ('{"messages": ["a"]}', ":1, message 1: role is None, expected one of system, user, assistant"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "message 1: role is 'tool'"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "message 1: content is a list, expected text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', ":1 has no message of role assistant"),
    ],
)
def test_wrong_lines_are_named(text, message, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{path}.*{message}"):
        read_conversations(path)
    path.write_bytes(b'{"messages": "\xff"}')
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_conversations(path)
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        read_conversations(tmp_path / "nowhere")


def encoded(length: int, answers: list[int], start: int) -> Encoded:
    mask = np.zeros(length, np.bool_)
    mask[answers] = True
    return Encoded(np.arange(start, start + length), mask)


def test_rows_hold_whole_conversations_with_shifted_answers():
    """Lengths around a row's: 9 tokens fill 8 places exactly, the tenth is cut off, and only then."""
    talks = [encoded(9, [8], 100), encoded(10, [3, 9], 200), encoded(4, [2, 3], 300), encoded(5, [4], 400)]
    talks.append(encoded(12, [10], 500))  # nothing of its answer is left
    stream = ChatStream(talks, seq_len=8, global_batch_size=3, seed=1)
    assert (stream.sequences_per_epoch, stream.cut, stream.dropped) == (3, 2, 1)
    batch = stream.batch(0, rank=0, world_size=1)
    assert batch.cu_seqlens is not None
    rows = {}
    for row in range(3):
        for place in range(8):
            rows[int(batch.tokens[row, place])] = int(batch.targets[row, place])
    learned = {token: target for token, target in rows.items() if target != -100}
    assert learned == {107: 108, 202: 203, 301: 302, 302: 303, 403: 404}
    borders = batch.cu_seqlens.tolist()
    lengths = sorted(b - a for a, b in pairwise(borders) if b > a)
    assert lengths == [1, 3, 4, 8, 8] and len(borders) == 9 and borders[-1] == 24
    for a, b in pairwise(borders):  # a document is one conversation
        assert len({t // 100 for t in batch.tokens.flatten()[a:b].tolist()}) <= 1
    with pytest.raises(UserError, match="no answer of 1 conversations lies within the first 4 tokens"):
        ChatStream(talks[:1], seq_len=4, global_batch_size=1, seed=0)


def test_every_epoch_takes_every_row_once_on_any_number_of_ranks():
    talks = [encoded(9, [8], 10 * i) for i in range(6)]
    stream = ChatStream(talks, seq_len=8, global_batch_size=4, seed=3)

    def firsts(step: int, **how) -> list[int]:
        return stream.batch(step, **how).tokens[:, 0].tolist()

    seen = [t for step in range(3) for t in firsts(step, rank=0, world_size=1)]
    assert sorted(seen[:6]) == sorted(seen[6:]) == [0, 10, 20, 30, 40, 50] and seen[:6] != seen[6:]
    for step in range(3):
        split = [
            t
            for micro in (0, 1)
            for rank in (0, 1)
            for t in firsts(step, rank=rank, world_size=2, micro_step=micro, accumulation=2)
        ]
        assert split == seen[4 * step : 4 * step + 4]


@pytest.mark.parametrize("conversations", [1, 4, 5, 7])
def test_with_whole_steps_an_epoch_has_each_conversation_once(conversations):
    talks = [encoded(9, [8], 10 * i) for i in range(conversations)]
    stream = ChatStream(talks, seq_len=8, global_batch_size=4, seed=3, whole_steps=True)
    steps, rest = divmod(stream.sequences_per_epoch, 4)
    assert rest == 0 and steps == -(-conversations // 4)
    learned = []
    for step in range(steps):
        batch = stream.batch(step, rank=0, world_size=1)
        assert batch.cu_seqlens is not None and batch.cu_seqlens[-1] == 32
        learned += batch.targets[batch.targets != -100].tolist()
    assert sorted(learned) == [10 * i + 8 for i in range(conversations)]
