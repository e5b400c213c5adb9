"""What must be the same in a checkpoint and in the run that goes on from it: model, vocabulary, samples, optimizer and
schedule. Number formats are in `number_formats.py`.

Each check raises a CheckpointError with the differences, the flags and the mend.

Whether a run goes on in the number formats that its checkpoint was trained in.

`--dist-ckpt-strictness`: keys that only a run or only its checkpoint has.

Megatron-core's words: an unexpected key is asked for by the run and absent from the checkpoint, a missing one is in the
checkpoint and not asked for. Megatron-core finds them; here they become errors, notes or nothing, by the meaning of
its `StrictHandling`. Two things do not depend on it. What layers keep besides weights (scales, amax histories) is taken
where the checkpoint has it. An optimizer state with gaps is always refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

import torch

from megafp8.checkpoint.manifest import listed
from megafp8.checkpoint.metadata import common_state, embedding_rows, read_config
from megafp8.config import derived, precision_map, settings
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.data.sample_hash import SampleChain, SampleMark
from megafp8.errors import CheckpointError
from megafp8.recipes import registry

# Settings of the model section that change no parameter, and may differ between a checkpoint and its next run.
FREE_MODEL_SETTINGS = ("model.model_preset", "model.attention_dropout", "model.hidden_dropout", "model.init_method_std")
NULL_TOKENIZER = "NullTokenizer"
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


def check_same_model(path: Path, saved: RunConfig, config: RunConfig) -> None:
    """Refuse a checkpoint of another model, with the differences.

    Where only one of the two takes its vocabulary from `--vocab-size` as it is (NullTokenizer adds an id, and other
    tokenizers may bring their own), `check_same_vocabulary` compares them.
    """
    is_null = [each.data.tokenizer_type == NULL_TOKENIZER for each in (saved, config)]
    by_rows = None in (saved.model.vocab_size, config.model.vocab_size) or is_null[0] != is_null[1]
    free = (*FREE_MODEL_SETTINGS, "model.vocab_size") if by_rows else FREE_MODEL_SETTINGS
    lines = [line for line in settings.diff(saved, config) if line.startswith("model.")]
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
    has_both = all(each.fp8_format is not None and registry.get(each.fp8_recipe).is_stateful for each in (before, now))
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
        saved_size, is_null = saved.model.vocab_size, saved.data.tokenizer_type == NULL_TOKENIZER
        num_ids = saved_rows if saved_size is None else saved_size + is_null
        fix = (
            f"--vocab-size {num_ids - 1}, to which NullTokenizer adds the end-of-document id"
            if config.data.tokenizer_type == NULL_TOKENIZER
            else "the tokenizer that the checkpoint was trained with"
        )
        raise CheckpointError(f"{path} has an embedding of {saved_rows} rows and this run one of {rows}: give {fix}")


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


def check_same_schedule(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a checkpoint of another learning-rate schedule, with the differences.

    Args:
        saved, now: the states of the two, as megatron-core's schedule gives them.
    """
    different = [name for name in SCHEDULE if saved[name] != now[name]]
    if different:
        lines = "\n".join(f"  {SCHEDULE[name]}: {short(saved[name])} -> {short(now[name])}" for name in different)
        raise CheckpointError(
            f"{path} has another learning-rate schedule (checkpoint -> this run):\n{lines}\nmend: "
            "give the checkpoint's, --override-opt_param-scheduler for this run's, or "
            "--use-checkpoint-opt_param-scheduler for the saved one"
        )


def notes_on_threads(path: Path) -> tuple[str, ...]:
    """What a person should know who resumes a run on a CPU with another number of threads."""
    saved, now = common_state(path).get("num_threads"), torch.get_num_threads()
    if saved in (None, now):  # None: written before checkpoints had it
        return ()
    return (
        f"WARNING: {path} was saved with {saved} CPU threads a rank, this run has {now}: sums are divided differently, "
        f"so results differ in their last bits; give --num-threads {saved} for the same bits",
    )


def short(value: Optional[float | str]) -> str:
    """A value of the schedule for people: numbers of samples may be fractions, and not exact."""
    return f"{value:.10g}" if isinstance(value, (int, float)) else str(value or "none")


