"""Compatibility checks between a checkpoint and the run that resumes from it.

Checks cover the model, vocabulary, sample order, optimizer, learning-rate schedule, amax history and number formats.
Each raises a `CheckpointError` with the differences and the flags that resolve them.

`--dist-ckpt-strictness` follows the meaning of megatron-core's `StrictHandling`: an unexpected key is requested by the
run and absent from the checkpoint; a missing key is in the checkpoint and not requested. megatron-core finds the keys,
and `check_keys` raises, reports or ignores them. Two cases do not depend on the flag: extra layer state (scales, amax
histories) is loaded where the checkpoint has it, and incomplete optimizer state is always refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Optional

import torch

from megafp8.checkpoint.manifest import summarize
from megafp8.checkpoint.metadata import embedding_rows, load_common_state, read_config
from megafp8.config import derived, dimensions, precision_map, settings
from megafp8.config.iterations import global_batch_size
from megafp8.config.optimizers import has_flat_shards
from megafp8.config.precision_map import LinearChoice
from megafp8.config.schema import CheckpointConfig, ModelConfig, PrecisionConfig, RunConfig
from megafp8.config.schema.setting import Role
from megafp8.config.topology import model_parallel_size
from megafp8.data.sample_hash import SampleHash, SampleHashChain
from megafp8.device.collective_errors import call_on_rank_0
from megafp8.errors import CheckpointError
from megafp8.utils.plain_data import from_plain

NULL_TOKENIZER, BATCH_FLAG = "NullTokenizer", "--global-batch-size"
# Fields of megatron-core's scheduler state, with the flags that set them. Steps are counted in samples.
SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "samples of the warmup (--lr-warmup-iters, -samples or -fraction)",
    "lr_decay_steps": "samples of the schedule (--lr-decay-iters or -samples, else --train-iters or -samples)",
    "lr_decay_style": "--lr-decay-style",
    "init_lr": "--lr-warmup-init",
    "wsd_decay_steps": "samples of WSD's final decay (--lr-wsd-decay-iters or -samples)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "initial weight decay (--weight-decay or --start-weight-decay)",
    "end_wd": "final weight decay (--weight-decay or --end-weight-decay)",
    "wd_incr_steps": "samples of the run (--train-iters or --train-samples)",
    "wd_incr_style": "--weight-decay-incr-style",
}
# Precision settings that affect results only with FP8, and only with layers kept in BF16.
FP8_SETTINGS = ("fp8_recipe", "fp8_wgrad", "fp8_dot_product_attention")
MAX_LISTED_LINEARS = 4
BF16_LAYER_SETTINGS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
DEFAULT_STRICTNESS = "assume_ok_unexpected"
LENIENT_STRICTNESS = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
# Key prefixes of the parts of a checkpoint other than the model. A run may skip them.
NON_MODEL_PARTS = ("optimizer", "random_state")


def check_settings(path: Path, saved: RunConfig, config: RunConfig, with_optimizer: bool) -> None:
    """Raise if the settings of the run that saved a checkpoint do not fit those of the run that loads it.

    Args:
        with_optimizer: the state of the optimizer is loaded.
    """
    check_model(path, saved, config)
    check_amax_history(path, saved.precision, config.precision)
    check_optimizer(path, saved, config, with_optimizer)


def check_model(path: Path, saved: RunConfig, config: RunConfig, num_rows: Optional[int] = None) -> None:
    """Raise if the checkpoint is of another model, with all differences. `changed_settings` names the others.

    `vocab_size` is compared only where both runs take it the same way: NullTokenizer adds an ID, and other tokenizers
    may bring their own vocabulary. `check_vocabulary` covers the other cases.

    Args:
        num_rows: padded number of rows of this run's embedding, which is compared, too; None: it is not known.
    """
    lines = model_differences(saved, config)
    if num_rows is not None and all(line.startswith("model.vocab_size:") for line in lines):
        check_vocabulary(path, saved, config, num_rows)  # names the flag's value
    elif num_rows is not None and not has_vocabulary(embedding_rows(path), saved, config, num_rows):
        lines.append(f"rows of the embedding: {embedding_rows(path)} -> {num_rows}")
    if lines:
        raise CheckpointError(
            f"{path} is a checkpoint of a different model (checkpoint -> this run):\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nfix: give this run another --save and --load, or use the checkpoint's model (--use-checkpoint-args)"
        )


def model_differences(saved: RunConfig, config: RunConfig) -> list[str]:
    """Return the settings by which two runs have different models, as text (`model.num_layers: 2 -> 4`)."""
    is_null = [each.data.tokenizer_type == NULL_TOKENIZER for each in (saved, config)]
    checked = set(settings.settings_with(Role.WEIGHTS))
    if None in (saved.model.vocab_size, config.model.vocab_size) or is_null[0] != is_null[1]:
        checked.remove("model.vocab_size")
    # Sinkhorn selects experts by other scores than all other types.
    if len({"sinkhorn" in each.model.moe_router_load_balancing_type for each in (saved, config)}) == 1:
        checked.remove("model.moe_router_load_balancing_type")
    different = settings.diff(*(RunConfig(model=with_explicit_sizes(each.model)) for each in (saved, config)))
    return [line for line in different if line.partition(":")[0] in checked]


def changed_settings(path: Path, config: RunConfig, world_size: int, weights_only: bool) -> tuple[str, ...]:
    """Return a note with all settings that the checks accept and that change what a run learns; none if none differs.

    Args:
        world_size: of this run.
        weights_only: compare only the model; else also optimizer, data, gradients and the rest of training.
    """
    common = load_common_state(path)
    saved = settings.from_json(common["config"])
    refused = {f"precision.{name}" for each in (saved, config) for name in number_formats(each.precision)}
    runs = with_explicit_batches((saved, prod(common["layout"])), (config, world_size))
    named = settings.settings_with(Role.LEARNING)
    hint = "" if config.training.global_batch_size else f" ({BATCH_FLAG} {runs[0].training.global_batch_size} keeps it)"
    lines = [
        line + hint * line.startswith("training.global_batch_size:")
        for line in settings.diff(*(replace(each, model=with_explicit_sizes(each.model)) for each in runs))
        if (name := line.partition(":")[0]) in named and name not in refused
        and (line.startswith("model.") or not weights_only)
    ]  # fmt: skip
    return (f"settings that differ from the checkpoint's: {'; '.join(lines)}",) if lines else ()


def with_explicit_batches(*runs: tuple[RunConfig, int]) -> list[RunConfig]:
    """Return the settings of runs with their global batch sizes, which may depend on their numbers of ranks.

    They are unchanged where one does not tell: a conversion saves the settings of a model only.
    """
    if any(each.training.micro_batch_size is None or size % model_parallel_size(each) for each, size in runs):
        return [each for each, _ in runs]
    return [
        settings.with_values(each, {"training.global_batch_size": global_batch_size(each, size)}) for each, size in runs
    ]


def with_explicit_sizes(model: ModelConfig) -> ModelConfig:
    """Return settings with the sizes that they leave to a default, so that equal models have equal settings."""
    if None in (model.hidden_size, model.num_attention_heads):
        return model
    is_learned = model.position_embedding_type == "learned_absolute"
    return replace(
        model,
        ffn_hidden_size=dimensions.ffn_hidden_size(model),
        kv_channels=dimensions.kv_channels(model),
        num_query_groups=dimensions.num_query_groups(model),
        max_position_embeddings=model.max_position_embeddings if is_learned else None,
    )


def check_amax_history(path: Path, before: PrecisionConfig, now: PrecisionConfig) -> None:
    """Raise if the amax history lengths differ. Only delayed scaling keeps an amax history."""
    has_both = derived.is_stateful(before) and derived.is_stateful(now)
    if has_both and before.fp8_amax_history_len != now.fp8_amax_history_len:
        raise CheckpointError(
            f"{path} has amax histories of length {before.fp8_amax_history_len}, but this run uses "
            f"{now.fp8_amax_history_len}; use --fp8-amax-history-len {before.fp8_amax_history_len}"
        )


def has_vocabulary(saved_rows: int, saved: RunConfig, config: RunConfig, num_rows: int) -> bool:
    """Return whether the embeddings of the checkpoint and of this run may differ by padding only."""
    # Padding adds less than one multiple, so each vocabulary is larger than its rows minus its multiple.
    lower_bound = max(num_rows - dimensions.vocab_multiple(config), saved_rows - dimensions.vocab_multiple(saved))
    return lower_bound < min(num_rows, saved_rows)


def check_vocabulary(path: Path, saved: RunConfig, config: RunConfig, num_rows: int) -> None:
    """Raise if the embeddings of the checkpoint and of this run differ by more than padding.

    megatron-core loads the overlapping rows without a warning.

    Args:
        num_rows: padded number of rows of this run's embedding.
    """
    saved_rows = embedding_rows(path)
    if not has_vocabulary(saved_rows, saved, config, num_rows):
        saved_size, is_null = saved.model.vocab_size, saved.data.tokenizer_type == NULL_TOKENIZER
        num_ids = saved_rows if saved_size is None else saved_size + is_null
        fix = (
            f"--vocab-size {num_ids - 1}, to which NullTokenizer adds the end-of-document id"
            if config.data.tokenizer_type == NULL_TOKENIZER
            else "the tokenizer that the checkpoint was trained with"
        )
        raise CheckpointError(f"{path} has an embedding of {saved_rows} rows, but this run has {num_rows}: use {fix}")


def check_sample_order(path: Path, chain: SampleHashChain, is_overridden: bool) -> tuple[str, ...]:
    """Raise if the checkpoint was trained on samples that are not the first ones of this run.

    Training would then repeat some samples and skip others.

    Args:
        chain: hash chain of this run's training samples.
        is_overridden: accept another order (`--override-sample-order`).

    Returns:
        Notes for the user.

    Raises:
        CheckpointError: the sample orders differ and `is_overridden` is false.
    """
    saved = load_common_state(path).get("samples")
    if saved is None:
        return ("it has no record of its training samples, so the sample order of this run cannot be checked",)
    before = from_plain(SampleHash, saved, "samples")
    if before.num_samples > len(chain):
        return ()  # the checkpoint is past the end of this run, which reads no samples
    now = call_on_rank_0(lambda: chain.record(before.num_samples))
    if before.sha256 == now.sha256:
        return ()
    differences = before.differences(now) or [
        "only the order; other versions of megafp8, megatron-core or numpy can cause this"
    ]
    if is_overridden:
        return (f"training continues at sample {before.num_samples} of a different order ({'; '.join(differences)})",)
    raise CheckpointError(
        f"{path} was trained on {before.num_samples} samples, which differ from the first samples of this run "
        "(checkpoint -> this run):\n"
        + "\n".join(f"  {line}" for line in differences)
        + "\nSome samples would be repeated and others skipped.\nfix: use the checkpoint's values, or "
        "--override-sample-order to continue in the new order"
    )


def check_optimizer(path: Path, saved: RunConfig, config: RunConfig, with_optimizer: bool) -> None:
    """Raise if the saved optimizer state cannot be loaded into this run's optimizer."""
    if not with_optimizer:
        return
    if saved.checkpoint.no_save_optim:
        raise CheckpointError(f"{path} was saved with --no-save-optim; use --no-load-optim or --finetune")
    names = saved.optimizer.optimizer, config.optimizer.optimizer
    rates = saved.optimizer.decoupled_lr, config.optimizer.decoupled_lr
    dtypes = derived.params_dtype(saved.precision), derived.params_dtype(config.precision)
    have_flat_shards = all(has_flat_shards(each.optimizer, each.parallel) for each in (saved, config))
    if names[0] != names[1]:
        problem = f"has the state of --optimizer {names[0]}, but this run uses {names[1]}"
    elif None in rates and rates[0] != rates[1]:
        problem = (
            f"was saved {'without' if rates[0] is None else 'with'} --decoupled-lr, but this run is "
            f"{'without' if rates[1] is None else 'with'} it, and their parameter groups differ"
        )
    elif not have_flat_shards and (dtypes[0] == "fp32") != (dtypes[1] == "fp32"):
        problem = (
            f"has {dtypes[0]} weights, but this run has {dtypes[1]}, and unless both have --use-distributed-optimizer "
            "their optimizer states are incompatible"
        )
    else:
        return
    raise CheckpointError(f"{path} {problem}; use the checkpoint's setting, or --no-load-optim")


