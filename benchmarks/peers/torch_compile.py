"""The plain PyTorch of eager.py under torch.compile. Attention is in flex.py."""

from __future__ import annotations

from functools import partial

import torch
from peers.base import Providers
from peers.eager import FUNCTIONS, maker

NAME = "torch.compile"
DISTRIBUTIONS = ("torch", "triton")


def providers() -> Providers:
    """Every op but attention and AdamW."""
    # Compiled for each row by itself: a second shape would make it compile for dynamic shapes, a ninth run eagerly.
    return {op: {NAME: maker(op, partial(torch.compile, dynamic=False))} for op in FUNCTIONS}
