"""fuselm.patch: a Hugging Face Llama computes what it computed before, and can be had back."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

import fuselm

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 97
SHAPES: dict[str, dict[str, Any]] = {
    "llama2": {"num_key_value_heads": 4},
    "llama3": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "tie_word_embeddings": True,
    },
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
}


def make(**overrides: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**(shape | overrides)))
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.15 if p.dim() > 1 else 0.2) + (0 if p.dim() > 1 else 1))
    return model.to(DEVICE)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, VOCAB, (2, 19), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    labels[0, :6] = -100
    labels[1, 12:] = -100
    return tokens.to(DEVICE), labels.to(DEVICE)


def step(model: Any, tokens: torch.Tensor, labels: torch.Tensor, **options: Any) -> tuple[torch.Tensor, dict]:
    model.train()
    model.zero_grad()
    loss = model(input_ids=tokens, labels=labels, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama2", "reference"),
        ("llama3", "auto"),
        ("llama3", "reference"),
        pytest.param("biases", "auto", marks=pytest.mark.slow),
    ],
)
def test_logits_loss_and_gradients_are_those_of_before(name, backend, batch):
    model = make(**SHAPES[name])
    tokens, labels = batch
    options = [{}, {"num_items_in_batch": torch.tensor(31.0)}, {"shift_labels": labels.roll(-1, 1)}]
    options = options[: 1 + 2 * (int(_version()[0]) >= 5)]  # earlier versions take fewer keywords
    want = [step(model, tokens, labels, **o) for o in options]
    model.eval()
    with torch.no_grad():
        logits, loss = model(tokens).logits, model(tokens, labels=labels).loss
    assert logits.std() > 0.3
    assert fuselm.patch(model, backend=backend) is model
    for o, (plain, grads) in zip(options, want, strict=True):
        fused, ours = step(model, tokens, labels, **o)
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
        for parameter, grad in grads.items():
            torch.testing.assert_close(ours[parameter], grad, rtol=1e-4, atol=1e-4, msg=parameter)
    assert model(input_ids=tokens, labels=labels).logits is None  # never whole in training
    model.eval()
    with torch.no_grad():
        both = model(tokens, labels=labels)
        torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both.logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both.loss, loss, rtol=1e-4, atol=1e-4)
        pair = model(tokens, labels=labels, return_dict=False)
    assert isinstance(pair, tuple) and torch.equal(pair[0], both.loss) and torch.equal(pair[1], both.logits)


def _version() -> str:
    import transformers

    return transformers.__version__


def test_masks_positions_and_generation(batch):
    """Padding, positions of one's own, caches: what has no kernel falls back, and all of it is as before."""
    model = make(**SHAPES["llama3"], num_hidden_layers=1).eval()
    tokens, _ = batch
    padded = torch.ones_like(tokens)
    padded[0, :4] = 0
    places = (padded.cumsum(-1) - 1).clamp(min=0)

    def everything() -> list[torch.Tensor]:
        with torch.no_grad():
            masked = model(tokens, attention_mask=padded, position_ids=places).logits[padded.bool()]
            shifted = model(tokens, position_ids=torch.arange(19, device=DEVICE)[None] + 7).logits
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
        texts = [model.generate(tokens[:, :5], **options)]
        texts.append(model.generate(tokens, attention_mask=padded, **options))
        texts.append(model.generate(tokens[:, :5], cache_implementation="static", **options))
        return [masked, shifted, *texts]

    before = everything()
    fuselm.patch(model)
    for ours, plain in zip(everything(), before, strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(ours, plain)


@pytest.mark.parametrize("keep", [1, 5, [2, 3, 9]])
def test_the_loss_of_the_logits_that_are_kept(batch, keep):
    """As transformers': labels are of these places alone, in training mode and in eval mode."""
    tokens, _ = batch
    places = slice(-keep, None) if isinstance(keep, int) else torch.tensor(keep, device=DEVICE)
    given = {"labels": tokens[:, places], "logits_to_keep": keep if isinstance(keep, int) else places}
    model = make()
    for training in (True, False):
        fuselm.unpatch(model).train(training)
        expected = model(tokens, **given).loss
        loss = fuselm.patch(model)(tokens, **given).loss
        if keep != 1:  # of one token nothing is predicted: transformers says NaN
            torch.testing.assert_close(loss, expected)
        assert torch.isfinite(loss)


def test_hidden_states_are_those_of_before(batch):
    """Also where transformers recorded some before, which leaves methods in the modules."""
    model = make(num_hidden_layers=2).eval()
    tokens, _ = batch
    with torch.no_grad():
        before = model(tokens, output_hidden_states=True).hidden_states
        after = fuselm.patch(model)(tokens, output_hidden_states=True).hidden_states
    assert len(before) == len(after) == 3
    for ours, plain in zip(after, before, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_unpatch_gives_back_the_class_s_own(batch):
    model, other = make(), make()
    tokens, labels = batch
    before = step(model, tokens, labels)
    names, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    fuselm.patch(fuselm.patch(model), backend="reference")
    assert all("forward" not in vars(module) for module in other.modules())  # only this model is touched
    assert [n for n, _ in model.named_modules()] == names and list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert twin(tokens, labels=labels).logits is None
    assert twin.forward.__self__ is twin and twin.model.layers[0].mlp.forward.__self__ is twin.model.layers[0].mlp
    assert fuselm.unpatch(fuselm.unpatch(model)) is model
    assert all("forward" not in vars(module) for module in model.modules())
    loss, grads = step(model, tokens, labels)
    assert torch.equal(loss, before[0]) and all(torch.equal(grads[n], before[1][n]) for n in grads)


def test_checkpointed_and_frozen_layers(batch):
    """Recomputation goes through the patched modules; frozen weights get no gradient and change none of the others."""
    model = make(num_hidden_layers=1)
    tokens, labels = batch
    _, want = step(model, tokens, labels)
    fuselm.patch(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, grads = step(model, tokens, labels)
    for name in grads:
        torch.testing.assert_close(grads[name], want[name], rtol=1e-4, atol=1e-4, msg=name)
    frozen = [n for n, p in model.named_parameters() if "gate_proj" in n or "layernorm" in n or "lm_head" in n]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=labels).loss.backward()
    for name, p in model.named_parameters():
        if name in frozen:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-4, msg=name)


def test_autocast_and_bf16(batch):
    """In bf16 the loss moves by no more than bf16 moves it."""
    tokens, labels = batch
    model = make().train()
    exact = model(input_ids=tokens, labels=labels).loss.item()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        plain = model(input_ids=tokens, labels=labels).loss.item()
        fused = fuselm.patch(model)(input_ids=tokens, labels=labels).loss
    fused.backward()
    assert abs(fused.item() - exact) <= abs(plain - exact) + 0.02 and fused.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    half = model.to(torch.bfloat16)
    loss = half(input_ids=tokens, labels=labels).loss
    assert abs(loss.item() - exact) < 0.05


def test_what_is_no_llama_is_named(batch):
    for model in (torch.nn.Linear(2, 2), fuselm.Llama(fuselm.LlamaConfig.from_preset("debug")), make().model):
        with pytest.raises(
            TypeError, match=f"model is a {type(model).__name__}: fuselm.patch takes a LlamaForCausalLM"
        ):
            fuselm.patch(model)
        assert fuselm.unpatch(model) is model
    with pytest.raises(ValueError, match=r"hidden_act='gelu': fuselm.patch takes models with 'silu'"):
        fuselm.patch(make(hidden_act="gelu"))
    with pytest.raises(ValueError, match="backend='fast': expected one of"):
        fuselm.patch(make(), backend="fast")  # type: ignore[arg-type]
    hooked = make()
    hooked.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(ValueError, match="the LlamaMLP has a forward method that is not its class's"):
        fuselm.patch(hooked)
    assert "forward" not in vars(hooked) and "forward" in vars(hooked.model.layers[1].mlp)
