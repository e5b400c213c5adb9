"""Reading a checkpoint, into any layout."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

from megafp8 import faults
from megafp8.checkpoint.safe_load import SafeStrategy, check_before_reading
from megafp8.checkpoint.skipped import History
from megafp8.checkpoint.state import (
    Progress,
    Trainee,
    is_of_this_kind_of_device,
    layout,
    load_optimizer_state,
    model_state,
    optimizer_state,
    parts_of,
    random_state,
    restore_random_state,
)
from megafp8.checkpoint.together import raise_peer_lost, reason
from megafp8.checkpoint.vocabulary import EMBEDDING, fill_new_rows, rows_known
from megafp8.config import derived, precision_map, serialize
from megafp8.config.schema import RunConfig
from megafp8.data.sample_chain import SampleChain, SampleMark
from megafp8.errors import CheckpointError, PeerLost
from megafp8.fp8.parameter import settle
from megafp8.parallel.gather import gather_weights

# Settings of the model section that change no parameter, and may differ between a checkpoint and its next run.
FREE_MODEL_SETTINGS = ("model.model_preset", "model.attention_dropout", "model.hidden_dropout", "model.init_method_std")

# Parts of the keys of what only some layers keep besides weights: Transformer Engine's, and the emulated ones'.
LAYER_STATE = ("_extra_state", ".quantizer_state.")
# What the schedule of a run is made of, as megatron-core names it, and the flags that say it. It counts samples.
SCHEDULE = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "samples of the warm-up (--lr-warmup-iters, -samples or -fraction)",
    "lr_decay_steps": "samples of the schedule (--lr-decay-iters or -samples, else --train-iters or -samples)",
    "lr_decay_style": "--lr-decay-style",
    "init_lr": "--lr-warmup-init",
    "wsd_decay_steps": "samples of WSD's final decay (--lr-wsd-decay-iters or -samples)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "weight decay at the start (--weight-decay or --start-weight-decay)",
    "end_wd": "weight decay at the end (--weight-decay or --end-weight-decay)",
    "wd_incr_steps": "samples of the run (--train-iters or --train-samples)",
    "wd_incr_style": "--weight-decay-incr-style",
}
# What megatron-core and torch raise on a file that is missing, cut off or of another model.
UNREADABLE = (
    CheckpointingException, CheckpointException, OSError, RuntimeError, AttributeError, EOFError, KeyError,
    pickle.UnpicklingError, TypeError, ValueError, IndexError, ImportError, zipfile.BadZipFile, RecursionError,
    MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """What came back.

    Attributes:
        progress: where the run goes on.
        notes: what was left out or derived anew, in words.
    """

    progress: Progress
    notes: tuple[str, ...]


def read_config(path: Path) -> RunConfig:
    """The configuration that a checkpoint was made with, without reading its tensors.

    Raises:
        CheckpointError: not a checkpoint of this project.
    """
    return serialize.from_json(common_state(path)["config"])


def common_state(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint."""
    with readable(path):
        state = dist_checkpointing.load_common_state_dict(str(path))
    if "config" not in state:
        raise CheckpointError(f"{path} is a megatron-core checkpoint without megafp8's configuration")
    return state


def history_in(common: dict[str, Any]) -> History:
    """What a checkpoint's plain values tell of bad numbers; nothing in one that is older than that."""
    return History.from_plain(common["history"]) if "history" in common else History()


def load_checkpoint(path: Path, config: RunConfig, trainee: Trainee, weights_only: bool = False) -> Loaded:
    """Restore the trainee; all ranks call it.

    Args:
        weights_only: take the weights and start at step 0 (`--finetune`, `--pretrained-checkpoint`).

    Raises:
        CheckpointError: the checkpoint is of another model, or lacks what is asked of it.
    """
    faults.point("load.begin")
    trainee.wait_for_copies()
    common = common_state(path)
    saved = serialize.from_json(common["config"])
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
    state = read_tensors(path, state, trainee.chunks, list(model))
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
    notes = notes_on(weights_only, with_optimizer, with_random, same_layout, drawn_anew)
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