def check_schedule(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Raise if the learning-rate schedules differ, with the differences.

    Args:
        saved, now: `OptimizerParamScheduler.state_dict()` of the checkpoint and of this run.

    Returns:
        The changes that are no difference up to the checkpoint: text by the field's name.
    """
    changes = {
        name: f"{text}: {format_schedule_value(saved[name])} -> {format_schedule_value(now[name])}"
        for name, text in SCHEDULE_FLAGS.items()
        if saved[name] != now[name]
    }
    later = later_fields(saved, now)
    if lines := "\n".join(f"  {text}" for name, text in changes.items() if name not in later):
        raise CheckpointError(
            f"{path} has a different learning-rate schedule (checkpoint -> this run):\n{lines}\nfix: use the "
            "checkpoint's values, --override-opt_param-scheduler to use this run's schedule, or "
            "--use-checkpoint-opt_param-scheduler to use the checkpoint's"
        )
    return changes


def later_fields(saved: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Return the fields of two schedules that no rate up to the saved position depends on: lengths, before a decay."""
    both, fields = (saved, now), set()
    if all(each["wd_incr_style"] == "constant" for each in both):
        fields.add("wd_incr_steps")
    if all(each["lr_decay_style"] == "constant" for each in both) or (
        all(each["lr_decay_style"] == "WSD" for each in both)
        and saved["num_steps"] <= min(each["lr_decay_steps"] - each["wsd_decay_steps"] for each in both)
    ):
        fields.add("lr_decay_steps")
    return fields


def thread_count_notes(path: Path) -> tuple[str, ...]:
    """Warn if a CPU run resumes with another number of threads, which changes the order of sums."""
    saved, now = load_common_state(path).get("num_threads"), torch.get_num_threads()
    if saved in (None, now):  # older checkpoints do not record it
        return ()
    return (
        f"WARNING: {path} was saved with {saved} CPU threads per rank, this run has {now}: sums are computed in a "
        f"different order, so results are not bitwise equal; for bitwise equal results use --num-threads {saved}",
    )


def format_schedule_value(value: Optional[float | str]) -> str:
    """Format a value of the schedule. Sample counts may be fractions."""
    return f"{value:.10g}" if isinstance(value, (int, float)) else str(value or "none")


def number_formats(precision: PrecisionConfig) -> dict[str, Any]:
    """Return the settings that determine the number formats of a run, by name.

    Settings without effect are omitted, and so are those of kernels, emulation and `--fp8-param-gather`, which do not
    change the formats.
    """
    names = ["bf16", "fp16", "fp8_format", "fp4_format", "fp8_schedule"]
    used = derived.used_recipes(precision)
    names += FP8_SETTINGS if precision.fp8_format is not None else ()
    names += ["fp4_recipe"] if any(recipe.family == "fp4" for recipe in used) else []
    names += [name for recipe in used for name in recipe.resume_option_names]
    if used:
        names += ["first_last_layers_bf16", *(BF16_LAYER_SETTINGS if precision.first_last_layers_bf16 else ())]
    formats = {name: getattr(precision, name) for name in names}
    return formats | {"fp8_saved_activations": sorted(set(precision.fp8_saved_activations))}


def changed_linears(old: Mapping[str, LinearChoice], new: Mapping[str, LinearChoice]) -> list[str]:
    """Return the linears whose precision differs between two runs, as text.

    Linears that only one of the models has are not compared.
    """
    changed: dict[str, list[str]] = {}
    for name in (name for name in old if name in new and old[name] != new[name]):
        changed.setdefault(f"{old[name]} -> {new[name]}", []).append(name)
    lines = []
    for change, names in changed.items():
        more = f" and {len(names) - MAX_LISTED_LINEARS} more" if len(names) > MAX_LISTED_LINEARS else ""
        lines.append(f"precision of {', '.join(names[:MAX_LISTED_LINEARS])}{more}: {change}")
    return lines


def check_number_formats(
    path: Path, model: ModelConfig, precision: PrecisionConfig, checkpoint: CheckpointConfig
) -> tuple[str, ...]:
    """Raise if number formats differ from the checkpoint's, unless `--override-precision` is given.

    Returns:
        Notes for the user.

    Raises:
        CheckpointError: they differ without `--override-precision`.
    """
    saved = read_config(path)
    before, now = number_formats(saved.precision), number_formats(precision)
    # A setting that only one of the two has follows from another difference.
    lines = [
        f"precision.{name}: {before[name]} -> {now[name]}"
        for name in before
        if name in now and before[name] != now[name]
    ]
    if saved.precision.precision_map or precision.precision_map:
        choices = (precision_map.resolve(saved.model, saved.precision), precision_map.resolve(model, precision))
        lines += changed_linears(*choices)
    if not lines:
        return ()
    if checkpoint.override_precision:
        return (f"training continues with a different precision ({'; '.join(lines)})",)
    raise CheckpointError(
        f"{path} was trained with a different precision (checkpoint -> this run):\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nfix: use the checkpoint's values, or --override-precision to continue with this run's"
    )


def checkpoint_part(key: str) -> str:
    """Return the part of the checkpoint that a key belongs to: `model` or one of `NON_MODEL_PARTS`."""
    return next((part for part in NON_MODEL_PARTS if key.startswith(part)), "model")


def check_keys(path: Path, strictness: str, unexpected: Iterable[str], missing: Iterable[str]) -> tuple[str, ...]:
    """Raise on mismatched keys that the strictness does not allow; return notes on the others.

    Args:
        unexpected: keys requested and absent from the checkpoint, without extra layer state.
        missing: keys in the checkpoint and not requested; empty unless `strictness` is one of the `*_all` values.

    Raises:
        CheckpointError: the strictness does not allow a key, or optimizer state is incomplete.
    """
    unexpected, missing, flag = sorted(unexpected), sorted(missing), f"--dist-ckpt-strictness {strictness}"
    if unexpected and strictness not in LENIENT_STRICTNESS:
        raise CheckpointError(f"{path} is a checkpoint of a different model: it lacks {', '.join(unexpected)}")
    if others := [key for key in unexpected if checkpoint_part(key) != "model"]:
        raise CheckpointError(
            f"{path} lacks {summarize(others)}, and {flag} applies to weights only: use --no-load-optim, --no-load-rng "
            "or --finetune"
        )
    if missing and strictness == "raise_all":
        raise CheckpointError(f"{path} has {summarize(missing)}, which this run does not load ({flag})")
    if strictness == "ignore_all":
        return ()
    notes = {"lacks weights, which keep their initial values": unexpected, "has keys that are not loaded": missing}
    return tuple(f"warning: {path} {text} ({flag}): {summarize(keys)}" for text, keys in notes.items() if keys)
