"""The peers' adapters: stand-ins with the packages' signatures and layouts, computed by torch, must pass the check."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

# Scripts of benchmarks/, which pytest's configuration puts on sys.path and a type checker does not know.
compare_kernels: Any = importlib.import_module("compare_kernels")
compile_ahead: Any = importlib.import_module("compile_ahead")
measure: Any = importlib.import_module("measure")
expected: Any = importlib.import_module("expected")
rows: Any = importlib.import_module("rows")
eager: Any = importlib.import_module("peers.eager")

CPU = torch.device("cpu")
DOCUMENTS, WINDOW = (next(row for row in rows.TINY_ROWS if key in row.case) for key in ("documents_q", "window"))
TINY = {row.op: row for row in rows.TINY_ROWS if row.op != "adamw"}


def _run(row: Any, makers: dict[str, Any]) -> dict[str, Any]:
    run = measure.RowRun(row, torch.float32, CPU, measure.Ceilings(), 2)
    return {result.direction: result for result in run.run(makers)}


def _stub(monkeypatch, name: str, **members: Any) -> None:
    parts = name.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(parts[i]))
    for member, value in members.items():
        setattr(sys.modules[name], member, value)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def _fa4(q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = (None, None)) -> Any:
    assert window_size == (None, None)
    return _sdpa(q, k, v, causal), None


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def _quack_rmsnorm(x: Any, weight: Any = None, bias=None, residual=None, eps=1e-6, prenorm=False) -> Any:
    assert weight.dtype == torch.float32
    h = x if residual is None else x + residual
    return (_rms(h, weight, eps), h) if prenorm else _rms(h, weight, eps)


def _quack_loss(x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False):
    return F.cross_entropy(x.float(), target, ignore_index=ignore_index, reduction=reduction)


def test_adapters_of_cute_kernels_and_cce_call_as_their_signatures_say(monkeypatch):
    """Stand-ins with the packages' signatures and layouts, computed by torch: the adapters must pass the check."""
    _stub(monkeypatch, "quack", rmsnorm=_quack_rmsnorm, cross_entropy=_quack_loss)
    _stub(monkeypatch, "flash_attn.cute", flash_attn_func=_fa4)
    _stub(
        monkeypatch, "cut_cross_entropy", linear_cross_entropy=lambda e, c, targets: F.cross_entropy(e @ c.t(), targets)
    )
    loss = ModuleType("linear_cross_entropy")
    vars(loss)["chunked_linear_cross_entropy"] = lambda x, weight, target: F.cross_entropy(x @ weight.t(), target)
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", loss)
    for module, ops in (("quack", 4), ("flash_attn4", 1), ("cce", 1)):
        providers = importlib.import_module(f"peers.{module}").providers()
        assert len(providers) == ops
        for op, makers in providers.items():
            for result in _run(TINY[op], makers).values():
                assert {m.status for m in result.providers.values()} == {"ok"}, result


class _LigerSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (dc,) = grad_outputs
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        da, db = dc * b * s * (1 + a * (1 - s)), dc * a * s
        return a.detach().copy_(da), b.detach().copy_(db)


class _LigerRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        assert cos.shape == (1, q.shape[2], q.shape[3])
        ctx.save_for_backward(cos, sin)
        return tuple(_LigerRope.turn(t, cos, sin) for t in (q, k))

    @staticmethod
    def turn(t, cos, sin):
        x, y = t.chunk(2, -1)
        return t.detach().copy_(t * cos[:, None] + torch.cat((-y, x), -1) * sin[:, None])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        dq, dk = grad_outputs
        cos, sin = ctx.saved_tensors
        return _LigerRope.turn(dq, cos, -sin), _LigerRope.turn(dk, cos, -sin), None, None


class _LigerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, weight, ignore_index, z, smoothing, reduction, softcap, return_z_loss):
        loss = F.cross_entropy(x, target, ignore_index=ignore_index, reduction=reduction)
        gradient = (x.softmax(-1) - F.one_hot(target, x.shape[-1])) / target.numel()
        ctx.save_for_backward(x.detach().copy_(gradient))
        return loss, None

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return ctx.saved_tensors[0] * grad_outputs[0], *[None] * 8


class _Applied:
    """Something with `apply`, as an autograd function has."""

    def __init__(self, function: Any) -> None:
        self.apply = function


