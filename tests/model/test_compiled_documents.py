"""Compiled blocks take batches with other documents as they are."""

from __future__ import annotations

import torch
from torch._dynamo.testing import CompileCounter

from fuselm.model import attention_backends
from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama


def test_other_documents_compile_nothing_anew():
    torch._dynamo.reset()
    model = Llama(LlamaConfig.from_preset("debug", vocab_size=97, dim=32, num_heads=2, num_kv_heads=1, kernels="eager"))
    counter = CompileCounter()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    compiled = []
    for borders in ([0, 9, 32], [0, 1, 2, 30, 32], [0, 32], [0, *range(4, 33, 4)]):
        cu_seqlens = torch.tensor(borders, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
        loss = model(tokens, tokens, cu_seqlens=cu_seqlens, max_seqlen=longest)
        assert torch.isfinite(loss)
        compiled.append(counter.frame_count)
    assert compiled[0] == 2, "the first block has no residual, the others have"
    assert compiled == [2] * 4, compiled


def test_a_deterministic_model_asks_for_deterministic_attention(monkeypatch):
    asked = []
    attention = attention_backends.attention

    def spy(*args, **kwargs):
        asked.append(kwargs["deterministic"])
        return attention(*args, **(kwargs | {"backend": "reference"}))

    monkeypatch.setattr(attention_backends, "attention", spy)
    monkeypatch.setattr(attention_backends, "require_attention", lambda *args, **kwargs: None)
    tokens = torch.randint(0, 97, (1, 8))
    borders = torch.tensor([0, 3, 8], dtype=torch.int32)
    for deterministic in (False, True):
        config = LlamaConfig.from_preset(
            "debug", vocab_size=97, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, kernels="eager",
            deterministic_attention=deterministic,
        )  # fmt: skip
        Llama(config)(tokens, tokens, cu_seqlens=borders)
    assert asked == [False, True]
