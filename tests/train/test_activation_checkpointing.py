"""Recomputing blocks in the backward pass: the same gradients, and what "selective" keeps is not computed again."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama
from fuselm.model.lora import LoRAConfig, adapted_layers, add_lora
from fuselm.train.parallelize import apply_activation_checkpointing

LAYERS = 2


class Count(TorchDispatchMode):
    """How often each op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "attentions"), [("full", 2 * LAYERS), ("selective", LAYERS), ("swiglu", LAYERS)])
def test_gradients_are_the_same_and_attention_runs_as_often_as_it_says(mode, attentions, device):
    config = LlamaConfig.from_preset(
        "debug", vocab_size=97, dim=32, num_layers=LAYERS, num_heads=2, num_kv_heads=1, ffn_dim=48, kernels="triton"
    )
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for chosen in ("none", mode):
        model = Llama(config).to(device)
        if chosen != "none":
            apply_activation_checkpointing(model, chosen)
        with Count() as count:
            loss = model(tokens, tokens)
            loss.backward()
        assert count.calls["fuselm::attention_forward"] == (LAYERS if chosen == "none" else attentions)
        assert count.calls["fuselm::attention_backward"] == LAYERS
        assert count.calls["fuselm::swiglu_forward"] == (LAYERS if chosen == "none" else 2 * LAYERS)
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["full", "selective", "swiglu"])
def test_gradients_are_the_same_where_nothing_watches(mode, device):
    """Under no dispatch mode the kernels launch directly, and RoPE rotates in the projection's own memory."""
    config = LlamaConfig.from_preset(
        "debug", vocab_size=61, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, kernels="triton"
    )
    tokens = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)
    borders = torch.tensor([0, 3, 8, 16, 16], dtype=torch.int32, device=device)
    results = []
    for chosen in ("none", mode):
        model = Llama(config).to(device)
        if chosen != "none":
            apply_activation_checkpointing(model, chosen)
        loss = model(tokens, tokens.roll(-1, 1), cu_seqlens=borders)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rank", [0, 2])
def test_recomputing_the_activation_repeats_no_matmul_of_the_model(rank):
    """Also where adapters, whose own are small, keep something of the layer behind it."""
    config = LlamaConfig.from_preset(
        "debug", vocab_size=97, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=112, kernels="eager"
    )
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    operations, gradients = {}, {}
    for mode in ("none", "swiglu"):
        model = Llama(config)
        if rank:
            add_lora(model, LoRAConfig(rank=rank))
            torch.nn.init.ones_(adapted_layers(model)["blocks.0.mlp.down"].lora_b)
        if mode != "none":
            apply_activation_checkpointing(model, mode)
        loss = model(tokens, tokens)
        with FlopCounterMode(display=False) as count:
            loss.backward()
        operations[mode] = count.get_total_flops()
        gradients[mode] = [p.grad for p in model.parameters() if p.requires_grad]
    adapter = 2 * 48 * rank * (112 + 32)  # of the matmul that is recomputed, and of its like
    assert 0 <= operations["swiglu"] - operations["none"] <= adapter
    for a, b in zip(gradients["none"], gradients["swiglu"], strict=True):
        assert torch.equal(a, b)


def test_recomputing_the_activation_keeps_it_out_of_memory_in_a_compiled_block():
    config = LlamaConfig.from_preset(
        "debug", vocab_size=97, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=112, kernels="eager"
    )
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    kept, gradients = {}, {}
    for mode in ("none", "swiglu"):
        torch._dynamo.reset()
        model = Llama(config)
        if mode != "none":
            apply_activation_checkpointing(model, mode)
        model.blocks[0].compile(fullgraph=True, backend="aot_eager")
        shapes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(tuple(t.shape)) or t, lambda t: t):
            loss = model(tokens, tokens)
        loss.backward()
        kept[mode] = sum(s[-1:] == (112,) and math.prod(s) == 48 * 112 for s in shapes)
        gradients[mode] = [p.grad for p in model.parameters()]
    assert kept["swiglu"] < kept["none"], kept
    for a, b in zip(gradients["none"], gradients["swiglu"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
