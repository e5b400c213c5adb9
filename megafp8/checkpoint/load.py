"""Loading of a checkpoint into any parallel layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.utils import unwrap_model

from megafp8.checkpoint import (
    compatibility,
    gradient_residuals,
    local_scales,
    optimizer_exchange,
    state_dict,
    weight_ema,
)
from megafp8.checkpoint.metadata import (
    embedding_rows,
    extension_states,
    is_extra_state,
    load_common_state,
    load_errors,
    skip_history,
)
from megafp8.checkpoint.progress import Progress, TrainingState
from megafp8.checkpoint.serialization import SafeLoadStrategy, SafeReader, read_boxes
from megafp8.config import derived, settings
from megafp8.config.optimizers import has_flat_shards
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.mcore.process_groups import gather_weights
from megafp8.optimizer.data_parallel import runtime_of
from megafp8.optimizer.layer_wise import LayerWiseOptimizer
from megafp8.quantization.fp8_parameter import quantize_assigned_weights
from megafp8.resilience import fault_injection


@dataclass(frozen=True)
class LoadResult:
    """Result of a load.

    Attributes:
        progress: where the run continues.
        notes: what was not loaded or was reinitialized, as text.
    """

    progress: Progress
    notes: tuple[str, ...]


def load_checkpoint(
    path: Path, config: RunConfig, training_state: TrainingState, weights_only: bool = False
) -> LoadResult:
    """Restore the training state; all ranks call it.

    Args:
        weights_only: load only the weights and start at step 0 (`--finetune`, `--pretrained-checkpoint`).

    Raises:
        CheckpointError: the checkpoint is of another model, or lacks what is requested.
    """
    fault_injection.point("load.begin")
    # A background save may still read the tensors that the load overwrites.
    training_state.wait_for_copies()
    common = load_common_state(path)
    # Settings first: a mismatch is reported before anything is changed.
    saved = settings.from_json(common["config"])
    with_optimizer = not (weights_only or config.checkpoint.no_load_optim)
    compatibility.check_settings(path, saved, config, with_optimizer)
    before, now = (has_flat_shards(each.optimizer, each.parallel) for each in (saved, config))
    is_exchanged = with_optimizer and before != now
    same_layout = tuple(common["layout"]) == state_dict.parallel_layout()
    with_rng = not (weights_only or config.checkpoint.no_load_rng or saved.checkpoint.no_save_rng) and same_layout

    # The leaves' data are the parameters: tensors are read into them.
    model = state_dict.model_state(training_state.chunks)
    scale_note = ""
    if all(derived.is_stateful(each.precision) for each in (saved, config)):
        sizes = local_scales.group_sizes(config.precision)
        scale_note = local_scales.request(model, common.get(local_scales.KEY), sizes)
    num_rows = embedding_rows(path)
    # Before the load, while the state still has the parameters as data.
    known = state_dict.known_vocab_rows(model, num_rows)
    state = dict(model)
    if with_optimizer:
        state["optimizer"] = state_dict.optimizer_state(training_state, model, is_loading=True)
        if is_exchanged:
            optimizer_exchange.request_saved_masters(state["optimizer"], saved.precision, before)
    residuals = training_state.gradient_residuals
    saved_row_layout = common.get(gradient_residuals.LAYOUT_KEY)
    row_layout = gradient_residuals.row_layout(config.precision, residuals)
    residual_note = gradient_residuals.note_on_load(saved_row_layout, row_layout, same_layout) if with_optimizer else ""
    if with_optimizer and row_layout is not None and not residual_note:
        state[gradient_residuals.KEY] = gradient_residuals.sharded_residuals(residuals)
    is_mean_saved = weight_ema.KEY in common
    loads_mean = with_optimizer and is_mean_saved and training_state.weight_ema is not None
    if loads_mean:
        state |= weight_ema.sharded_means(training_state, model)
    if with_rng:
        state["random_state"] = state_dict.sharded_rng_state()
    # The load returns another dictionary; `load_converted` needs the boxes that were requested.
    requested = state.get("optimizer", {})
    state, key_notes = read_tensors(
        path, state, training_state.chunks, list(model), config.checkpoint.dist_ckpt_strictness
    )
    # Before the optimizer: it copies masters of new rows from the weights.
    state_dict.fill_new_vocab_rows(known, num_rows)
    if with_optimizer:
        with torch.no_grad():
            state_dict.load_optimizer_state(training_state, state["optimizer"], known, is_exchanged)
        with load_errors(path):
            state_dict.load_converted_state(training_state, requested, known, partial(read_boxes, SafeReader(path)))
        schedule_notes = restore_schedule(path, training_state, state["schedule"])
        gradient_residuals.load(residuals, state.get(gradient_residuals.KEY, {}))
    else:
        schedule_notes = ()
        # Copy the loaded weights to the master weights.
        training_state.optimizer.reload_model_params()
    quantize_assigned_weights(training_state.chunks)
    if with_optimizer:
        requantize_weights(training_state)
    if loads_mean:
        weight_ema.finish_load(training_state.weight_ema, state[weight_ema.KEY], known)
    elif training_state.weight_ema is not None:
        training_state.weight_ema.reset()
    same_device = not with_rng or state_dict.is_rng_state_of_this_device(state["random_state"])
    # Last, so that nothing after it draws from these states.
    if with_rng and same_device:
        state_dict.restore_rng_state(state["random_state"])
    consumers = "" if same_device else random_consumers(config.model, config.precision)
    notes = key_notes + schedule_notes + load_notes(weights_only, with_optimizer, with_rng, same_layout, consumers)
    ema_note = weight_ema.note_on_load(training_state.weight_ema, is_mean_saved, loads_mean)
    notes += tuple(note for note in (residual_note, scale_note, ema_note) if note)
    origin = common.get("origin")  # older checkpoints lack it, and the factor
    if weights_only:
        return LoadResult(Progress(origin=origin), notes)
    history, grad_factor = skip_history(common), common.get("grad_factor", 1.0)
    step, samples, extensions = common["step"], common["consumed_samples"], extension_states(common)
    return LoadResult(Progress(step, samples, history, grad_factor, origin, extensions), notes)


@torch.no_grad()
def requantize_weights(training_state: TrainingState) -> None:
    """Cast FP8 weights from their master weights again. No effect without FP8 weights.

    Call it after scales have changed. The checkpoint stores these weights in BF16, and scales computed
    from the BF16 values would differ from the saved run's by a rounding.
    """
    parameters = [parameter for chunk in training_state.chunks for parameter in chunk.parameters()]
    if not any(is_float8tensor(parameter) for parameter in parameters):
        return
    if isinstance(training_state.optimizer, LayerWiseOptimizer):
        training_state.optimizer.share()
        return
    for part in state_dict.chained_optimizers(training_state.optimizer):
        part._copy_main_params_to_model_params()
    gather_weights(training_state.chunks)


def load_weights(path: Path, chunks: list[Any]) -> None:
    """Restore only the weights, into chunks without an optimizer; all ranks call it.

    Raises:
        CheckpointError: the checkpoint is of another model, or cannot be read.
    """
    model = state_dict.model_state(chunks)
    read_tensors(path, dict(model), chunks, list(model))


def read_tensors(
    path: Path,
    state: dict[str, Any],
    chunks: list[Any],
    names: list[str],
    strictness: str = compatibility.DEFAULT_STRICTNESS,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a sharded state and load the chunks' parts of it; all ranks call it.

    Quantized layers keep extra state under keys that other layers lack. It is loaded where the checkpoint has it, and
    stays as initialized otherwise.

    Args:
        names: keys of `state` with the chunks' weights, in the chunks' order.
        strictness: of `--dist-ckpt-strictness`.

    Returns:
        The state, and notes on mismatched keys.

    Raises:
        CheckpointError: keys do not match, or the checkpoint cannot be read.
    """
    parts = {"model", *state}
    for leaf in nested_values(state):
        # Quantized weights are read into dequantized copies.
        if isinstance(leaf, ShardedTensorFactory) and type(leaf.data) in (torch.Tensor, torch.nn.Parameter):
            leaf.merge_fn = partial(whole_tensor, leaf, leaf.merge_fn)
    # megatron-core returns mismatched keys instead of raising; `check_keys` handles them.
    mcore_strictness = "return_all" if strictness.endswith("_all") else "return_unexpected"
    with load_errors(path):
        state, missing, unexpected = dist_checkpointing.load(
            state, str(path), SafeLoadStrategy(), validate_access_integrity=False, strict=mcore_strictness
        )
    absent = {key for key in unexpected if compatibility.checkpoint_part(key) != "model"}
    for name, chunk in zip(names, chunks, strict=True):
        module = unwrap_model(chunk)
        loaded = runtime_of(chunk).model_rows(chunk, state[name])
        # `check_keys` reports the missing keys of all ranks together.
        absent |= set(module.load_state_dict(loaded, strict=False).missing_keys)
    not_loaded = {key for key in missing if compatibility.checkpoint_part(key) in parts and not is_extra_state(key)}
    # Ranks have different layers, hence different keys; all ranks must raise the same error.
    absent_by_rank = call_on_all_ranks(lambda: {key for key in absent if not is_extra_state(key)})
    return state, compatibility.check_keys(path, strictness, set().union(*absent_by_rank), not_loaded)


