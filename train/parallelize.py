"""All parallelism, applied to the model from outside in one order.

    tensor parallelism (not yet) -> activation checkpointing -> per-block torch.compile -> FSDP2, or compute copies

Each stage wraps what the one before left: compile sees a recomputed block as one graph, and FSDP2's hooks stay outside
the compiled region. The model is on the meta device throughout; `materialize` allocates and fills this rank's shards
only.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fuselm.model.config import LlamaConfig
from fuselm.model.flops import parameter_counts
from fuselm.model.llama import Block, Llama, initial_value
from fuselm.train.compute_copies import ComputeCopies, copies_of
from fuselm.train.config import ParallelConfig
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.gradient_exchange import before_backward, exchange_within_machine

STATE_BYTES = 16  # a parameter: fp32 value, gradient and two moments
WRAPPER = "_checkpoint_wrapped_module."


def build_mesh(world: World) -> DeviceMesh:
    """One dimension, `fsdp`, over all ranks."""
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("fsdp",))


def require_memory(model: LlamaConfig, world: World) -> None:
    """Refuse a model whose parameters, gradients and optimizer state alone are more than this rank's memory.

    Raises:
        UserError: with both numbers. Activations come on top and are not counted.
    """
    parameters, _ = parameter_counts(model)
    needed = parameters * STATE_BYTES / world.size
    if world.device.type == "cuda":
        here, what = torch.cuda.mem_get_info(world.device)[1], "this GPU"
    else:  # ranks of one machine share its memory
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        here, what = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    if needed > here:
        raise UserError(
            f"the model has {parameters / 1e9:,.1f} billion parameters; with gradients and optimizer state they need "
            f"{needed / 2**30:,.0f} GiB of {what}, which has {here / 2**30:,.0f} GiB: take more "
            "ranks or a smaller model"
        )


def parallelize(model: Llama, config: ParallelConfig, mesh: DeviceMesh) -> Llama:
    """Apply the stages of this module to a model on the meta device, in place.

    Args:
        model: on the meta device.
        config: which stages, and how.
        mesh: from `build_mesh`.

    Returns:
        The same model, whose parameters are now DTensors on meta; plain ones where it is not sharded.
    """
    # Tensor parallelism belongs here, first: it changes what a block's parameters are.
    if config.activation_checkpointing != "none":
        apply_activation_checkpointing(model, config.activation_checkpointing)
    if config.compile if config.compile is not None else mesh.device_type == "cuda":
        for block in model.blocks:
            block.compile(fullgraph=True)
    if is_sharded(config, mesh):
        apply_fsdp(model, config, mesh)
    return model


def is_sharded(config: ParallelConfig, mesh: DeviceMesh) -> bool:
    """Whether FSDP2 holds the parameters.

    Raises:
        UserError: parallel.sharding is none, but there are several ranks.
    """
    if config.sharding == "none" and mesh.size() > 1:
        raise UserError(
            f"parallel.sharding is none, but there are {mesh.size()} ranks: it is for one; take auto or fsdp"
        )
    return config.sharding == "fsdp" or mesh.size() > 1


def make_copies(model: Llama, config: ParallelConfig, mesh: DeviceMesh) -> ComputeCopies | None:
    """Copies in the compute dtype for a materialized model that FSDP2 does not hold; None where it needs none.

    They are also the model's attribute `compute_copies`.
    """
    dtype = getattr(torch, config.param_dtype)
    if is_sharded(config, mesh) or dtype == torch.float32:
        return None
    model.compute_copies = ComputeCopies(model, dtype)  # pyright: ignore[reportArgumentType]
    return copies_of(model)


def apply_activation_checkpointing(model: Llama, mode: str) -> None:
    """Recompute blocks in the backward pass: their SwiGLU, all but attention and every second matmul, or wholly."""
    for index, block in enumerate(model.blocks):
        if mode == "swiglu":
            cast(Block, block).mlp.recompute_activation = True
            continue
        if mode == "full":
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        else:
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False, context_fn=_selective_contexts)
        model.blocks[index] = wrapped


def apply_fsdp(model: Llama, config: ParallelConfig, mesh: DeviceMesh) -> None:
    """FSDP2 for each block and an untied embedding, then for what is left at the root (last norm, head)."""
    # Inputs are not cast: the rope tables that each block receives must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    if not model.config.tie_embeddings:
        # Apart from the head, or both tables and their gradients would be whole on every rank at once.
        fully_shard(model.embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
        cast(FSDPModule, model.embedding).set_unshard_in_backward(False)  # the backward pass does not read it
    # The backward pass starts with the head, so the root's parameters would be gathered again at once.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum over tokens / their global count, so gradients are summed over ranks, not averaged.
            module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo has no pre-multiplied one, and NCCL's average is not reliable on one rank.
            module.set_force_sum_reduction_for_comms(True)
    exchange_within_machine(cast(FSDPModule, model), getattr(torch, config.param_dtype), mesh.size())


def materialize(model: Llama, device: torch.device, seed: int) -> None:
    """Allocate a meta model's shards and fill them with the initial weights.

    Each parameter's whole value is a function of its name and the seed, drawn on every rank and cut to its shard: the
    same model on any number of ranks, with one whole parameter in memory at a time.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = initial_value(name.replace(WRAPPER, ""), parameter.shape, model.config, seed, device)
            if isinstance(parameter, DTensor):
                # Every rank has drawn the same values; src_data_rank=None cuts without communication.
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)


def accumulate_locally(model: nn.Module, *, last: bool) -> None:
    """Before each micro-batch: reduce gradients over ranks in the backward pass of the last one only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        before_backward(model, last=last)
    elif not last and (copies := copies_of(model)) is not None:
        copies.sum_gradients()


def reshard(model: nn.Module) -> None:
    """After forward passes without a backward pass: free the root's gathered parameters, which wait for one."""
    if isinstance(model, FSDPModule):
        model.reshard()
    elif (copies := copies_of(model)) is not None:
        copies.leave()


# Results that are dearer to compute again than to keep.
_ALWAYS_SAVED = (
    "fuselm::attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


def _selective_contexts() -> Any:
    """Contexts of one forward pass and its recomputation, with a matmul counter of their own: both must count alike."""
    matmuls = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name().partition(".")[0] if hasattr(op, "name") else str(op)
        if name in _ALWAYS_SAVED:
            return CheckpointPolicy.MUST_SAVE
        if name == "aten::mm":
            matmuls[context.is_recompute] += 1
            if matmuls[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
