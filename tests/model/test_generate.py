"""Generation: the cache changes nothing, filters keep what they should, and text comes in whole characters."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch._dynamo.utils import counters

from fuselm.model.config import LlamaConfig
from fuselm.model.decode_step import DecodeStep
from fuselm.model.generate import Sampling, generate, generate_stream, generate_text, pad_prompts
from fuselm.model.kv_cache import KVCache
from fuselm.model.llama import Llama
from fuselm.model.text_stream import IncrementalDecoder, StopStrings

VOCAB = 61


@pytest.fixture(scope="module")
def model() -> Llama:
    shape = LlamaConfig(
        vocab_size=VOCAB, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, max_seq_len=24, kernels="eager"
    )
    model = Llama(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # far from uniform, so that tokens depend on all that came before
    return model


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 5), generator=torch.Generator().manual_seed(1))


def without_cache(model: Llama, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


def test_greedy_is_the_likeliest_token_each_time(model: Llama, prompt: torch.Tensor) -> None:
    result = generate(model, prompt, max_new_tokens=19, temperature=0)
    assert result.shape == (3, 24) and result.dtype == torch.int64 and not result.requires_grad
    assert torch.equal(result, without_cache(model, prompt, 19))
    assert len(set(result[:, 5:].flatten().tolist())) > 5
    for row in range(3):
        assert torch.equal(generate(model, prompt[row : row + 1], max_new_tokens=19, temperature=0)[0], result[row])
    narrow: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-30}]
    for options in narrow:
        assert torch.equal(generate(model, prompt, max_new_tokens=19, **options), result)


def test_seed_decides_all(model: Llama, prompt: torch.Tensor) -> None:
    def draw(**options) -> torch.Tensor:
        return generate(model, prompt, max_new_tokens=8, temperature=1.5, **options)

    first = draw(seed=7)
    assert torch.equal(draw(seed=7), first) and not torch.equal(draw(seed=8), first)
    assert torch.equal(draw(generator=torch.Generator().manual_seed(7)), first)
    torch.manual_seed(7)
    assert torch.equal(draw(), first)
    assert torch.equal(generate(model, prompt.int(), max_new_tokens=8, temperature=1.5, seed=7), first)
    stream = generate_stream(model, prompt, max_new_tokens=8, temperature=1.5, seed=7)
    assert torch.equal(torch.stack(list(stream), dim=1), first[:, 5:])


def test_nothing_new_and_one_new(model: Llama, prompt: torch.Tensor) -> None:
    assert torch.equal(generate(model, prompt, max_new_tokens=0), prompt)
    assert torch.equal(generate(model, prompt, max_new_tokens=1, temperature=0), without_cache(model, prompt, 1))
    full = prompt.repeat(1, 5)[:, :24]
    assert torch.equal(generate(model, full, max_new_tokens=0), full)


def test_rows_end_at_eos(model: Llama, prompt: torch.Tensor) -> None:
    free = generate(model, prompt, max_new_tokens=12, temperature=0)
    eos = int(free[0, 8])
    ended = generate(model, prompt, max_new_tokens=12, temperature=0, eos_id=eos)
    lengths = []
    for row in range(3):
        hits = (free[row, 5:] == eos).nonzero().flatten().tolist()
        length = 5 + (hits[0] + 1 if hits else 12)
        assert torch.equal(ended[row, :length], free[row, :length]) and (ended[row, length:] == eos).all()
        lengths.append(length - 5)
    steps = list(generate_stream(model, prompt, max_new_tokens=12, temperature=0, eos_id=eos))
    assert len(steps) == max(lengths)
    assert (
        len(list(generate_stream(model, prompt[:1], max_new_tokens=12, temperature=0, eos_id=eos))) == lengths[0] <= 4
    )


def test_bf16_weights(model: Llama, prompt: torch.Tensor) -> None:
    half = Llama(model.config)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    assert torch.equal(generate(half, prompt, max_new_tokens=3, temperature=0)[:, :5], prompt)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert generate(model, prompt, max_new_tokens=3, temperature=0).shape == (3, 8)


def shares(sampling: Sampling, probabilities: list[float], draws: int = 20_000) -> list[float]:
    logits = torch.tensor(probabilities).log().repeat(draws, 1) + 3.0  # an offset changes nothing
    picked = sampling.pick(logits, torch.Generator().manual_seed(0))
    assert picked.shape == (draws,) and picked.dtype == torch.int64
    return (torch.bincount(picked, minlength=len(probabilities)) / draws).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=0.5), [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        (Sampling(temperature=0), [0, 1, 0, 0]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_k=99), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_p=0.39), [0, 1, 0, 0]),
        (Sampling(top_p=0.41), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(top_p=1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_k=3, top_p=0.7), [0, 4 / 7, 0, 3 / 7]),  # of what top-k leaves: 0.44, 0.33, 0.22
        (Sampling(temperature=0.5, top_p=0.6), [0, 16 / 25, 0, 9 / 25]),
    ],
    ids=str,
)
def test_filters_keep_exactly_these_shares(sampling: Sampling, expected: list[float]) -> None:
    got = shares(sampling, [0.1, 0.4, 0.2, 0.3])
    assert got == pytest.approx(expected, abs=0.015)  # four standard deviations of 20,000 draws
    assert [share == 0 for share in got] == [share == 0 for share in expected]


def test_ties_do_not_widen_top_k() -> None:
    assert sum(share > 0 for share in shares(Sampling(top_k=2), [0.25] * 4)) == 2


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]]).repeat(1000, 1)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=1.0), Sampling(temperature=100.0)):
        assert set(sampling.pick(logits, torch.Generator().manual_seed(0)).tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1: expected a finite number, at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0: expected at least 1"),
        ({"top_p": 0.0}, r"top_p=0\.0: expected above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p=1\.1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: expected at least 0"),
        (
            {"max_new_tokens": 20},
            "max_new_tokens=20 after a prompt of 5 tokens is more than max_seq_len=24: .* at most 19",
        ),
        (
            {"tokens": torch.zeros(1, 25, dtype=torch.long)},
            "prompt has 25 tokens, the model takes at most max_seq_len=24",
        ),
        ({"tokens": torch.zeros(5, dtype=torch.long)}, r"tokens is \(5,\) torch\.int64: expected integers of shape"),
        ({"tokens": torch.zeros(1, 5)}, r"tokens is \(1, 5\) torch\.float32"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.long)}, r"tokens has shape \(2, 0\): expected at least one row"),
        ({"tokens": torch.tensor([[3, VOCAB]])}, f"ids from 3 to {VOCAB}: expected 0 to {VOCAB - 1}"),
        ({"tokens": torch.tensor([[3, -1]])}, "ids from -1 to 3"),
        ({"seed": 2**64}, "seed=18446744073709551616: expected"),
        ({"seed": 1, "generator": torch.Generator()}, "seed=1 and generator exclude each other"),
    ],
)
def test_bad_values_are_named(options: dict, message: str, model: Llama, prompt: torch.Tensor) -> None:
    arguments = {"tokens": prompt, "max_new_tokens": 2, **options}
    for function in (generate, generate_stream):  # the stream does not wait for the first token to be asked for
        with pytest.raises(ValueError, match=message):
            function(model, **arguments)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Tokens are bytes, in the order of `alphabet`."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_characters_come_when_they_are_whole(byte_level: Tokenizer) -> None:
    decoder = IncrementalDecoder(byte_level.decode)
    pieces = [decoder.push(i) for i in byte_level.encode("aé€\N{GRINNING FACE}b").ids]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "\N{GRINNING FACE}", "b"]
    assert decoder.flush() == ""


def test_unfinished_and_wrong_bytes(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é€").ids
    decoder = IncrementalDecoder(byte_level.decode)
    assert [decoder.push(i) for i in (ids[0], ids[2], ids[3])] == ["", "\N{REPLACEMENT CHARACTER}", ""]
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}" and decoder.flush() == ""
    assert [decoder.push(i) for i in ids] == ["", "é", "", "", "€"]


def test_pieces_join_to_the_text_of_any_bytes(byte_level: Tokenizer) -> None:
    draw = random.Random(0)
    alphabet = byte_level.encode("a é€\N{GRINNING FACE}\N{REPLACEMENT CHARACTER}\n").ids
    for length in range(60):
        ids = [draw.choice(alphabet) for _ in range(length)]
        decoder = IncrementalDecoder(byte_level.decode)
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == byte_level.decode(ids)


def test_tokenizers_that_treat_the_first_token_differently() -> None:
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "three": 2}, "three"))
    words.decoder = decoders.Metaspace()
    decoder = IncrementalDecoder(words.decode)
    assert [decoder.push(i) for i in (0, 1, 2, 1)] == ["one", " two", "three", " two"]


# --- Static cache, ragged batches, stop strings ---------------------------------------------------------------------


@pytest.fixture(params=["eager", "triton"])
def either(request: pytest.FixtureRequest, model: Llama, device: torch.device) -> Llama:
    """The same weights on plain PyTorch and on the kernels."""
    kernels: Any = request.param
    other = Llama(dataclasses.replace(model.config, kernels=kernels))
    other.load_state_dict(model.state_dict())
    return other.to(device)


def test_every_step_gives_the_logits_of_the_full_forward_pass(either: Llama, device: torch.device) -> None:
    """Prompts of different lengths in one batch, decoded token by token: each row as if it were alone and whole."""
    lengths = [5, 1, 3]
    texts = torch.randint(0, VOCAB, (3, 10), generator=torch.Generator().manual_seed(2)).to(device)
    cache = KVCache(either.config, 3, 10, device, torch.float32)
    with torch.no_grad():
        prompt = texts[:, :5].clone()
        for row, n in enumerate(lengths):
            prompt[row, n:] = row  # what fills a prompt up does not matter
        logits = either(prompt, cache=cache, logits_at=torch.tensor(lengths, device=device) - 1)
        cache.keep(torch.tensor(lengths, device=device))
        step = DecodeStep(either, cache)
        for new in range(5):
            for row, n in enumerate(lengths):
                whole = either(texts[row : row + 1, : n + new])[0, -1]
                torch.testing.assert_close(logits[row], whole, rtol=1e-4, atol=1e-4)
            assert logits.std() > 0.5
            logits = step(torch.stack([texts[row, n + new] for row, n in enumerate(lengths)]))
    assert cache.length == 10 and cache.lengths.tolist() == [10, 6, 8]
    with pytest.raises(ValueError, match="the cache holds 10 tokens and is full"):
        step(texts[:, 0])


def test_prompts_of_different_lengths_continue_as_alone(either: Llama, device: torch.device) -> None:
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    tokens, lengths = pad_prompts(prompts, device)
    together = generate(either, tokens, lengths=lengths, max_new_tokens=9, temperature=0, eos_id=60)
    for row, prompt in enumerate(prompts):
        alone = generate(either, torch.tensor([prompt], device=device), max_new_tokens=9, temperature=0, eos_id=60)[0]
        assert torch.equal(together[row, : len(alone)], alone)
        assert (together[row, len(alone) :] == 60).all()
    free = generate(either, tokens, lengths=lengths, max_new_tokens=9, temperature=0)
    assert free.shape == (3, 14) and (free[1, 10:] == 0).all() and free[0, 10:].any()


def test_a_text_goes_on_after_decoding(either: Llama, device: torch.device) -> None:
    """A cache takes further parts of uneven texts after decoding, and gives back what `keep` leaves out."""
    texts = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(4)).to(device)
    cache = KVCache(either.config, 2, 12, device, torch.float32)
    with torch.no_grad():
        either(texts[:, :4], cache=cache)
        cache.keep(torch.tensor([4, 2]))
        step = DecodeStep(either, cache)
        step(torch.stack([texts[0, 4], texts[1, 2]]))
        step.close()
        more = torch.stack([texts[0, 5:9], texts[1, 3:7]])
        logits = either(more, cache=cache)
        for row, end in ((0, 9), (1, 7)):
            whole = either(texts[row : row + 1, :end])[0, -4:]
            torch.testing.assert_close(logits[row], whole, rtol=1e-4, atol=1e-4)
    assert cache.lengths.tolist() == [9, 7]
    with pytest.raises(ValueError, match=r"lengths=\[10, 3\]: expected 2 numbers from 0 to those held, \[9, 7\]"):
        cache.keep(torch.tensor([10, 3]))
    with pytest.raises(ValueError, match="positions and cache exclude each other"):
        either(texts[:, :1], positions=torch.zeros(1, dtype=torch.long, device=device), cache=cache)
    with pytest.raises(ValueError, match="2 tokens a sequence while decoding: expected 1"):
        DecodeStep(either, cache)
        either(texts[:, :2], cache=cache)


def test_the_compiled_step_is_compiled_once(model: Llama, prompt: torch.Tensor) -> None:
    """Two texts of ten steps, one graph, the same tokens: nothing in a step depends on how far it is."""
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected a call to a `functools.lru_cache`")  # no new tables
        compiled = generate(model, prompt, max_new_tokens=11, temperature=0, compile=True)
        assert torch.equal(compiled, generate(model, prompt, max_new_tokens=11, temperature=0, compile=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(compiled, generate(model, prompt, max_new_tokens=11, temperature=0))


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_a_recorded_step_gives_the_same_tokens(compile: bool, either: Llama, prompt: torch.Tensor) -> None:
    torch.compiler.reset()
    tokens, lengths = pad_prompts([[3, 1, 4], [1]], "cuda")
    caches = [KVCache(either.config, 2, 20, "cuda", torch.float32) for _ in range(2)]
    steps = [DecodeStep(either, caches[0], graph=False), DecodeStep(either, caches[1], compile=compile, graph=True)]
    for cache in caches:
        cache.decoding = False
        with torch.no_grad():
            either(tokens, cache=cache)
        cache.keep(lengths)
        cache.decoding = True
    for i in range(12):
        plain, recorded = (step(torch.tensor([i, i + 7], device="cuda")) for step in steps)
        torch.testing.assert_close(plain, recorded, rtol=1e-4, atol=1e-4)


def test_graphs_need_a_gpu(model: Llama) -> None:
    with pytest.raises(ValueError, match="graph=True: the cache is on cpu, CUDA graphs need an NVIDIA GPU"):
        DecodeStep(model, KVCache(model.config, 1, 4, "cpu", torch.float32), graph=True)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([5, 0, 2]), r"lengths=\[5, 0, 2\]: expected 1 to 5"),
        (torch.tensor([5, 6, 2]), r"lengths=\[5, 6, 2\]: expected 1 to 5"),
        (torch.tensor([5, 5]), r"lengths is \(2,\) torch.int64: expected integers of shape \(3,\)"),
        (torch.tensor([5.0, 5.0, 1.0]), r"lengths is \(3,\) torch.float32"),
    ],
)
def test_bad_lengths_are_named(lengths: torch.Tensor, message: str, model: Llama, prompt: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, lengths=lengths, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"prompts: 2 of \[1, 0\] tokens, expected at least one each"):
        pad_prompts([[1], []], "cpu")


def test_stop_strings_end_a_text_wherever_pieces_break() -> None:
    text = "one two\n\nUser: three\n\nUs"
    for stop in (["\n\nUser:"], ["\n\nUser:", "User: t"], ["zzz", "\n\nUser:", "\n\nUser: three"]):
        for size in (1, 2, 3, 5, len(text)):
            stream = StopStrings(stop)
            shown = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
            assert "".join([*shown, stream.flush()]) == "one two" and stream.found in stop
    stream = StopStrings(["\n\nUser:"])
    assert [stream.push(p) for p in ("a\n", "\nUs", "ual", "\n")] == ["a", "", "\n\nUsual", ""]
    assert stream.flush() == "\n" and stream.found is None
    for bad in ([""], "text"):
        with pytest.raises(ValueError, match="expected a list of strings that are not empty"):
            StopStrings(bad)


def test_texts_of_a_batch_end_by_themselves(model: Llama, byte_level: Tokenizer) -> None:
    """Each prompt's text is that of its own tokens up to the stop string or the last token, drawn in one batch."""
    prompts = [[3, 1, 4, 1], [9, 2], [6]]
    drawn = [
        generate(model, torch.tensor([p]), max_new_tokens=12, temperature=0)[0, len(p) :].tolist() for p in prompts
    ]
    whole = [byte_level.decode(ids) for ids in drawn]
    assert generate_text(model, prompts, byte_level.decode, max_new_tokens=12, temperature=0) == whole
    stop = whole[1][3:5]
    expected = [text.split(stop)[0] for text in whole]
    assert generate_text(model, prompts, byte_level.decode, max_new_tokens=12, temperature=0, stop=[stop]) == expected
    eos = drawn[2][4]
    ended = [byte_level.decode(ids[: ids.index(eos)] if eos in ids else ids) for ids in drawn]
    assert generate_text(model, prompts, byte_level.decode, max_new_tokens=12, temperature=0, eos_id=eos) == ended