def test_adapters_of_liger_put_back_what_it_overwrites(monkeypatch):
    def rms(x, w, eps, offset, casting_mode, in_place):
        assert not in_place
        return _rms(x, w, eps)

    def add_rms(x, r, w, eps, offset, casting_mode, in_place):
        assert not in_place
        return _rms(x + r, w, eps), x + r

    def linear(x, w, target):
        return F.cross_entropy(x @ w.t(), target), None

    ops = "liger_kernel.ops"
    _stub(monkeypatch, f"{ops}.rms_norm", LigerRMSNormFunction=_Applied(rms))
    for name, members in {
        "fused_add_rms_norm": {"LigerFusedAddRMSNormFunction": _Applied(add_rms)},
        "swiglu": {"LigerSiLUMulFunction": _LigerSwiglu},
        "rope": {"LigerRopeFunction": _LigerRope},
        "cross_entropy": {"LigerCrossEntropyFunction": _LigerLoss},
        "fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": _Applied(linear)},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"{ops}.{name}", module)
    providers = importlib.import_module("peers.liger").providers()
    assert set(providers) == set(TINY) - {"attention"}
    for op, makers in providers.items():
        inputs = rows.make_inputs(TINY[op], torch.float32, CPU)
        upstream = rows.make_upstream(TINY[op], inputs)
        before = {n: t.clone() for n, t in inputs.items() if isinstance(t, torch.Tensor)}
        wanted = expected.expect(TINY[op], inputs, upstream)
        (call,) = [maker(inputs) for maker in makers.values()]
        for _ in range(2):  # the second call must see what the first one saw
            expected.check_peer(expected.run_call(call, upstream), wanted, torch.float32)
        assert all(torch.equal(inputs[n], t) for n, t in before.items()), f"{op} changed the row's inputs"


def test_plain_pytorch_gets_only_what_a_row_needs():
    """Eager and compiled peers pay for no option of ours: no z-loss, no gathered tables."""
    for op in eager.FUNCTIONS:
        call = eager.providers()[op]["eager"](rows.make_inputs(TINY[op], torch.float32, CPU))
        assert "z_loss" not in call.function.keywords and "positions" not in call.function.keywords
        (result, *_) = _run(TINY[op], eager.providers()[op]).values()
        assert result.providers["eager"].status == "ok"
    with torch.profiler.profile() as profiler:
        eager.providers()["cross_entropy"]["eager"](
            rows.make_inputs(TINY["cross_entropy"], torch.float32, CPU)
        ).function()
    names = {event.key for event in profiler.key_averages()}
    assert "aten::log_softmax" in names and "aten::logsumexp" not in names


def test_a_peer_that_breaks_on_import_is_listed_with_its_reason(monkeypatch):
    registry: Any = importlib.import_module("peers.registry")

    def broken() -> Any:
        raise OSError("libcute.so: cannot open shared object file")

    monkeypatch.setattr(eager, "providers", broken)
    peers = registry.load_peers()
    assert peers.missing["eager"] == "OSError: libcute.so: cannot open shared object file"
    assert "eager" not in peers.makers["rms_norm"] and "fuselm" in peers.makers["rms_norm"]


def test_only_the_flash_attn_package_itself_counts_as_it(monkeypatch):
    _stub(monkeypatch, "flash_attn")
    with pytest.raises(ImportError, match="only FlashAttention-4"):
        importlib.import_module("peers.flash_attn2").providers()


def test_our_loss_held_to_ligers_chunk_gets_its_rows(monkeypatch):
    """8192 rows of 128256 logits, 4096 wide: Liger takes a 32nd of the rows at a time, 256."""
    ours: Any = importlib.import_module("peers.fuselm_kernels")
    budgets = []
    inputs = {"x": torch.empty(8192, 4096, device="meta"), "weight": torch.empty(128256, 4096, device="meta")}
    ours._small_chunks(lambda **options: budgets.append(options["memory_budget"]), inputs).function()
    assert budgets == [256 * 128256 * 4]


def test_the_other_attention_kernels_say_why_they_do_not_run_here():
    makers: Any = importlib.import_module("peers.fuselm_kernels").providers()["attention"]
    (name,) = [name for name in makers if name.endswith("kernels")]
    for result in _run(TINY["attention"], {name: makers[name]}).values():
        assert result.providers[name].status.startswith("not timed: ")


def _visible(row: Any, reach: int | None, borders: torch.Tensor | None) -> torch.Tensor:
    """(queries, keys) bool, written out pair by pair."""
    length = row.case["lengths"][0]
    cu = [0, length] if borders is None else borders.tolist()
    owner = [sum(i >= border for border in cu) for i in range(length)]
    seen = [
        [k <= q and owner[k] == owner[q] and (reach is None or q - k <= reach) for k in range(length)]
        for q in range(length)
    ]
    return torch.tensor(seen)


def _masked(row: Any, q: Any, k: Any, v: Any, reach: int | None, borders: torch.Tensor | None) -> torch.Tensor:
    """Attention by the mask written out, of (batch, seq, heads, head_dim) or packed."""
    four = [t if t.dim() == 4 else t[None] for t in (q, k, v)]
    mask = _visible(row, reach, borders)
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in four), attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


