"""Scores of questions (`data/task_files.py`): how likely a model finds each choice, and how often the right one.

The passes are those of a validation, with a loss mask that selects the tokens of a choice: of a checkpoint on one
device (`megafp8 evaluate --tasks`), or of a run in any layout (`--eval-tasks`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.config.stages import microbatch_group_size
from megafp8.data.task_files import Row, Task, groups_of_rows, row_batch
from megafp8.errors import NumericsError
from megafp8.mcore.multi_token import main_output_only
from megafp8.metrics.records import TaskScores
from megafp8.models.loss import build_forward_step, row_loss
from megafp8.resilience.watchdog import EVALUATION
from megafp8.training.language_model import LanguageModel
from megafp8.training.run import Run
from megafp8.training.signals import is_stop_requested
from megafp8.training.step import forward_backward


def task_scores(task: Task, losses: np.ndarray) -> TaskScores:
    """The scores of a task.

    Args:
        losses: of each row, in nats: minus the log-likelihood of the choice.
    """
    num_right = num_right_normalized = num_choices = num_bytes = 0
    nats, first = 0.0, 0
    for question in task.questions:
        here = losses[first : first + len(question.choices)]
        first += len(question.choices)
        sizes = np.array([len(choice.encode()) for choice in question.choices])
        nats += float(here[question.answer])
        num_bytes += int(sizes[question.answer])
        if len(question.choices) > 1:
            num_choices += 1
            num_right += int(here.argmin()) == question.answer
            num_right_normalized += int((here / sizes).argmin()) == question.answer
    return TaskScores(
        num_questions=len(task.questions),
        bits_per_byte=nats / num_bytes / math.log(2),
        accuracy=num_right / num_choices if num_choices else None,
        normalized_accuracy=num_right_normalized / num_choices if num_choices else None,
        num_truncated=task.num_truncated,
    )


def split_by_task(tasks: Sequence[Task], losses: np.ndarray) -> dict[str, TaskScores]:
    """The scores by task, from the losses of all rows."""
    ends = itertools.accumulate(len(task.rows) for task in tasks)
    return {
        task.name: task_scores(task, losses[end - len(task.rows) : end]) for task, end in zip(tasks, ends, strict=True)
    }


# ---- a checkpoint on one device ------------------------------------------------------------------------------------


def checkpoint_scores(
    model: LanguageModel, tasks: Sequence[Task], batch_size: int, on_rows: Callable[[int], Any]
) -> dict[str, Any]:
    """The scores of a checkpoint as plain values: those of each task, and the seconds of the passes.

    Raises:
        NumericsError: a loss is not finite.
    """
    started = time.monotonic()
    losses = checkpoint_losses(model, [row for task in tasks for row in task.rows], batch_size, on_rows)
    if not np.isfinite(losses).all():
        raise NumericsError(f"{model.path}: a loss is not finite; --precision high evaluates without quantization")
    scores = {name: dataclasses.asdict(each) for name, each in split_by_task(tasks, losses).items()}
    return {"tasks": scores, "seconds": time.monotonic() - started}


@torch.no_grad()
def checkpoint_losses(
    model: LanguageModel,
    rows: Sequence[Row],
    batch_size: int,
    on_rows: Callable[[int], Any] = lambda count: None,
) -> np.ndarray:
    """The loss of each row, FP64 [rows].

    Args:
        batch_size: rows in a forward pass.
        on_rows: called after each pass with its number of rows.
    """
    losses = np.zeros(len(rows))
    with model.cached_weights():
        for indices, batch in batches_of_rows(model, rows, batch_size):
            output = model.module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            losses[indices] = row_loss(batch["loss_mask"], output)[2]["row_losses"].double().cpu()
            on_rows(len(indices))
    return losses


@torch.no_grad()
def log_likelihoods(model: LanguageModel, rows: Sequence[Row], batch_size: int) -> list[tuple[float, bool]]:
    """The log-likelihood of each row in nats, and whether each of its tokens is the most likely one.

    Padding of the vocabulary has no share of the probability here, as in an exported model. In the loss of training it
    has, which a trained model does not notice.
    """
    found = [(0.0, True)] * len(rows)
    with model.cached_weights():
        for indices, batch in batches_of_rows(model, rows, batch_size):
            is_scored = batch["loss_mask"] > 0
            logits = model.module(batch["tokens"], batch["position_ids"], None)[is_scored]
            logits, labels = logits[:, : model.tokenizer.vocab_size].float(), batch["labels"][is_scored]
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            row = is_scored.nonzero()[:, 0]
            sums = torch.zeros(2, len(indices), dtype=torch.float64, device=model.device)
            sums.index_add_(1, row, torch.stack((losses, logits.argmax(-1) != labels)).double())
            for index, loss, num_others in zip(indices, *sums.tolist(), strict=True):
                found[index] = -loss, num_others == 0
    return found


def batches_of_rows(
    model: LanguageModel, rows: Sequence[Row], batch_size: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Batches of rows on the model's device, with the indices of their rows."""
    for length, indices in groups_of_rows(rows, batch_size, model.length_multiple, model.context_tokens):
        batch = row_batch([rows[index] for index in indices], length, model.tokenizer.vocab_size)
        yield indices, {name: tensor.to(model.device) for name, tensor in batch.items()}


# ---- a run in training ---------------------------------------------------------------------------------------------


def score_tasks(run: Run, step: int) -> Optional[dict[str, TaskScores]]:
    """The scores of a run's tasks, the same on all ranks, which all call it within `evaluation_mode`.

    Returns:
        None if a stop signal interrupted it.
    """
    rows = [row for task in run.tasks for row in task.rows]
    losses = torch.zeros(len(rows), dtype=torch.float64, device=run.platform.device)
    with main_output_only(unwrap_model(run.training_state.chunks)):
        for length, indices in groups_of_rows(rows, run.eval_batch_size, run.length_multiple, run.seq_length):
            if is_stop_requested(run):
                break
            run.watchdog.enter(EVALUATION, step)
            add_losses(run, rows, indices, length, losses)
    if run.watchdog.stop_agreed:
        return None
    dist.all_reduce(losses)  # each row is computed by one replica, of whose context-parallel ranks each has a part
    return split_by_task(run.tasks, losses.cpu().numpy())


def add_losses(run: Run, rows: Sequence[Row], indices: Sequence[int], length: int, losses: Tensor) -> None:
    """Add this rank's part of the losses of some rows, padded to a length, to those of all rows."""
    size, position = run.micro_batch_size, run.rank_position
    num_microbatches = -(-len(indices) // (size * position.data_size))
    if len(run.training_state.chunks) > 1:
        num_microbatches += -num_microbatches % microbatch_group_size(run.config.parallel)
    # Microbatches are complete: the places that are left get rows without a token to score.
    filler = Row(rows[indices[0]].ids, 0)
    starts = [size * (number * position.data_size + position.data_rank) for number in range(num_microbatches)]

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in starts:
            mine = [rows[index] for index in indices[start : start + size]]
            yield row_batch(mine + [filler] * (size - len(mine)), length, run.vocab_size)

    forward_step = build_forward_step(
        run.platform.device, run.config.parallel.context_parallel_size, run.documents_room, sums_rows=True
    )
    reports = forward_backward(
        run, batches() if position.needs_batches else None, num_microbatches, forward_only=True,
        forward_step=forward_step, seq_length=length,
    )  # fmt: skip
    if position.reports_loss:
        for start, report in zip(starts, reports, strict=True):
            mine = list(indices[start : start + size])
            losses[mine] += report["row_losses"][: len(mine)]
