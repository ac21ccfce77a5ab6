"""The model against a plain one written apart, and the ways it is built and called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuselm.model.attention_backends import require_attention
from fuselm.model.config import LlamaConfig
from fuselm.model.kv_cache import KVCache
from fuselm.model.llama import Llama, document_positions, initial_value
from fuselm.model.rope_table import rope_frequencies

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {"vocab_size": 97, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}


def _config(**overrides) -> LlamaConfig:
    return LlamaConfig.from_preset("debug", **(SMALL | overrides))


def _model(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> Llama:
    """Weights far from their tiny initial values, so that mistakes show."""
    model = Llama(config)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.3 if p.dim() > 1 else 0.2) + (0 if p.dim() > 1 else 1))
    return model.to(DEVICE, dtype)


def _tokens(batch: int = 2, seq: int = 13) -> torch.Tensor:
    return torch.randint(0, 97, (batch, seq), generator=torch.Generator().manual_seed(3)).to(DEVICE)


def plain_llama(model: Llama, tokens: torch.Tensor, documents: list[int] | None = None) -> torch.Tensor:
    """Logits in fp64 on the CPU by the textbook, one head at a time, from the model's weights."""
    c, tokens = model.config, tokens.cpu()
    w = {n: p.detach().double().cpu() for n, p in model.named_parameters()}
    d, heads, kv = c.head_size, c.num_heads, c.num_kv_heads

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    batch, seq = tokens.shape
    border = torch.zeros(batch * seq, dtype=torch.long)
    for start in documents or [seq * b for b in range(batch)]:
        border[start] = 1
    document = border.cumsum(0).view(batch, seq)
    position = torch.zeros(batch, seq, dtype=torch.long)
    for b in range(batch):
        for s in range(1, seq):
            position[b, s] = position[b, s - 1] + 1 if document[b, s] == document[b, s - 1] else 0
    angle = position[..., None] * rope_frequencies(d, c.rope_theta, c.rope_scaling)
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]

    def rotate(x):
        z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    x = w["embedding.weight"][tokens]
    for i in range(c.num_layers):
        p = f"blocks.{i}."
        h = norm(x, w[p + "attention_norm.weight"])
        rows = w[p + "attention.qkv.weight"].split([heads * d, kv * d, kv * d])
        q, k, v = (F.linear(h, r).view(batch, seq, -1, d) for r in rows)
        if c.qk_norm:
            q, k = norm(q, w[p + "attention.q_norm.weight"]), norm(k, w[p + "attention.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        out = torch.zeros(batch, seq, heads, d, dtype=torch.float64)
        for head in range(heads):
            scores = q[:, :, head] @ k[:, :, head // (heads // kv)].transpose(1, 2) / d**0.5
            allowed = (document[:, :, None] == document[:, None]) & torch.ones(seq, seq, dtype=torch.bool).tril()
            out[:, :, head] = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[:, :, head // (heads // kv)]
        x = x + F.linear(out.flatten(2), w[p + "attention.output.weight"])
        h = norm(x, w[p + "mlp_norm.weight"])
        gate, up = F.linear(h, w[p + "mlp.gate_up.weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w[p + "mlp.down.weight"])
    head = w.get("lm_head.weight", w["embedding.weight"])
    return F.linear(norm(x, w["norm.weight"]), head)


VARIANTS = [{}, {"tie_embeddings": False}, {"qk_norm": True}, {"num_kv_heads": 4}, {"num_kv_heads": 1, "head_dim": 32}]


@pytest.mark.parametrize("kernels", ["triton", "eager"])
@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
def test_logits_loss_and_gradients_equal_the_plain_model(kernels, overrides):
    model = _model(_config(kernels=kernels, **overrides))
    tokens, targets = _tokens(), _tokens().roll(-1, 1)
    targets[0, :5] = -100
    with torch.no_grad():
        logits = model(tokens)
    want = plain_llama(model, tokens)
    torch.testing.assert_close(logits.double().cpu(), want, rtol=1e-4, atol=1e-4)
    loss = model(tokens, targets)
    exact = F.cross_entropy(want.flatten(0, 1), targets.flatten().cpu(), reduction="sum")
    torch.testing.assert_close(loss.double().cpu(), exact, rtol=1e-5, atol=0)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.norm() > 0, name


def test_triton_and_eager_give_the_same_gradients():
    grads = []
    for kernels in ("triton", "eager"):
        model = _model(_config(kernels=kernels))
        model(_tokens(), _tokens().roll(-1, 1)).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions_add_up(reduction):
    model = _model(_config(kernels="eager"))
    targets = _tokens().roll(-1, 1)
    targets[1, 3:] = -100
    loss = model(_tokens(), targets, reduction=reduction)
    each = model(_tokens(), targets, reduction="none")
    assert each.shape == targets.shape and (each[targets == -100] == 0).all()
    want = {"none": each, "sum": each.sum(), "mean": each.sum() / (targets != -100).sum()}[reduction]
    torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("kernels", ["triton", "eager"])
def test_documents_do_not_leak_into_each_other(kernels):
    """Changing document A leaves document B's logits bitwise as they were; both equal the plain model."""
    model = _model(_config(kernels=kernels))
    tokens = _tokens(1, 24)
    cu = torch.tensor([0, 9, 9, 24, 24], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        logits = model(tokens, cu_seqlens=cu)
        changed = tokens.clone()
        changed[0, :9] = (changed[0, :9] + 1) % 97
        other = model(changed, cu_seqlens=cu)
    assert torch.equal(logits[0, 9:], other[0, 9:]) and not torch.equal(logits[0, :9], other[0, :9])
    torch.testing.assert_close(logits.double().cpu(), plain_llama(model, tokens, [0, 9]), rtol=1e-4, atol=1e-4)


def test_document_positions_restart():
    cu = torch.tensor([0, 3, 3, 8, 10, 10], dtype=torch.int32)
    assert document_positions(cu, 2, 5).tolist() == [[0, 1, 2, 0, 1], [2, 3, 4, 0, 1]]


@pytest.mark.parametrize("kernels", ["triton", "eager"])
def test_the_cache_gives_the_full_forward_pass(kernels):
    """Prefill of 5, then 3 at once, then one by one: the logits of the whole."""
    model = _model(_config(kernels=kernels))
    tokens = _tokens(2, 11)
    cache = KVCache(model.config, 2, 11, DEVICE, torch.float32)
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(t, cache=cache) for t in tokens.split([5, 3, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    assert cache.length == 11
    with pytest.raises(ValueError, match="holds 11 tokens, 12 are needed"):
        model(tokens[:, :1], cache=cache)


def test_meta_construction_gives_the_same_weights():
    config = _config()
    with torch.device("meta"):
        model = Llama(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights(seed=0)
    for (name, a), b in zip(model.named_parameters(), Llama(config).parameters(), strict=True):
        assert torch.equal(a, b), name


def test_initial_values():
    """Norms are 1; matrices have standard deviation 0.02, output projections 0.02 / sqrt(2 · layers); names and seeds
    differ."""
    config = _config()
    first = initial_value("blocks.0.mlp.gate_up.weight", (400, 400), config, 0, torch.device("cpu"))
    second = initial_value("blocks.1.mlp.gate_up.weight", (400, 400), config, 0, torch.device("cpu"))
    out = initial_value("blocks.1.mlp.down.weight", (400, 400), config, 0, torch.device("cpu"))
    assert abs(first.std().item() - 0.02) < 2e-4 and abs(out.std().item() - 0.01) < 1e-4
    assert not torch.equal(first, second)
    assert not torch.equal(first, initial_value("blocks.0.mlp.gate_up.weight", (400, 400), config, 1, first.device))
    norm = initial_value("blocks.0.attention.q_norm.weight", (8,), config, 0, first.device)
    assert torch.equal(norm, torch.ones(8))


def test_tied_embeddings_are_one_storage():
    model = Llama(_config())
    assert model.lm_head is None and "lm_head.weight" not in model.state_dict()
    assert model.head_weight is model.embedding.weight
    untied = Llama(_config(tie_embeddings=False))
    assert untied.head_weight is not untied.embedding.weight


@pytest.mark.parametrize("tokens", [torch.zeros(65, dtype=torch.long), torch.zeros(1, 65, dtype=torch.long)])
def test_bad_tokens_are_named(tokens):
    with pytest.raises(ValueError, match=r"expected \(batch, seq\)|more than max_seq_len=64"):
        Llama(_config())(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_tokens_of_another_dtype_are_named(dtype):
    with pytest.raises(TypeError, match=f"tokens has dtype {dtype}: expected int64 or int32"):
        Llama(_config())(torch.zeros(1, 4, dtype=dtype))


@pytest.mark.parametrize(("wrong", "dtype"), [(97, torch.int64), (-1, torch.int32)])
def test_tokens_out_of_range_are_named(wrong, dtype):
    model, tokens = Llama(_config()), torch.tensor([[0, 96, 5]], dtype=dtype)
    assert model(tokens).shape == (1, 3, 97)
    tokens[0, 2] = wrong
    with pytest.raises(ValueError, match=f"tokens holds {wrong}: expected ids from 0 to 96, vocab_size=97"):
        model(tokens)
    exported = torch.export.export(model, (torch.zeros(1, 3, dtype=dtype),))  # traces no look at the values
    assert "aminmax" not in exported.graph_module.code


def test_flash_attn_without_the_package_says_what_to_install():
    with pytest.raises(ImportError, match="needs the flash-attn package"):
        Llama(_config(attention_backend="flash_attn")).to(DEVICE)(_tokens())


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_cudnn_says_what_it_takes(device, dtype):
    with pytest.raises(ValueError, match=r"attention_backend='cudnn' takes bfloat16 or float16 on an NVIDIA GPU, not"):
        require_attention(_config(attention_backend="cudnn"), torch.device(device), dtype, documents=False)


def test_documents_need_a_backend_with_document_masks():
    with pytest.raises(ValueError, match="attention_backend='sdpa' has no document masks"):
        model = Llama(_config(attention_backend="sdpa")).to(DEVICE)
        model(_tokens(), cu_seqlens=torch.tensor([0, 26], dtype=torch.int32, device=DEVICE))


def test_a_block_compiles_whole_and_equals_eager():
    model = _model(_config())
    tokens = _tokens()
    want = model(tokens, tokens)
    grads = torch.autograd.grad(want, list(model.parameters()))
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(fullgraph=True)
    got = model(tokens, tokens)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(got, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
