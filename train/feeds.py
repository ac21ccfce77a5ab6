"""The data of a run as one rank reads it: the training split and, if that is wanted, the validation split."""

from __future__ import annotations

from typing import Any

from fuselm.train.config import TrainConfig
from fuselm.train.corpus import prepare_bundled
from fuselm.train.data_stream import DataStream, TokenDataset
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.evaluation import Feed
from fuselm.train.packing import PackedStream, PrefetchingFeed
from fuselm.train.validation import Validation

DATA_DIGEST = "digest of the training data"


def open_feeds(config: TrainConfig, world: World) -> tuple[TokenDataset, PrefetchingFeed, Validation | None]:
    """The training split, how this rank reads it, and the validation; all ranks together.

    The training feed makes its batches ahead, in a thread; close it in the end.

    Raises:
        AgreedError: the data cannot be read or does not fit the model.
    """
    path = config.data.path
    if path is None:
        path = config.runs / "data" / f"plays_{config.data.vocab_size}"
        bundled = path
        # Rank 0 first; then one process a machine, which finds the folder there or makes it where none is shared.
        for turn in (world.rank == 0, world.local_rank == 0):
            world.together(lambda turn=turn: prepare_bundled(bundled, config.data.vocab_size) if turn else None)

    def feed(dataset: TokenDataset, training: bool) -> Feed:
        kind = PackedStream if training and config.data.packing == "best_fit" else DataStream
        stream = kind(
            dataset,
            seq_len=config.training.seq_len,
            global_batch_size=config.training.global_batch_size,
            # Validation takes its batches from all over the split, the same ones in every run.
            seed=config.training.seed if training else 0,
        )
        return Feed(stream, world, config.training.micro_batch_size, config.data.document_mask)

    def open_both() -> tuple[TokenDataset, PrefetchingFeed, Validation | None]:
        training = TokenDataset.open(path, "train")
        validation = TokenDataset.open(path, "validation") if config.evaluation.batches else None
        if training.vocab_size > config.model.vocab_size:
            raise UserError(
                f"the data in {path} has a vocabulary of {training.vocab_size}, but model.vocab_size is "
                f"{config.model.vocab_size}: pass --model.vocab_size {training.vocab_size} or larger"
            )
        ahead = PrefetchingFeed(feed(training, True))
        if validation is None:
            return training, ahead, None
        measured = Validation(feed(validation, False), validation, config.evaluation, config.training.seq_len)
        return training, ahead, measured

    return world.together(open_both)


def data_position(config: TrainConfig, dataset: TokenDataset) -> dict[str, Any]:
    """What fixes the order of the data: with the step, it says which sequences come next."""
    training = config.training
    return {
        "training.global_batch_size": training.global_batch_size,
        "training.seq_len": training.seq_len,
        "training.seed": training.seed,
        "data.packing": config.data.packing,
        "tokenizer": dataset.tokenizer_hash,
        "tokens of the training data": dataset.num_tokens,
        DATA_DIGEST: dataset.sample_digest(),
    }
