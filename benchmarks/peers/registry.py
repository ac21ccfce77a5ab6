"""All peers: those that import, their versions, and why the others are not there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from peers.base import Maker
from timing import describe

from fuselm.env import package_version

MODULES = (
    "fuselm_kernels", "eager", "torch_compile", "torch_optim", "liger", "quack", "cce", "sdpa", "flash_attn4",
    "flash_attn2", "flex", "apex",
)  # fmt: skip


@dataclass
class Peers:
    """What can be compared here.

    Attributes:
        makers: op -> {provider name -> maker}, ours first.
        missing: peer -> why it is not there.
        versions: distribution -> version of what the peers are made of.
    """

    makers: dict[str, dict[str, Maker]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def load_peers() -> Peers:
    """Imports every peer. One that is missing, or that breaks on import, is in `missing` with the reason."""
    peers = Peers()
    for name in MODULES:
        module = importlib.import_module(f"peers.{name}")
        try:
            providers = module.providers()
        except Exception as error:  # a peer that breaks on import must not take the others with it
            peers.missing[module.NAME] = describe(error)
            continue
        for op, makers in providers.items():
            peers.makers.setdefault(op, {}).update(makers)
        found = {d: package_version(d) for d in module.DISTRIBUTIONS}
        peers.versions |= {d: v for d, v in found.items() if v != "not installed"}
    return peers
