"""Reading a checkpoint, into any layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.utils import unwrap_model

from megafp8.checkpoint.compatibility import (
    DEFAULT,
    check_keys,
    check_same_history,
    check_same_model,
    check_same_optimizer,
    check_same_schedule,
    is_of_layers,
    part_of,
    returned_by_core,
    short,
)
from megafp8.checkpoint.metadata import common_state, embedding_rows, history_in, readable
from megafp8.checkpoint.progress import Progress, Trainee
from megafp8.checkpoint.serialization import SafeStrategy
from megafp8.checkpoint.state_dict import (
    fill_new_rows,
    is_of_this_kind_of_device,
    layout,
    load_optimizer_state,
    model_state,
    optimizer_state,
    parts_of,
    random_state,
    restore_random_state,
    rows_known,
)
from megafp8.config import derived, settings
from megafp8.config.schema import RunConfig
from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.mcore.process_groups import gather_weights
from megafp8.quantization.fp8_parameter import settle
from megafp8.resilience import fault_injection


@dataclass(frozen=True)
class Loaded:
    """What came back.

    Attributes:
        progress: where the run goes on.
        notes: what was left out or derived anew, in words.
    """

    progress: Progress
    notes: tuple[str, ...]


def load_checkpoint(path: Path, config: RunConfig, trainee: Trainee, weights_only: bool = False) -> Loaded:
    """Restore the trainee; all ranks call it.

    Args:
        weights_only: take the weights and start at step 0 (`--finetune`, `--pretrained-checkpoint`).

    Raises:
        CheckpointError: the checkpoint is of another model, or lacks what is asked of it.
    """
    fault_injection.point("load.begin")
    trainee.wait_for_copies()
    common = common_state(path)
    saved = settings.from_json(common["config"])
    check_same_model(path, saved, config)
    check_same_history(path, saved, config)
    with_optimizer = not (weights_only or config.checkpoint.no_load_optim)
    check_same_optimizer(path, saved, config, with_optimizer)
    same_layout = tuple(common["layout"]) == layout()
    with_random = not (weights_only or config.checkpoint.no_load_rng or saved.checkpoint.no_save_rng) and same_layout

    model = model_state(trainee.chunks)
    num_rows = embedding_rows(path)
    known = rows_known(model, num_rows)
    state = dict(model)
    if with_optimizer:
        state["optimizer"] = optimizer_state(trainee, model, is_loading=True)
    if with_random:
        state["random_state"] = random_state()
    state, found = read_tensors(path, state, trainee.chunks, list(model), config.checkpoint.dist_ckpt_strictness)
    fill_new_rows(known, num_rows)
    if with_optimizer:
        with torch.no_grad():
            load_optimizer_state(trainee, state["optimizer"], known)
        restore_schedule(path, trainee, state["schedule"])
    else:
        # Master weights are copies of the weights: take the loaded ones.
        trainee.optimizer.reload_model_params()
    settle(trainee.chunks)
    if with_optimizer:
        requantize_weights(trainee)
    same_device = not with_random or is_of_this_kind_of_device(state["random_state"])
    if with_random and same_device:
        restore_random_state(state["random_state"])
    drawn_anew = "" if same_device else what_draws(config)
    notes = found + notes_on(weights_only, with_optimizer, with_random, same_layout, drawn_anew)
    if weights_only:
        return Loaded(Progress(), notes)
    return Loaded(Progress(common["step"], common["consumed_samples"], history_in(common)), notes)


@torch.no_grad()
def requantize_weights(trainee: Trainee) -> None:
    """Cast weights that are kept in FP8 from their master weights again; nothing in a run without such weights.

    Whoever sets scales calls it. A checkpoint also has the weights in BF16, and scales that are taken from those would
    differ from the saved run's by a rounding.
    """
    parameters = [parameter for chunk in trainee.chunks for parameter in chunk.parameters()]
    if not any(is_float8tensor(parameter) for parameter in parameters):
        return
    for part in parts_of(trainee.optimizer):
        part._copy_main_params_to_model_params()
    gather_weights(trainee.chunks)


def load_weights(path: Path, chunks: list[Any]) -> None:
    """Restore the weights alone, into chunks that need no optimizer; all ranks call it.

    Raises:
        CheckpointError: the checkpoint is of another model, or cannot be read.
    """
    model = model_state(chunks)
    read_tensors(path, dict(model), chunks, list(model))


def read_tensors(
    path: Path, state: dict[str, Any], chunks: list[Any], names: list[str], strictness: str = DEFAULT
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a sharded state, and give the chunks their parts of it (`names`, in their order); all ranks call it.

    Quantizing layers keep state besides weights, under keys that other layers do not have. It is taken where the
    checkpoint has it, and left as built where not.

    Args:
        strictness: of `--dist-ckpt-strictness`.

    Returns:
        The state, and a note on keys that do not match.

    Raises:
        CheckpointError: keys do not match, or the checkpoint cannot be read.
    """
    parts = {"model", *state}
    with readable(path):
        state, missing, unexpected = dist_checkpointing.load(
            state, str(path), SafeStrategy(), strict=returned_by_core(strictness)
        )
    absent = {key for key in unexpected if part_of(key) != "model"}
    for name, chunk in zip(names, chunks, strict=True):
        absent |= set(unwrap_model(chunk).load_state_dict(state[name], strict=False).missing_keys)
    left = {key for key in missing if part_of(key) in parts and not is_of_layers(key)}
    of_ranks = call_on_all_ranks(lambda: {key for key in absent if not is_of_layers(key)})
    return state, check_keys(path, strictness, set().union(*of_ranks), left)