@pytest.mark.parametrize("row", [DOCUMENTS, WINDOW], ids=["documents", "window"])
def test_documents_and_windows_reach_the_peers_as_they_count_them(row, monkeypatch):
    """Stand-ins with the signatures of FlashAttention-4, flash-attn and torch's op compute the mask they are told."""

    def fa4(q, k, v, causal=False, window_size=(None, None)):
        assert causal and window_size[1] is None
        return _masked(row, q, k, v, window_size[0], None), None

    def fa4_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
        assert causal and window_size == (None, None) and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        return _masked(row, q, k, v, None, cu_seqlens_q), None

    def fa2(q, k, v, causal=False, window_size=(-1, -1)):
        assert causal
        return _masked(row, q, k, v, window_size[0] if window_size[0] >= 0 else None, None)

    def fa2_varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal=False, window_size=(-1, -1)):
        assert causal and window_size == (-1, -1) and max_q == max_k == int(cu_q.diff().max())
        return _masked(row, q, k, v, None, cu_k)

    def torchs(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, window_size_left=None):
        assert causal and not debug and dropout == 0.0
        assert max_q == max_k == (q.shape[1] if cu_q is None else int(cu_q.diff().max()))
        return (_masked(row, q, k, v, window_size_left, cu_k), *[None] * 4)

    _stub(monkeypatch, "flash_attn.cute", flash_attn_func=fa4, flash_attn_varlen_func=fa4_varlen)
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", fa2, raising=False)
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", fa2_varlen, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", torchs)
    monkeypatch.setattr(importlib.import_module("peers.sdpa"), "FLASH_DEVICES", ("cpu",))
    makers: dict[str, Any] = {}
    for module in ("flash_attn4", "flash_attn2", "sdpa", "eager"):
        makers |= importlib.import_module(f"peers.{module}").providers()["attention"]
    for result in _run(row, makers).values():
        status = {name: m.status for name, m in result.providers.items()}
        assert "neither documents nor windows" in status.pop("cuDNN (SDPA)")
        assert ("holds all scores" if row is WINDOW else "ok") in status.pop("eager")
        assert set(status) == {"FA4", "flash-attn", "FA2 (SDPA)"} and set(status.values()) == {"ok"}, status


@pytest.mark.parametrize("row", [DOCUMENTS, WINDOW, TINY["attention"]], ids=["documents", "window", "causal"])
def test_flex_gets_the_mask_of_the_row(row):
    flex: Any = importlib.import_module("peers.flex")
    inputs = rows.make_inputs(row, torch.float32, CPU)
    length = row.case["lengths"][0]
    at = torch.arange(length)
    mask = flex._mask(inputs)(0, 0, at[:, None], at[None])
    reach = row.case["window"] - 1 if row is WINDOW else None
    assert torch.equal(mask, _visible(row, reach, inputs.get("cu_seqlens_q")))


@pytest.mark.parametrize("row", [DOCUMENTS, TINY["attention"]], ids=["packed", "batch"])
def test_heads_first_and_back_is_the_same_tensor(row):
    sdpa: Any = importlib.import_module("peers.sdpa")
    inputs = rows.make_inputs(row, torch.float32, CPU)
    packed = "cu_seqlens_q" in inputs
    leaves = sdpa.heads_first(inputs)
    assert all(t.dim() == 4 and t.shape[1] == inputs[name].shape[-2] for name, t in leaves.items())
    assert torch.equal(sdpa.heads_last(packed)(leaves)["k"], inputs["k"])
    assert torch.equal(sdpa.heads_last(packed)([leaves["q"]])[0], inputs["q"])
    assert torch.equal(sdpa.to_heads_first(packed)([inputs["q"]])[0], leaves["q"])


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ("liger", "error: --providers liger: not known, did you mean 'Liger'?; there are eager, torch.compile"),
        ("torch_compile", "error: --providers torch_compile: not known, did you mean 'torch.compile'?; there"),
        ("Liger", "error: --providers Liger: not installed here (no liger_kernel); there are eager, torch.compile"),
        ("Liger, in place", "error: --providers Liger, in place: not installed here (no liger_kernel); there"),
        ("qqq", "error: --providers qqq: not known; there are eager, torch.compile; not installed: Liger"),
    ],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_provider_that_is_not_there_ends_the_run_with_what_there_is(monkeypatch, tmp_path, provider, message, jobs):
    peers: Any = importlib.import_module("peers.registry").Peers(missing={"Liger": "no liger_kernel"})
    peers.makers["rope"] = dict.fromkeys(("fuselm", "eager", "torch.compile"))
    monkeypatch.setattr(compare_kernels, "load_peers", lambda: peers)
    ended = []
    monkeypatch.setattr(compile_ahead, "start", lambda options, folder, jobs: [jobs])
    monkeypatch.setattr(compile_ahead, "finish", lambda running, deadline: ended.extend(running))
    command = ["compare_kernels.py", "--output", str(tmp_path / "k.json"), "--tiny", "--jobs", str(jobs)]
    monkeypatch.setattr(sys, "argv", [*command, "--providers", "eager", provider])
    with pytest.raises(SystemExit) as error:
        compare_kernels.main()
    assert str(error.value).startswith(message) and not list(tmp_path.iterdir())
    assert ended == [2] * (jobs == 2)  # processes that compile are not left behind
