"""The model of a fine-tuning run: from where it starts, how it is sharded, and what is written at the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fuselm.model.config import Kernels, LlamaConfig
from fuselm.model.hf import load_hf, read_parameters
from fuselm.model.hf_config import config_from_hf, read_json
from fuselm.model.llama import Llama
from fuselm.model.lora import LoRAConfig, add_lora, initial_adapter, load_lora, merge_lora, read_settings
from fuselm.train.config import ParallelConfig, config_from_json
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.parallelize import WRAPPER, build_mesh, parallelize
from fuselm.train.sample import load_run

MODEL, ADAPTER = "model", "adapter"  # what a fine-tuning run leaves in its folder


@dataclass(frozen=True)
class Base:
    """A model to start from.

    Attributes:
        path: of the Hugging Face folder or of the run.
        config: its shape.
        tokenizer: its tokenizer.json.
        is_run: a run folder of pretrain.py.
    """

    path: Path
    config: LlamaConfig
    tokenizer: Path
    is_run: bool

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole CPU value of each parameter; of a Hugging Face folder, one at a time.

        Raises:
            UserError: they cannot be read.
        """
        if self.is_run:
            model, _ = load_run(self.path)
            yield from ((name, p.detach()) for name, p in model.named_parameters())
            return
        try:
            yield from read_parameters(self.path, self.config)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(str(error)) from error


def open_base(path: Path, device: torch.device) -> Base:
    """What lies in a folder: a Hugging Face Llama, a run of pretrain.py, or a full fine-tuning run.

    Args:
        path: the folder.
        device: where the model will run.

    Raises:
        UserError: none of these; or it holds adapters only.
    """
    if (path / MODEL / "config.json").is_file():
        path = path / MODEL
    if (path / ADAPTER).is_dir():
        raise UserError(f"{path} holds an adapter only: start from its base, or fine-tune it with --merge first")
    if not path.is_dir():
        wrong = "is not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {wrong}: expected a run folder or a Hugging Face folder")
    try:
        is_run = "model_type" not in read_json(path / "config.json")
        config = config_from_json(path).model if is_run else config_from_hf(path / "config.json")
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{error}: expected a run folder or a Hugging Face folder") from error
    # Whatever it was trained with: another backend may be missing here, or have no document masks.
    config = dataclasses.replace(config, kernels=kernels_for(device), attention_backend="fuselm")
    return Base(path, config, path / "tokenizer.json", is_run)


def kernels_for(device: torch.device) -> Kernels:
    """Kernels on a GPU; on a CPU plain PyTorch, not Triton's interpreter."""
    return "eager" if device.type == "cpu" else "auto"


def build_model(base: Base, parallel: ParallelConfig, lora: LoRAConfig | None, world: World, seed: int) -> Llama:
    """The base's model, sharded over the world's ranks; with `lora` frozen, in the compute dtype, and with adapters.

    Raises:
        UserError: the weights cannot be read.
    """
    with torch.device("meta"):
        model = Llama(base.config)
        if lora is not None:
            # Nothing is added to frozen weights, so they lose nothing in the dtype that they are used in.
            model = add_lora(model.to(getattr(torch, parallel.param_dtype)), lora, dtype=torch.float32)
    parallelize(model, parallel, build_mesh(world))
    model.to_empty(device=world.device)
    missing = {name.replace(WRAPPER, ""): p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, whole in base.parameters():
            _set(missing.pop(name), whole.to(world.device))
        for name, parameter in missing.items():
            _set(parameter, initial_adapter(name, parameter.shape, seed, world.device))
    return model


def _set(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    whole = whole.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        # Every rank has the whole value; src_data_rank=None cuts without communication.
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


@torch.no_grad()
def gather(model: Llama, world: World) -> dict[str, torch.Tensor]:
    """The trained parameters, whole and on the CPU, on rank 0; all ranks call this together."""
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if world.is_main:
                state[name.replace(WRAPPER, "")] = whole.detach().to("cpu", copy=True)
    return state


def whole_model(config: LlamaConfig, state: dict[str, torch.Tensor]) -> Llama:
    """A plain model on the CPU of gathered parameters, which it takes over."""
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(state, assign=True)
    return model


def load_tuned(path: Path, device: torch.device) -> tuple[Llama, Path]:
    """A model to talk to: of a fine-tuning run, full or LoRA, a Hugging Face folder, or a run of pretrain.py.

    Args:
        path: the folder.
        device: where it goes, in bf16 on a GPU and in fp32 on a CPU.

    Returns:
        The model, adapters merged, and the folder or file of its tokenizer.

    Raises:
        UserError: something is missing or wrong.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        if (path / ADAPTER).is_dir():
            _, facts = read_settings(path / ADAPTER)
            if not isinstance(facts.get("base"), str):
                raise UserError(f"{path / ADAPTER} does not say which base it belongs to")
            if (Path(facts["base"]) / ADAPTER).is_dir():
                raise UserError(f"{path / ADAPTER} belongs to {facts['base']}, which holds an adapter itself")
            model, tokenizer = load_tuned(Path(facts["base"]), device)
            merge_lora(load_lora(model, path / ADAPTER))
            own = path / "tokenizer.json"
            return model, own if own.is_file() else tokenizer
        base = open_base(path, device)
        if base.is_run:
            return load_run(base.path, device=device)[0], base.tokenizer
        return load_hf(base.path, dtype=dtype, device=device, kernels=kernels_for(device)).eval(), base.tokenizer
    except (FileNotFoundError, ValueError, json.JSONDecodeError) as error:
        raise UserError(str(error)) from error
