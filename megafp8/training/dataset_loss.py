"""The loss of a checkpoint on a data set: every token has the same weight, whatever the batches.

The data are the run's own validation samples, token shards, or text. One process computes it on one device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.checkpoint.metadata import read_config
from megafp8.config import iterations, topology
from megafp8.config.schema import RunConfig
from megafp8.data.loader import stack_samples
from megafp8.errors import ConfigError, DataError, NumericsError
from megafp8.models.emulated_layers import cached_weight_codes
from megafp8.models.loss import document_ends, token_loss
from megafp8.training.language_model import LanguageModel

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class DatasetLoss:
    """The result of an evaluation.

    Attributes:
        loss: mean over the tokens, in nats.
        num_tokens: predicted tokens with a weight in the loss.
        seconds: of the forward passes and of reading the data.
    """

    loss: float
    perplexity: float
    num_tokens: int
    num_sequences: int
    seconds: float


@torch.no_grad()
def dataset_loss(
    model: LanguageModel, batches: Iterable[Batch], on_tokens: Callable[[int], Any] = lambda count: None
) -> DatasetLoss:
    """The mean loss over the tokens of all batches.

    Args:
        batches: in the format of the data loader.
        on_tokens: called after each batch with its number of tokens.

    Raises:
        DataError: there is no token.
        NumericsError: the loss is not finite.
    """
    started, num_sequences = time.monotonic(), 0
    total = torch.zeros(2, dtype=torch.float64, device=model.device)
    with cached_weight_codes([model.module]):
        for batch in batches:
            starts = batch.get("document_starts")
            documents = None if starts is None else document_ends(starts).to(model.device)
            here = {name: tensor.to(model.device) for name, tensor in batch.items()}
            losses = model.module(here["tokens"], here["position_ids"], documents, labels=here["labels"])
            total += token_loss(here["loss_mask"], losses)[2]["loss"]
            num_sequences += len(losses)
            on_tokens(int(batch["loss_mask"].sum()))
    loss_sum, num_tokens = total.tolist()
    if not num_tokens:
        raise DataError("the data has no token to predict: at least two tokens are needed")
    if not math.isfinite(loss_sum):
        raise NumericsError(f"{model.path}: the loss is not finite; --precision high evaluates without quantization")
    loss = loss_sum / num_tokens
    return DatasetLoss(
        loss=loss, perplexity=math.exp(min(loss, 700.0)), num_tokens=round(num_tokens), num_sequences=num_sequences,
        seconds=time.monotonic() - started,
    )  # fmt: skip


def validation_batches(
    model: LanguageModel, micro_batch_size: int, max_tokens: Optional[int] = None
) -> tuple[int, Iterator[Batch]]:
    """The samples of the run's own validations: their number of sequences, and their batches.

    Args:
        max_tokens: read only as many sequences as have this many tokens; None: all of a validation.

    Raises:
        ConfigError: the run has no validation data, or the size of its validations is unknown.
        DataError: the shards are missing.
    """
    from megafp8.data.datasets import build_datasets

    saved = read_config(model.path)
    data = replace(saved.data, seq_length=model.context_tokens)
    num_samples = validation_samples(saved) if max_tokens is None else -(-max_tokens // model.context_tokens)
    _, dataset, _ = build_datasets(
        data, model.tokenizer, (0, num_samples, 0), seed=saved.training.seed, save=saved.checkpoint.save
    )
    if dataset is None:
        raise ConfigError("the run has no validation data: give --data-path or --input")

    def batches() -> Iterator[Batch]:
        for first in range(0, num_samples, micro_batch_size):
            samples = [dataset[index] for index in range(first, min(num_samples, first + micro_batch_size))]
            yield stack_samples(samples)

    return num_samples, batches()


def validation_samples(saved: RunConfig) -> int:
    """Sequences of one validation of a run.

    Raises:
        ConfigError: its batch size depends on its number of ranks, which is unknown here.
    """
    training = saved.training
    depends_on_ranks = training.decrease_batch_size_if_needed or not (
        training.global_batch_size or training.step_batch_size_schedule
    )
    if training.eval_global_batch_size is None and depends_on_ranks:
        raise ConfigError(
            "the size of the run's validations depends on its number of ranks, which is unknown here: give --tokens"
        )
    return training.eval_iters * iterations.eval_batch_size(saved, topology.model_parallel_size(saved))