# Settings that decide which numbers a step computes with, each where it has an effect.
OF_FP8 = ("fp8_recipe", "fp8_wgrad", "fp8_dot_product_attention")
MOST_NAMES = 4
OF_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def number_formats(precision: PrecisionConfig) -> dict[str, Any]:
    """The settings of a run's numbers, by name. What has no effect in it is left out, and so is how they are computed
    (kernels, emulation) and kept (`--fp8-param-gather`)."""
    names = ["bf16", "fp16", "fp8_format", "fp4_format", "fp8_schedule"]
    used = derived.used_recipes(precision)
    names += OF_FP8 if precision.fp8_format is not None else ()
    names += ["fp4_recipe"] if any(recipe.family == "fp4" for recipe in used) else []
    names += [name for recipe in used for name in recipe.resume_option_names]
    if used:
        names += ["first_last_layers_bf16", *(OF_LAYERS if precision.first_last_layers_bf16 else ())]
    return {name: getattr(precision, name) for name in names}


def map_changes(before: RunConfig, now: RunConfig) -> list[str]:
    """What precision maps change, linear by linear; nothing where neither run has one, nor of other models' linears."""
    if not (before.precision.precision_map or now.precision.precision_map):
        return []
    old, new = (precision_map.resolve(config.model, config.precision) for config in (before, now))
    changed: dict[str, list[str]] = {}
    for name in (name for name in old if name in new and old[name] != new[name]):
        changed.setdefault(f"{old[name]} -> {new[name]}", []).append(name)
    return [f"precision of {_shortened(names)}: {change}" for change, names in changed.items()]


def _shortened(names: list[str]) -> str:
    rest = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + rest


def check_same_formats(path: Path, config: RunConfig) -> tuple[str, ...]:
    """Refuse to go on in other number formats than the checkpoint's, unless `--override-precision` asks for it.

    Returns:
        What a person should know, in words.

    Raises:
        CheckpointError: they differ, and nobody asked for it.
    """
    saved = read_config(path)
    before, now = number_formats(saved.precision), number_formats(config.precision)
    # What belongs to a format that only one of the two has is not worth a line beside that.
    lines = [
        f"precision.{name}: {before[name]} -> {now[name]}"
        for name in before
        if name in now and before[name] != now[name]
    ] + map_changes(saved, config)
    if not lines:
        return ()
    if config.checkpoint.override_precision:
        return (f"goes on in other number formats ({'; '.join(lines)})",)
    raise CheckpointError(
        f"{path} was trained in other number formats (checkpoint -> this run):\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nmend: give the checkpoint's values, or --override-precision to go on in these"
    )


DEFAULT = "assume_ok_unexpected"
LENIENT = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
# Parts of the keys of what only some layers keep besides weights: Transformer Engine's, and the emulated ones'.
LAYER_STATE = ("_extra_state", ".quantizer_state.")
# Parts of a checkpoint besides the model, by the first word of their keys. A run may leave them out.
OTHER_PARTS = ("optimizer", "random_state")


def returned_by_core(strictness: str) -> str:
    """The keys that megatron-core's `load` is to return, in place of its own errors and warnings."""
    return "return_all" if strictness.endswith("_all") else "return_unexpected"


def is_of_layers(key: str) -> bool:
    """Whether a key is of a layer's state besides its weights."""
    return any(part in key for part in LAYER_STATE)


def part_of(key: str) -> str:
    """The part of a checkpoint that a key is of: `model`, or one of `OTHER_PARTS`."""
    return next((part for part in OTHER_PARTS if key.startswith(part)), "model")


def check_keys(path: Path, strictness: str, unexpected: Iterable[str], missing: Iterable[str]) -> tuple[str, ...]:
    """Refuse keys that do not match, or return a note on them.

    Args:
        unexpected: of the parts that the run loads, without layers' state.
        missing: the same; empty unless `strictness` is one of the `*_all`.

    Raises:
        CheckpointError: the strictness does not allow a key, or optimizer state is incomplete.
    """
    unexpected, missing, flag = sorted(unexpected), sorted(missing), f"--dist-ckpt-strictness {strictness}"
    if unexpected and strictness not in LENIENT:
        raise CheckpointError(f"{path} is of another model: it lacks {', '.join(unexpected)}")
    if others := [key for key in unexpected if part_of(key) != "model"]:
        raise CheckpointError(
            f"{path} lacks {listed(others)}, and {flag} is for weights alone: give --no-load-optim, --no-load-rng or "
            "--finetune"
        )
    if missing and strictness == "raise_all":
        raise CheckpointError(f"{path} has {listed(missing)}, which this run does not load ({flag})")
    if strictness == "ignore_all":
        return ()
    notes = {"lacks weights, which stay as initialized": unexpected, "has keys that are not loaded": missing}
    return tuple(f"warning: {path} {text} ({flag}): {listed(keys)}" for text, keys in notes.items() if keys)