def read_tensors(path: Path, state: dict[str, Any], chunks: list[Any], names: list[str]) -> dict[str, Any]:
    """Read a sharded state, and give the chunks their parts of it (`names`, in their order).

    Quantizing layers keep state besides weights, under keys that other layers do not have. It is taken where the
    checkpoint has it, and left as built where not.

    Raises:
        CheckpointError: a tensor is absent, or the checkpoint cannot be read.
    """
    with readable(path):
        state, _, absent = dist_checkpointing.load(state, str(path), SafeStrategy(), strict="return_unexpected")
    for name, chunk in zip(names, chunks, strict=True):
        absent |= set(unwrap_model(chunk).load_state_dict(state[name], strict=False).missing_keys)
    absent = sorted(key for key in absent if not any(part in key for part in LAYER_STATE))
    if absent:
        raise CheckpointError(f"{path} is of another model: it lacks {', '.join(absent)}")
    return state


def embedding_rows(path: Path) -> int:
    """Rows of the embedding in a checkpoint: the padded vocabulary of the run that made it.

    megatron-core loads an embedding of another size without a word, so whoever can be wrong about it should compare.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with readable(path):
        return dist_checkpointing.load_tensors_metadata(str(path), SafeStrategy())[EMBEDDING].global_shape[0]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within, what a missing, damaged or other checkpoint raises becomes a CheckpointError, and none runs code."""
    try:
        check_before_reading(path)
        yield
    except (CheckpointError, PeerLost):
        raise
    except UNREADABLE as error:
        raise_peer_lost(error)
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason(error)}") from error


def restore_schedule(path: Path, trainee: Trainee, saved: dict[str, Any]) -> None:
    """Continue the learning-rate schedule; one that differs is refused, unless flags say which of the two holds.

    Raises:
        CheckpointError: the checkpoint's is another one.
    """
    schedule = trainee.schedule
    now = schedule.state_dict()
    saved = now | saved  # older checkpoints lack --lr-warmup-init and what WSD has of its own
    if not (schedule.override_opt_param_scheduler or schedule.use_checkpoint_opt_param_scheduler):
        different = [name for name in SCHEDULE if saved[name] != now[name]]
        if different:
            lines = "\n".join(f"  {SCHEDULE[name]}: {short(saved[name])} -> {short(now[name])}" for name in different)
            raise CheckpointError(
                f"{path} has another learning-rate schedule (checkpoint -> this run):\n{lines}\nmend: "
                "give the checkpoint's, --override-opt_param-scheduler for this run's, or "
                "--use-checkpoint-opt_param-scheduler for the saved one"
            )
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


def short(value: Optional[float | str]) -> str:
    """A value of the schedule for people: numbers of samples may be fractions, and not exact."""
    return f"{value:.10g}" if isinstance(value, (int, float)) else str(value or "none")


def check_same_model(path: Path, saved: RunConfig, config: RunConfig) -> None:
    """Refuse a checkpoint of another model, with the differences.

    Where one of the two takes its vocabulary from the tokenizer, `check_same_vocabulary` compares them.
    """
    from_tokenizer = None in (saved.model.vocab_size, config.model.vocab_size)
    free = (*FREE_MODEL_SETTINGS, "model.vocab_size") if from_tokenizer else FREE_MODEL_SETTINGS
    lines = [line for line in serialize.diff(saved, config) if line.startswith("model.")]
    lines = [line for line in lines if not line.startswith(free)]
    if lines:
        raise CheckpointError(
            f"{path} is of another model (checkpoint -> this run):\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nmend: give the checkpoint's values, or start from another checkpoint"
        )


def check_same_history(path: Path, saved: RunConfig, config: RunConfig) -> None:
    """Refuse amax histories of another length; other recipes than delayed scaling have none."""
    before, now = saved.precision, config.precision
    has_both = all(each.fp8_format is not None and each.fp8_recipe == "delayed" for each in (before, now))
    if has_both and before.fp8_amax_history_len != now.fp8_amax_history_len:
        raise CheckpointError(
            f"{path} has amax histories of {before.fp8_amax_history_len} entries, this run has "
            f"{now.fp8_amax_history_len}; give --fp8-amax-history-len {before.fp8_amax_history_len}"
        )


