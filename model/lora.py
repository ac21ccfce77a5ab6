"""LoRA: low-rank adapters on the linear layers of a `Llama` (Hu et al. 2021, arXiv:2106.09685).

An adapted layer computes x·Wᵀ + (alpha / rank)·(x·Aᵀ)·Bᵀ with W frozen, A (rank, in) and B (out, rank). B begins at
zero, so that nothing changes at first. The packed projections (qkv, gate_up) have one pair for all their parts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from fuselm.model.hf_config import read_json
from fuselm.model.llama import Llama

TARGETS = ("qkv", "output", "gate_up", "down")
WEIGHTS, SETTINGS = "adapter.safetensors", "adapter.json"


@dataclass(frozen=True)
class LoRAConfig:
    """Which layers get an adapter, and of what size.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    rank: int = 8
    """Rows of A and columns of B."""
    alpha: float = 16.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """Names of linear layers: qkv and output of the attention, gate_up and down of the MLP."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: expected at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha={self.alpha}: expected a finite number above 0")
        wrong = [name for name in self.targets if name not in TARGETS]
        if wrong or not self.targets:
            raise ValueError(f"targets={self.targets}: expected some of {TARGETS}")


class LoRALinear(nn.Linear):
    """A linear layer without bias and its adapter; `weight` keeps its name and is frozen.

    Args:
        linear: whose weight is taken over.
        config: of the adapter.
        dtype: of A and B; None takes the weight's.
    """

    def __init__(self, linear: nn.Linear, config: LoRAConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.weight.requires_grad_(False)
        self.scale = config.alpha / config.rank
        like: dict[str, Any] = {"device": linear.weight.device, "dtype": dtype or linear.weight.dtype}
        self.lora_a = nn.Parameter(torch.zeros(config.rank, linear.in_features, **like))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, config.rank, **like))
        self._before: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._before is not None:
            return nn.functional.linear(input, self.weight)
        # The adapter first: a recomputation ends where nothing more is kept, which is then before the large matmul.
        adapted = nn.functional.linear(nn.functional.linear(input, self.lora_a), self.lora_b) * self.scale
        return nn.functional.linear(input, self.weight) + adapted

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the weight; the weight of before is kept for `unmerge`. Nothing where it is merged."""
        if self._before is None:
            self._before = self.weight.detach().clone()
            self.weight += (self.lora_b.float() @ self.lora_a.float() * self.scale).to(self.weight.dtype)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Bring back the weight of before, bitwise."""
        if self._before is not None:
            self.weight.copy_(self._before)
            self._before = None


def adapted_layers(model: Llama) -> dict[str, LoRALinear]:
    """The adapted layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def add_lora(model: Llama, config: LoRAConfig, seed: int = 0, *, dtype: torch.dtype | None = None) -> Llama:
    """Freezes a model and puts adapters into its linear layers, in place.

    Args:
        model: without adapters; may be on the meta device, then `initial_adapter` gives the values later.
        config: which, and of what size.
        seed: of A.
        dtype: of the adapters; None takes that of each weight.

    Returns:
        The same model.

    Raises:
        ValueError: it has adapters.
    """
    if adapted_layers(model):
        raise ValueError("model has adapters already: merge and remove them first (remove_lora)")
    model.requires_grad_(False)
    for path, linear in _linear_layers(model, config).items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, adapted := LoRALinear(linear, config, dtype))
        if not adapted.lora_a.is_meta:
            with torch.no_grad():
                first = initial_adapter(f"{path}.lora_a", adapted.lora_a.shape, seed, linear.weight.device)
                adapted.lora_a.copy_(first)
    return model


def _linear_layers(model: Llama, config: LoRAConfig) -> dict[str, nn.Linear]:
    """The layers that get an adapter, by name."""
    named = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    return {path: linear for path, linear in named.items() if path.rpartition(".")[2] in config.targets}


def initial_adapter(name: str, shape: torch.Size | tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """The first value of an adapter's matrix, a function of its name and the seed: B zero, A normal with variance
    1 / in, so that A keeps the size of its input."""
    if name.endswith("lora_b"):
        return torch.zeros(shape, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(shape, device=device).normal_(0.0, shape[1] ** -0.5, generator=generator)


def merge_lora(model: Llama) -> Llama:
    """Adds every adapter to its weight, in place: the same outputs to rounding, at the speed of the plain model."""
    for layer in adapted_layers(model).values():
        layer.merge()
    return model


def unmerge_lora(model: Llama) -> Llama:
    """Takes `merge_lora` back, bitwise."""
    for layer in adapted_layers(model).values():
        layer.unmerge()
    return model


def remove_lora(model: Llama) -> Llama:
    """Merges every adapter for good and puts plain linear layers in place of the adapted ones, as `export_hf` wants."""
    merge_lora(model)
    for path, layer in adapted_layers(model).items():
        parent, _, name = path.rpartition(".")
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight = layer.weight
        setattr(model.get_submodule(parent), name, plain)
    return model.requires_grad_(True)


def lora_state(model: Llama) -> dict[str, torch.Tensor]:
    """The matrices of all adapters, by parameter name."""
    return {name: p.detach() for name, p in model.named_parameters() if name.endswith((".lora_a", ".lora_b"))}


def save_lora(
    folder: Path, state: Mapping[str, torch.Tensor], config: LoRAConfig, facts: Mapping[str, Any] | None = None
) -> None:
    """Writes adapters alone: adapter.safetensors, and adapter.json with their configuration.

    Args:
        folder: exists or is made.
        state: from `lora_state`, whole tensors.
        config: of the adapters.
        facts: what else adapter.json shall say, for instance the base model's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, folder / WEIGHTS)
    settings = json.dumps(dict(facts or {}) | asdict(config), indent=2, sort_keys=True)
    (folder / SETTINGS).write_text(settings + "\n", encoding="utf-8")


def read_settings(folder: Path) -> tuple[LoRAConfig, dict[str, Any]]:
    """Configuration and facts of a folder with adapters.

    Raises:
        FileNotFoundError: there is no adapter.json.
        ValueError: it does not describe adapters.
    """
    path = folder / SETTINGS
    facts = read_json(path)
    try:
        targets: Sequence[str] = facts.pop("targets")
        return LoRAConfig(int(facts.pop("rank")), float(facts.pop("alpha")), tuple(targets)), facts
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe adapters: {error}") from error


def load_lora(model: Llama, folder: Path) -> Llama:
    """Adds the adapters of a folder to a plain model, in place; after an error the model is as it was.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ValueError: the model has adapters, or these do not fit it; the message names the first that does not.
    """
    config, _ = read_settings(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    expected: dict[str, tuple[int, ...]] = {}
    for layer, linear in _linear_layers(model, config).items():
        expected[f"{layer}.lora_a"] = config.rank, linear.in_features
        expected[f"{layer}.lora_b"] = linear.out_features, config.rank
    found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    for name in () if adapted_layers(model) else sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{path} does not fit the model: {name} has shape {found.get(name)}, expected {expected.get(name)}"
            )
    own = lora_state(add_lora(model, config))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    return model
