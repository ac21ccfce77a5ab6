"""Faults put into a training run on purpose: by batch, so that they come again when the batch does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from fuselm.train import evaluation
from fuselm.train.trainer import Trainer


class Faults:
    """Makes the training batches of a run go wrong; validation is left alone.

    Args:
        run: the trainer.
        spikes: batches whose loss, and so its gradient, is a hundredfold.
        nan_losses: batches whose loss is NaN.
        ranks: where; None for everywhere.
    """

    def __init__(
        self,
        run: Trainer,
        *,
        spikes: Collection[int] = (),
        nan_losses: Collection[int] = (),
        ranks: Collection[int] | None = None,
    ) -> None:
        self.run, self.batch, self.seen = run, -1, []
        here = ranks is None or run.world.rank in ranks
        feed, loss_sum = run.training, evaluation.loss_sum
        micro_batches = feed.micro_batches

        def announced(step: int) -> Any:
            self.batch = step
            self.seen.append(step)
            return micro_batches(step)

        def faulty(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            loss = loss_sum(model, batch)
            if here and torch.is_grad_enabled() and self.batch in spikes:
                loss = loss * 100
            if here and torch.is_grad_enabled() and self.batch in nan_losses:
                loss = loss * float("nan")
            return loss

        object.__setattr__(feed, "micro_batches", announced)
        self._patched, self._loss_sum = faulty, loss_sum

    def __enter__(self) -> Faults:
        evaluation.loss_sum = self._patched
        return self

    def __exit__(self, *exception: object) -> None:
        evaluation.loss_sum = self._loss_sum

    def break_layer(self, name: str, batches: Collection[int], spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let a module's output go through `spoil` on these batches."""

        def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            return spoil(output) if torch.is_grad_enabled() and self.batch in batches else None

        self.run.model.get_submodule(name).register_forward_hook(hook)