def check_same_vocabulary(path: Path, config: RunConfig, rows: int) -> None:
    """Refuse a checkpoint whose embedding cannot be this run's with other padding.

    megatron-core would load what fits and say nothing.

    Args:
        rows: of this run's embedding, padded.
    """
    saved_rows, saved = embedding_rows(path), read_config(path)
    least = max(rows - derived.vocab_multiple(config), saved_rows - derived.vocab_multiple(saved))
    if least >= min(rows, saved_rows):
        raise CheckpointError(
            f"{path} has an embedding of {saved_rows} rows and this run one of {rows}: another vocabulary; give the "
            "tokenizer that the checkpoint was trained with"
        )


def check_same_samples(path: Path, chain: SampleChain, is_overridden: bool) -> tuple[str, ...]:
    """Refuse to go on in another order of samples: some would be repeated and others left out.

    Args:
        chain: of this run's training samples.
        is_overridden: accept another order (`--override-sample-order`).

    Returns:
        What a person should know, in words.

    Raises:
        CheckpointError: this run's first samples are not those that the checkpoint was trained on.
    """
    saved = common_state(path).get("samples")
    if saved is None:
        return ("it does not say which samples it was trained on: that this run goes on after them is not checked",)
    before = SampleMark.from_plain(saved)
    if before.num_samples > len(chain):
        return ()  # trained further than this run will go: it reads none
    now = chain.mark(before.num_samples)
    if before.sha256 == now.sha256:
        return ()
    differences = before.differences(now) or [
        "the order itself, which another version of megafp8, megatron-core or numpy makes otherwise"
    ]
    if is_overridden:
        return (f"sample {before.num_samples} of another order comes next ({'; '.join(differences)})",)
    raise CheckpointError(
        f"{path} was trained on {before.num_samples} samples that are not the first of this run (checkpoint -> this "
        "run):\n" + "\n".join(f"  {line}" for line in differences) + "\nSome samples would be repeated and others "
        "left out. Give what the checkpoint was trained with, or --override-sample-order to go on in the new order"
    )


def check_same_optimizer(path: Path, saved: RunConfig, config: RunConfig, with_optimizer: bool) -> None:
    """Refuse optimizer state that megatron-core cannot carry over."""
    if not with_optimizer:
        return
    if saved.checkpoint.no_save_optim:
        raise CheckpointError(f"{path} was saved with --no-save-optim; give --no-load-optim or --finetune")
    before, now = saved.parallel.use_distributed_optimizer, config.parallel.use_distributed_optimizer
    if before != now:
        raise CheckpointError(
            f"{path} was saved {'with' if before else 'without'} --use-distributed-optimizer, this run is "
            f"{'with' if now else 'without'} it, and the two keep their state differently; use the same, or "
            "--no-load-optim"
        )
    names = saved.optimizer.optimizer, config.optimizer.optimizer
    if names[0] != names[1]:
        raise CheckpointError(
            f"{path} has the state of --optimizer {names[0]}, this run has {names[1]}; use the same, or --no-load-optim"
        )
    rates = saved.optimizer.decoupled_lr, config.optimizer.decoupled_lr
    if None in rates and rates[0] != rates[1]:
        raise CheckpointError(
            f"{path} was saved {'without' if rates[0] is None else 'with'} --decoupled-lr, this run is "
            f"{'without' if rates[1] is None else 'with'} it, and their groups of parameters differ; use the same, or "
            "--no-load-optim"
        )
    dtypes = derived.params_dtype(saved.precision), derived.params_dtype(config.precision)
    if not now and (dtypes[0] == "fp32") != (dtypes[1] == "fp32"):
        raise CheckpointError(
            f"{path} has {dtypes[0]} weights and this run {dtypes[1]}: without --use-distributed-optimizer their "
            "optimizer state differs; use the same, or --no-load-optim"
        )


def what_draws(config: RunConfig) -> str:
    """What draws random numbers in the steps of a run, in words; empty where nothing does."""
    has_dropout = config.model.attention_dropout > 0 or config.model.hidden_dropout > 0
    has_noise = "nvfp4" in precision_map.used_recipes(config.precision) and config.precision.fp4_stochastic_rounding
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
