"""The training step of other libraries' Llamas, on what a run of train/pretrain.py trains on. Run by bench_step.py:

    python benchmarks/step_peers.py --peer torchtitan --output torchtitan.json --preset llama3_1b --training.steps 40

Everything after --output is as for pretrain.py. A peer gets the same architecture, the very same initial weights, the
same tokens in the same order, the same schedule and AdamW's hyperparameters. It trains as its users do: FSDP2 with fp32
parameters, bf16 compute and fp32 reductions, also on one GPU; the norm clipped by PyTorch; PyTorch's fused AdamW.

- hf: Hugging Face's Llama, uncompiled, with its own loss.
- hf+compile: each block compiled, and the loss.
- hf+liger: all of Liger-Kernel's patches, its fused linear and cross-entropy among them; uncompiled.
- torchtitan: torchtitan's Llama 3, each block compiled, and the loss.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fuselm.env import package_version
from fuselm.model.config import LlamaConfig
from fuselm.model.hf_config import config_to_hf
from fuselm.model.llama import Llama, initial_value
from fuselm.train import distributed
from fuselm.train.config import TrainConfig, parse_command_line, resolve
from fuselm.train.data_stream import Batch
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.evaluation import IGNORE_INDEX, on_device, to_device, valid_tokens
from fuselm.train.feeds import open_feeds
from fuselm.train.lr_schedule import lr_factor
from fuselm.train.metrics import memory_gib
from fuselm.train.parallelize import accumulate_locally, build_mesh
from fuselm.train.presets import PRESETS

# (model, micro-batch on the device, valid tokens of the step) -> this micro-batch's share of the step's mean loss
Loss = Callable[[nn.Module, Batch, torch.Tensor], torch.Tensor]

_IN_A_BLOCK = r"blocks\.(\d+)\.(.+)\.weight"
_HF_NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
_TORCHTITAN_NAMES = {
    "embedding": "tok_embeddings",
    "blocks": "layers",
    "attention_norm": "attention_norm",
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.output": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "norm": "norm",
    "lm_head": "output",
}


@dataclass(frozen=True)
class Built:
    """A peer's model, whole and on the device, and its parts that FSDP2 takes one by one.

    Attributes:
        blocks: in order.
        head: None where the loss reads the head's weight without calling it, which only the root's hooks allow.
    """

    model: nn.Module
    embedding: nn.Module
    blocks: Sequence[nn.Module]
    norm: nn.Module
    head: nn.Module | None
    loss: Loss


@dataclass(frozen=True)
class Peer:
    """How a peer is built.

    Attributes:
        packages: what must be importable.
        distributions: whose versions to write down.
        names: our name of a part -> the peer's.
        build: (model, sequence length, device) -> the model, with any weights.
        compiled: compile its blocks.
        interleaved: RoPE turns neighbours, (0, 1), (2, 3)...; ours turns the two halves of a head.
    """

    packages: tuple[str, ...]
    distributions: tuple[str, ...]
    names: dict[str, str]
    build: Callable[[LlamaConfig, int, torch.device], Built]
    compiled: bool = False
    interleaved: bool = False


def missing_packages(name: str) -> list[str]:
    """The packages that a peer of PEERS needs and that are not installed; nothing is imported."""
    return [package for package in PEERS[name].packages if importlib.util.find_spec(package) is None]


# --- The models -----------------------------------------------------------------------------------------------------


def _hf(config: LlamaConfig, device: torch.device) -> Any:
    transformers: Any = importlib.import_module("transformers")
    settings = transformers.LlamaConfig.from_dict(config_to_hf(config, torch.float32, None, None))
    settings.use_cache = False
    settings._attn_implementation = "sdpa"
    with device:
        return transformers.LlamaForCausalLM(settings).float().train()


def _hf_loss(model: nn.Module, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    targets = {"labels": batch.targets, "shift_labels": batch.targets}  # ours are shifted already
    return model(input_ids=batch.tokens, num_items_in_batch=count, **targets).loss


def build_hf(config: LlamaConfig, seq_len: int, device: torch.device) -> Built:
    """Hugging Face's Llama with its own loss."""
    model = _hf(config, device)
    inner = model.model
    return Built(model, inner.embed_tokens, list(inner.layers), inner.norm, model.lm_head, _hf_loss)


def build_hf_compiled(config: LlamaConfig, seq_len: int, device: torch.device) -> Built:
    """Hugging Face's Llama, with a compiled loss."""
    model = _hf(config, device)
    loss = summed_loss(lambda model, tokens: model(input_ids=tokens).logits)
    inner = model.model
    return Built(model, inner.embed_tokens, list(inner.layers), inner.norm, model.lm_head, loss)


def build_hf_liger(config: LlamaConfig, seq_len: int, device: torch.device) -> Built:
    """Hugging Face's Llama with all patches of Liger-Kernel."""
    importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    model = _hf(config, device)
    inner = model.model
    return Built(model, inner.embed_tokens, list(inner.layers), inner.norm, None, _hf_loss)


