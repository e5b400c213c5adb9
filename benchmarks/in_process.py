"""Runs of megafp8 inside the benchmark's process, on one rank and one thread, on a CPU several concurrently.

megatron-core keeps process groups and random states per process. Runs of one layout can share both: each has its own
configuration, model, optimizer and schedule, and without dropout none draws random numbers during training.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from megafp8.config import flags
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.device.platform import detect_platform, shutdown_distributed
from megafp8.mcore.config import build_transformer_config
from megafp8.mcore.process_groups import destroy_process_groups
from megafp8.metrics.timers import StepTimer
from megafp8.training.checks import ValidatedRun, check
from megafp8.training.run import Run
from megafp8.training.setup import build_training_run, build_training_state
from megafp8.training.step_parts import ZeroedBuffers, build_bad_step_detector, reduction_parts, state_parts

TRAINING = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--mock-data --tokenizer-type NullTokenizer --num-workers 0 --num-threads 1 --eval-iters 0 --no-progress-bar "
    "--lr 1e-4 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 100"
)
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size",
         "global_batch_size")  # fmt: skip


def add_size_options(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Options for the sizes of model and batch, under Megatron's names."""
    for name in SIZES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=defaults[name], help=f"default {defaults[name]}")


def command_line(options: argparse.Namespace, train_iters: int, extra: str = "") -> str:
    """The flags of a Llama-style run of the sizes in `options`."""
    sizes = {name: getattr(options, name) for name in SIZES}
    sizes["vocab_size"] -= 1  # the tokenizer adds a token for the end of a document
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in sizes.items())
    return f"{given} --train-iters {train_iters} {TRAINING} {extra}"


def start_run(text: str) -> Run:
    """A run from flags, the only one in this process so far.

    Raises:
        ConfigError: the flags contradict each other.
    """
    validated = validated_flags(text)
    return build_training_run(validated.invocation.config, detect_platform(), validated.implementation)


def add_run(first: Run, text: str) -> Run:
    """Another run in the groups of the first, on the same data; it differs in numbers only, not in layout or sizes."""
    assert not torch.cuda.is_available(), "a benchmark of CPU ranks: hide the GPUs with CUDA_VISIBLE_DEVICES="
    validated = validated_flags(text)
    config, implementation, world_size = (
        validated.invocation.config,
        validated.implementation,
        first.rank_position.world_size,
    )
    assert config.parallel == first.config.parallel and config.data == first.config.data
    transformer_config = build_transformer_config(config, implementation, on_cuda=False)
    training_state = build_training_state(
        config, transformer_config, implementation, first.vocab_size, world_size, first.platform
    )
    device, counts_loss = first.platform.device, first.rank_position.reports_loss
    reductions = tuple(reduction_parts(config, training_state, device))
    detector = build_bad_step_detector(config, training_state, implementation, device)
    states = state_parts(config, training_state, implementation, device, counts_loss, first.documents_room)
    return dataclasses.replace(
        first,
        config=config,
        implementation=implementation,
        training_state=training_state,
        parts=(ZeroedBuffers(training_state), detector, *states, *reductions),
        bad_steps=detector,
        timer=StepTimer(),
    )


def end_runs() -> None:
    """Leave the groups of all runs of this process, so that `start_run` may be called again."""
    destroy_process_groups()
    shutdown_distributed()


def validated_flags(text: str) -> ValidatedRun:
    """The command line, checked as `pretrain_gpt.py` checks it."""
    return check(*flags.parse_with_problems(text.split()))
