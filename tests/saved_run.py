"""A small model in a checkpoint as a run leaves it, without training."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch.distributed as dist
from ranks import run_ranks

from megafp8.config import dimensions, flags
from megafp8.config.layer_backends import EMULATED
from megafp8.config.lr_schedule import schedule_samples
from megafp8.config.schema import RunConfig
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.directory import make_unfinished_folder, publish, unfinished_path
from megafp8.checkpoint.manifest import read_manifest
from megafp8.checkpoint.progress import Progress, TrainingState
from megafp8.checkpoint.save import save_checkpoint
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.mcore.config import build_transformer_config
from megafp8.mcore.process_groups import build_process_groups
from megafp8.models.builder import add_gradient_buffers, build_model, build_optimizer
from megafp8.optimizer.schedules import build_schedule

# The seed is not the default one, so weights that were not loaded differ.
RUN = (
    "--seed 4321 --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --lr-warmup-iters 0 "
    "--init-method-std 0.2"
)
STEP = 7


def configure(text: str, tokenizer_model: str | Path | None = None) -> RunConfig:
    """The configuration of a command line, with a SentencePiece model or without a tokenizer file."""
    kind = "NullTokenizer" if tokenizer_model is None else f"SentencePieceTokenizer --tokenizer-model {tokenizer_model}"
    return flags.parse(f"{RUN} {text} --tokenizer-type {kind}".split()).config


def build_initial(config: RunConfig) -> TrainingState:
    """Step 0 of a run on this rank."""
    build_process_groups(config)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    vocab_size = dimensions.padded_vocab_size(config, tokenizer.vocab_size)
    transformer_config = build_transformer_config(config, EMULATED, on_cuda=False)
    model = build_model(config, transformer_config, EMULATED, vocab_size)
    chunks = add_gradient_buffers(config, transformer_config, EMULATED, model)
    optimizer = build_optimizer(config, transformer_config, EMULATED, chunks)
    samples = schedule_samples(config, dist.get_world_size())
    return TrainingState(chunks, optimizer, build_schedule(config.optimizer, samples, config.checkpoint, optimizer))


def copy_as_step(path: Path, folder: Path, step: int) -> None:
    """Give a folder the files of a checkpoint as the checkpoint of another step. Its progress is unchanged."""
    manifest = dataclasses.replace(read_manifest(path), step=step)
    make_unfinished_folder(folder, step)
    for name in manifest.files:
        shutil.copy(path / name, unfinished_path(folder, step) / name)
    publish(folder, step, manifest)


def save_initial(folder: Path, config: RunConfig, world_size: int = 1) -> Path:
    """Write step 0 of a run as its checkpoint of step 7, and return the run's folder."""

    def save() -> None:
        save_checkpoint(folder, config, build_initial(config), Progress(STEP, STEP))

    run_ranks(world_size, save)
    return folder