def build_torchtitan(config: LlamaConfig, seq_len: int, device: torch.device) -> Built:
    """torchtitan's Llama 3, with its loss.

    Raises:
        UserError: it has no such model.
    """
    if config.qk_norm or config.head_size * config.num_heads != config.dim:
        raise UserError(
            f"qk_norm={config.qk_norm}, head_dim={config.head_size}: torchtitan's Llama has no norms on queries and "
            f"keys, and its heads are dim / num_heads = {config.dim / config.num_heads:g} wide"
        )
    args: Any = importlib.import_module("torchtitan.models.llama3.model.args")
    scaling = config.rope_scaling
    # Without scaling a factor of 1 divides by 1.
    scaling_args = (
        args.RoPEScalingArgs(scaling_factor=1.0)
        if scaling is None
        else args.RoPEScalingArgs(
            scaling_factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_seq_len,
        )
    )
    settings = args.TransformerModelArgs(
        dim=config.dim,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        n_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        # It rounds a width that it derives from dim up to a multiple of this: a small width becomes ours.
        multiple_of=config.ffn_dim,
        ffn_dim_multiplier=config.ffn_dim / (8 * config.dim),
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling_args=scaling_args,
        max_seq_len=seq_len,
    )
    with device:
        model = importlib.import_module("torchtitan.models.llama3.model.model").Transformer(settings)
    if config.tie_embeddings:
        model.output.weight = model.tok_embeddings.weight
    loss = summed_loss(lambda model, tokens: model(tokens))
    return Built(model, model.tok_embeddings, list(model.layers.values()), model.norm, model.output, loss)


def summed_loss(logits_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Loss:
    """Cross-entropy in fp32, summed over tokens and divided by their count: in one compiled function on a GPU."""

    def total(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    compiled = torch.compile(total)

    def loss(model: nn.Module, batch: Batch, count: torch.Tensor) -> torch.Tensor:
        function = compiled if batch.tokens.is_cuda else total
        return function(logits_of(model, batch.tokens), batch.targets) / count

    return loss


PEERS: dict[str, Peer] = {
    "hf": Peer(("transformers",), ("transformers",), _HF_NAMES, build_hf),
    "hf+compile": Peer(("transformers",), ("transformers",), _HF_NAMES, build_hf_compiled, compiled=True),
    "hf+liger": Peer(("transformers", "liger_kernel"), ("transformers", "liger-kernel"), _HF_NAMES, build_hf_liger),
    "torchtitan": Peer(
        ("torchtitan",), ("torchtitan",), _TORCHTITAN_NAMES, build_torchtitan, compiled=True, interleaved=True
    ),
}
_IMPORTS = {
    "hf": ("transformers.models.llama.modeling_llama",),
    "hf+compile": ("transformers.models.llama.modeling_llama", "torch._inductor.compile_fx"),
    "hf+liger": ("liger_kernel.transformers",),
    "torchtitan": ("torchtitan.models.llama3.model.model", "torch._inductor.compile_fx"),
}


# --- Weights and parallelism ----------------------------------------------------------------------------------------


def peer_name(name: str, names: dict[str, str]) -> str:
    """The peer's name of one of our parts, "blocks.3.attention.q.weight" for example."""
    if match := re.fullmatch(_IN_A_BLOCK, name):
        return f"{names['blocks']}.{match[1]}.{names[match[2]]}.weight"
    return f"{names[name.removesuffix('.weight')]}.weight"


def parts(name: str, whole: torch.Tensor, config: LlamaConfig, interleaved: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """One of our parameters as the matrices that other Llamas have, with queries and keys in their order.

    Args:
        name: in our model.
        whole: its value.
        interleaved: order the rows of a head's queries and keys for a RoPE that turns neighbours.
    """
    head = config.head_size
    if name.endswith("attention.qkv.weight"):
        keys = config.num_kv_heads * head
        for part, rows in zip("qkv", whole.split([config.num_heads * head, keys, keys]), strict=True):
            if interleaved and part != "v":
                rows = rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
            yield name.replace("qkv", part), rows
    elif name.endswith("mlp.gate_up.weight"):
        for part, rows in zip(("gate", "up"), whole.chunk(2), strict=True):
            yield name.replace("gate_up", part), rows
    else:
        yield name, whole


@torch.no_grad()
def fill(model: nn.Module, peer: Peer, config: LlamaConfig, seed: int, device: torch.device) -> None:
    """Give a whole model the weights that our trainer begins with.

    Raises:
        ValueError: a parameter of the peer has no counterpart.
    """
    left = dict(model.named_parameters())
    with torch.device("meta"):
        ours = Llama(config)
    for name, parameter in ours.named_parameters():
        whole = initial_value(name, parameter.shape, config, seed, device)
        for part, value in parts(name, whole, config, peer.interleaved):
            target = left.pop(peer_name(part, peer.names))
            if target.shape != value.shape:
                raise ValueError(f"{part} has shape {tuple(value.shape)}, the peer's is {tuple(target.shape)}")
            target.copy_(value)
    if left:
        raise ValueError(f"the peer has parameters that ours lacks: {', '.join(left)}")


def shard(built: Built, config: TrainConfig, world: World) -> None:
    """FSDP2 as torchtitan applies it: embedding, each block, last norm with head, then the root.

    Tied matrices must share a group, and so must a head that the loss reads without calling it: the root's.
    """
    mesh = build_mesh(world)
    parallel = config.parallel
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, parallel.param_dtype), reduce_dtype=torch.float32)
    every: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if not config.model.tie_embeddings:
        fully_shard(built.embedding, **every, reshard_after_forward=parallel.reshard_after_forward)
    for block in built.blocks:
        fully_shard(block, **every, reshard_after_forward=parallel.reshard_after_forward)
    if not config.model.tie_embeddings and built.head is not None:
        fully_shard([built.norm, built.head], **every, reshard_after_forward=False)
    fully_shard(built.model, **every, reshard_after_forward=False)
    for module in built.model.modules():
        if isinstance(module, FSDPModule):  # as in our trainer: the loss is divided by the count over all ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def build(peer: Peer, config: TrainConfig, world: World) -> Built:
    """The peer's model with our initial weights, compiled where it is a peer that compiles, and sharded."""
    built = peer.build(config.model, config.training.seq_len, world.device)
    fill(built.model, peer, config.model, config.training.seed, world.device)
    wanted = config.parallel.compile
    if peer.compiled and (wanted if wanted is not None else world.device.type == "cuda"):
        for block in built.blocks:
            block.compile()
    shard(built, config, world)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)  # the model was whole for a moment
    return built