def whole_tensor(factory: ShardedTensorFactory, merge: Callable[[Any], Any], pieces: Any) -> Any:
    """Return the tensor into whose pieces, such as gate and up half of a gated MLP, was read; a copy only if needed.

    Args:
        factory: whose data is the tensor.
        merge: joins copies of the pieces.
    """
    # Address 0: a tensor without elements.
    address = factory.data.untyped_storage().data_ptr()
    is_in_place = address and {piece.untyped_storage().data_ptr() for piece in nested_values(pieces)} == {address}
    return factory.data if is_in_place else merge(pieces)


def restore_schedule(path: Path, training_state: TrainingState, saved: dict[str, Any]) -> tuple[str, ...]:
    """Restore the learning-rate schedule. A different one is refused unless flags say which of the two to use.

    Returns:
        A note if the schedule is the same up to the checkpoint, and has another end.

    Raises:
        CheckpointError: the checkpoint has another schedule.
    """
    schedule = training_state.schedule
    now = schedule.state_dict()
    saved = now | saved  # older checkpoints lack the fields of --lr-warmup-init and of WSD
    changes: dict[str, str] = {}
    if not (schedule.override_opt_param_scheduler or schedule.use_checkpoint_opt_param_scheduler):
        changes = compatibility.check_schedule(path, saved, now)
        saved |= {name: now[name] for name in changes}
    planned = schedule.lr_decay_steps
    schedule.num_steps = 0  # megatron-core adds the saved steps, and after a rollback this is not 0
    schedule.load_state_dict(saved)
    schedule.step(increment=0)  # megatron-core sets the groups' weight decay before it loads the saved one
    if schedule.lr_decay_steps < planned and schedule.lr_decay_style != "constant" and dist.get_rank() == 0:
        print(
            f"notice: the schedule of {path} (--use-checkpoint-opt_param-scheduler) ends after "
            f"{compatibility.format_schedule_value(schedule.lr_decay_steps)} samples, this run's schedule after "
            f"{compatibility.format_schedule_value(planned)}: after the end of the checkpoint's schedule the learning "
            f"rate is {schedule.min_lr}; --override-opt_param-scheduler uses this run's schedule",
            flush=True,
        )
    if not changes:
        return ()
    return (f"the end of the schedule has moved, no rate before it: {'; '.join(changes.values())}",)


def random_consumers(model: ModelConfig, precision: PrecisionConfig) -> str:
    """Return what uses random numbers in the steps of a run, as text; empty if nothing does."""
    has_noise = any(recipe.is_stochastic(vars(precision)) for recipe in derived.used_recipes(precision))
    return " and ".join(["dropout"] * derived.has_dropout(model) + ["stochastic rounding"] * has_noise)


def load_notes(
    weights_only: bool, with_optimizer: bool, with_rng: bool, same_layout: bool, consumers: str
) -> tuple[str, ...]:
    """Return notes on a load for the user.

    Args:
        consumers: what uses RNG state that another device type cannot restore; empty if nothing does.
    """
    if weights_only:
        return ("weights only; optimizer, schedule and data restart",)
    notes = []
    if not with_optimizer:
        notes.append("optimizer state and schedule restart")
    if not same_layout:
        notes.append(
            "different layout: random-number state is initialized again, so dropout differs from the previous run"
        )
    elif not with_rng:
        notes.append("random-number state restarts")
    elif consumers:
        notes.append(
            "different kind of device: random-number state is initialized again, so the random numbers for "
            f"{consumers} differ from the previous run"
        )
    return tuple(notes)