def restore_schedule(path: Path, trainee: Trainee, saved: dict[str, Any]) -> None:
    """Continue the learning-rate schedule; one that differs is refused, unless flags say which of the two holds.

    Raises:
        CheckpointError: the checkpoint's is another one.
    """
    schedule = trainee.schedule
    now = schedule.state_dict()
    saved = now | saved  # older checkpoints lack --lr-warmup-init and what WSD has of its own
    if not (schedule.override_opt_param_scheduler or schedule.use_checkpoint_opt_param_scheduler):
        check_same_schedule(path, saved, now)
    planned = schedule.lr_decay_steps
    schedule.num_steps = 0  # megatron-core adds what it loads, and a run that goes back has taken steps
    schedule.load_state_dict(saved)
    schedule.step(increment=0)  # megatron-core gives groups their weight decay before it takes the saved one
    if schedule.lr_decay_steps < planned and schedule.lr_decay_style != "constant" and dist.get_rank() == 0:
        print(
            f"notice: the schedule of {path}, taken by --use-checkpoint-opt_param-scheduler, ends after "
            f"{short(schedule.lr_decay_steps)} samples and this run's own after {short(planned)}: from there on the "
            f"learning rate stays {schedule.min_lr}; --override-opt_param-scheduler takes this run's",
            flush=True,
        )


def what_draws(config: RunConfig) -> str:
    """What draws random numbers in the steps of a run, in words; empty where nothing does."""
    has_dropout = config.model.attention_dropout > 0 or config.model.hidden_dropout > 0
    has_noise = any(recipe.is_stochastic(vars(config.precision)) for recipe in derived.used_recipes(config.precision))
    return " and ".join(["dropout"] * has_dropout + ["stochastic rounding"] * has_noise)


def notes_on(
    weights_only: bool, with_optimizer: bool, with_random: bool, same_layout: bool, drawn_anew: str
) -> tuple[str, ...]:
    """What a person should know about a load.

    Args:
        drawn_anew: what draws from generators that are not the saved run's, for they are another device's.
    """
    if weights_only:
        return ("weights only: optimizer, schedule and data start anew",)
    notes = []
    if not with_optimizer:
        notes.append("optimizer state and schedule start anew")
    if not same_layout:
        notes.append("another layout: random state is derived anew, so dropout differs from the run before")
    elif not with_random:
        notes.append("random state starts anew")
    elif drawn_anew:
        notes.append(
            "another kind of device: random state is derived anew, so other numbers are drawn for "
            f"{drawn_anew} than in the run before"
        )
    return tuple(notes)