# --- Training -------------------------------------------------------------------------------------------------------


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip the gradients to a global norm over all ranks, and give the norm before."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def train(built: Built, config: TrainConfig, world: World) -> dict[str, Any]:
    """All steps of the run: the loss and the milliseconds of each (None for the first), and the peak memory in GiB.

    As in our trainer a step is timed from the end of the one before by the GPU's events, and the host waits for the
    step before the last only.
    """
    model, settings = built.model, config.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
    _, feed, _ = open_feeds(config, world)
    losses: list[torch.Tensor] = []
    ends: list[Any] = []
    gc.collect()
    gc.disable()  # torchtitan, too, keeps the collector out of its steps
    try:
        for step in range(config.training.steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * lr_factor(step, config.training.steps, config.schedule)
            batches = feed.micro_batches(step)
            count = world.sum(on_device([valid_tokens(batches)], world.device))[0].clamp(min=1).float()
            total = torch.zeros((), device=world.device)
            for index, batch in enumerate(batches):
                accumulate_locally(model, last=index == len(batches) - 1)
                loss = built.loss(model, to_device(batch, world.device), count)
                loss.backward()
                total += loss.detach()
            if settings.max_grad_norm is not None:
                clip(parameters, settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(world.sum(total))
            ends.append(_now(world.device))
            if step and world.device.type == "cuda":
                ends[-2].synchronize()
    finally:
        gc.enable()
        feed.close()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return {
        "losses": torch.stack(losses).tolist(),
        "step_ms": [None, *(_milliseconds(a, b) for a, b in itertools.pairwise(ends))],
        "memory_gib": memory_gib(world.device),
    }


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def run(name: str, config: TrainConfig, world: World) -> dict[str, Any]:
    """One peer's run, to be written as JSON.

    Raises:
        UserError: the peer cannot train this.
    """
    if config.data.document_mask:
        raise UserError("data.document_mask is True: the peers read plain rows, without borders of documents")
    peer = PEERS[name]
    result = train(build(peer, config, world), config, world)
    breaks = torch._dynamo.utils.counters["graph_break"]
    return {
        "peer": name,
        **result,
        "graph_breaks": sum(breaks.values()),
        "versions": {distribution: package_version(distribution) for distribution in peer.distributions},
    }


def wait_for(path: Path, limit_s: float = 1800.0) -> None:
    """Wait until a file is there.

    Raises:
        TimeoutError: it did not come.
    """
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not come within {limit_s:g} s")
        time.sleep(0.02)


def main(arguments: list[str]) -> int:
    """Train one peer; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--peer", choices=list(PEERS), required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--wait-for", type=Path, help="import, then wait for this file before using the GPU")
    own, options = parser.parse_known_args(arguments)
    try:
        ranks = distributed.world_size_from_environment()
        config = resolve(parse_command_line(options, PRESETS, ""), ranks)
        if own.wait_for is not None:
            for module in _IMPORTS[own.peer]:
                importlib.import_module(module)
            wait_for(own.wait_for)
        world = distributed.start(config.parallel.device)
        result = run(own.peer, config, world)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if world.is_main:
        own.output.write_text(json.dumps(result) + "\n")
        print(f"wrote {own.output}: last loss {result['losses'][-1]:.4f}, {result['memory_gib']:.1f} GiB")
    distributed.stop(world)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
