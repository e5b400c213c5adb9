"""What must be the same in a checkpoint and in the run that goes on from it: model, vocabulary, samples, optimizer and
schedule. Number formats are in `number_formats.py`.

Each check raises a CheckpointError with the differences, the flags and the mend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import torch

from megafp8.checkpoint.reading import common_state, embedding_rows, read_config
from megafp8.config import derived, serialize
from megafp8.config.schema import RunConfig
from megafp8.data.sample_chain import SampleChain, SampleMark
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
        raise CheckpointError(
            f"{path} has an embedding of {saved_rows} rows and this run one of {rows}: give {fix}"
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
