"""A run small enough for tests: a model of two layers on bytes of Python source, from flags, in any layout.

Everything is the package's own code except the source of the tokens: there are no shards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from tolerances import LAYOUT_LOSS
from torch import Tensor

from megafp8.config import flags, rules
from megafp8.config.schema import RunConfig
from megafp8.device import capability, platform
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megatron.core.utils import unwrap_model

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import finish_param_gather, save_checkpoint
from megafp8.data.gpt_dataset import ShardSource
from megafp8.metrics.records import QuantizationRecord, Record
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.extensions.statistics import StatisticsCollector
from megafp8.training.run import Run
from megafp8.training.setup import build_training_run
from megafp8.training.step import Batches, StepResult, train_step

# Bytes 0 to 254, and the tokenizer's end of document on 255, which no source has: 256 rows in every layout.
COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 255 "
    "--make-vocab-size-divisible-by 16 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer "
    "--mock-data --num-workers 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 100 --lr 1e-3 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --adam-beta2 0.95 --weight-decay 0.1 --num-threads 1 --eval-iters 2"
)
STYLES = {
    "llama": (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention "
        "--num-query-groups 2 --qk-layernorm --untie-embeddings-and-output-weights"
    ),
    "gpt2": "--position-embedding-type learned_absolute --max-position-embeddings 32",
}
# Models with multi-latent attention have no groups of queries.
EVERY_STYLE = STYLES | {
    "latent": STYLES["llama"].replace("--group-query-attention --num-query-groups 2", ""),
    "llama without norms of queries": STYLES["llama"].replace("--qk-layernorm", ""),
}
# For four stages; each of two ranks has two.
FOUR_LAYERS = "--num-layers 4"
VIRTUAL = (
    f"{FOUR_LAYERS} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2"
)
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-reduction all"
# Layers without quantization: megatron-core's own linears.
PLAIN = "--transformer-impl local"
# Six modules of Python 3.11, with its licence. Losses and their sensitivity depend on the text, so that it must not be
# that of the running Python. Read once, not by each rank.
with tarfile.open(Path(__file__).parent / "fixtures" / "python_source.tar.gz") as archive:
    modules = [name for name in archive.getnames() if name.endswith(".py")]
    TOKENS = torch.tensor(list(b"".join(archive.extractfile(name).read() for name in modules)))


def layers_of(flags: str) -> str:
    """The flag of a run with other flags that shall have as many layers as one with these."""
    return FOUR_LAYERS if FOUR_LAYERS in flags else ""


@dataclass(frozen=True)
class Curve:
    """The results of a few steps, equal on every rank."""

    losses: list[float]
    grad_norms: list[float]


def small_config(style: str, extra: str = "", world_size: int = 1) -> RunConfig:
    """The configuration of a small run; it breaks no rule."""
    config = flags.parse(f"{COMMON} {EVERY_STYLE[style]} {extra}".split()).config
    problems = rules.problems(config, world_size)
    assert not problems, problems
    return config


def build_run(config: RunConfig) -> Run:
    """The run of this rank, on samples of Python source. torch.distributed is already initialized."""
    here = platform.detect_platform()
    implementation = capability.layer_backend(config.model, config.precision, capability.detect_target())
    run = build_training_run(
        config, here, implementation, has_data=False
    )  # otherwise most of the time would go into mock tokens
    samples = SourceSamples(config.data.seq_length)
    return dataclasses.replace(run, datasets=(samples, samples, None))


class SourceSamples:
    """Sample i is a piece of Python source as bytes, equal in every layout.

    Args:
        length: tokens in a sample.
        is_masked: sample i then loses the first i % 8 eighths of its tokens, so that samples have different numbers of
        tokens.
    """

    def __init__(self, length: int, is_masked: bool = False):
        self.length, self.is_masked = length, is_masked
        self.sources = (ShardSource("source code", "bytes", (0, 1)),)

    def __len__(self) -> int:
        return 1 << 20

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([np.zeros_like(indices), np.zeros_like(indices), indices], axis=1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = int(torch.randint(len(TOKENS) - self.length, (), generator=generator))
        tokens, positions = TOKENS[start : start + self.length + 1], torch.arange(self.length)
        num_masked = index % 8 * self.length // 8 if self.is_masked else 0
        loss_mask = (positions >= num_masked).float()
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask, "position_ids": positions}


class DocumentSamples(SourceSamples):
    """The same in documents, whose last tokens are not trained.

    Args:
        lengths: of the documents in samples, which repeat; by default they are random, and short from sample 24 on.
    """

    def __init__(self, length: int, lengths: Sequence[Sequence[int]] = ()):
        super().__init__(length)
        self.lengths = lengths

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if self.lengths:
            ends = torch.tensor(self.lengths[index % len(self.lengths)]).cumsum(0)
        else:
            share = 1 / 32 if index < 24 else 1 / 4
            is_end = torch.rand(self.length, generator=torch.Generator().manual_seed(index)) < share
            is_end[-1] = True
            ends = is_end.nonzero().flatten() + 1
        lengths = ends.diff(prepend=ends.new_zeros(1))
        sample["position_ids"] = torch.cat([torch.arange(length) for length in lengths.tolist()])
        sample["document_starts"] = sample["position_ids"] == 0
        sample["loss_mask"] = torch.ones(self.length)
        sample["loss_mask"][ends - 1] = 0
        return sample


def train(run: Run, num_steps: int, first_step: int = 1, is_masked: bool = False) -> Curve:
    """Some steps of training. The samples before `first_step` count as consumed."""
    results = step_results(run, num_steps, first_step, is_masked)
    return Curve([result.loss for result in results], [result.grad_norm for result in results])


def step_results(run: Run, num_steps: int, first_step: int = 1, is_masked: bool = False) -> list[StepResult]:
    """The results of the steps of `train`."""
    length, batch = run.config.data.seq_length, run.global_batch_size
    has_documents = run.config.data.reset_attention_mask
    samples = DocumentSamples(length) if has_documents else SourceSamples(length, is_masked)
    last_step = first_step + num_steps - 1
    batches = build_batches(run, samples, (first_step - 1) * batch, last_step * batch, num_workers=0)
    return [train_step(run, batches, Progress(step, step * batch)) for step in range(first_step - 1, last_step)]


def save_or_load(run: Run, folder: Path, num_steps: int, is_first: bool) -> tuple[str, ...]:
    """Train the first steps and save them, or load what was saved then; the notes of loading."""
    if not is_first:
        return load_checkpoint(checkpoint_path(folder, num_steps), run.config, run.training_state).notes
    train(run, num_steps)
    save_checkpoint(folder, run.config, run.training_state, Progress(num_steps, num_steps * run.global_batch_size))
    return ()


def statistics_record_of(
    run: Run, step: int = 1, collector: Optional[StatisticsCollector] = None
) -> Optional[QuantizationRecord]:
    """One step of training, and rank 0's record of it if it is a statistics step."""
    batch = run.global_batch_size
    batches = build_batches(run, SourceSamples(run.config.data.seq_length), (step - 1) * batch, step * batch, 0)
    _, records = statistics_step(run, batches, step, collector or StatisticsCollector(run))
    return records[0] if records else None


def statistics_step(
    run: Run, batches: Batches, step: int, collector: StatisticsCollector, is_eager: bool = False
) -> tuple[StepResult, list[Record]]:
    """One step of training, and its quantization statistics and warnings if it is a statistics step."""
    progress, step_hooks = Progress(step - 1, (step - 1) * run.global_batch_size), collector.start_if_due(step)
    result = train_step(run, batches, progress, collector.before_update, is_eager, step_hooks)
    return result, collector.end_step(step)() if collector.is_collecting else []


def curve_of(config: RunConfig, num_steps: int, is_masked: bool = False) -> Curve:
    """Build and train: one rank's results of a complete run."""
    return train(build_run(config), num_steps, is_masked=is_masked)


def curve_of_equal_replicas(config: RunConfig, num_steps: int) -> Curve:
    """The same, where ranks that hold the same weights have the same bits in the end."""
    run = build_run(config)
    curve = train(run, num_steps)
    check_replicas(run, num_steps)
    return curve


@torch.no_grad()
def nudge(run: Run, seed: int) -> None:
    """Move every other weight, at random, to the next larger number: a change that rounding alone could make."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (parameter for chunk in run.training_state.chunks for parameter in chunk.parameters()):
        is_moved = torch.rand(parameter.shape, generator=generator) < 0.5
        above = torch.nextafter(parameter, torch.full_like(parameter, torch.inf))
        parameter.copy_(torch.where(is_moved, above, parameter))
    run.training_state.optimizer.reload_model_params()


def weights(run: Run) -> dict[str, Tensor]:
    """Copies of this rank's weights by name, prefixed with the chunk's number. Waits for pending gathers."""
    finish_param_gather(run.config.parallel, run.training_state)
    return {
        f"{index}.{name}": parameter.detach().clone()
        for index, chunk in enumerate(unwrap_model(run.training_state.chunks))
        for name, parameter in chunk.named_parameters()
    }


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def assert_follows(
    ours: Curve, reference: Curve, grad_norm_tolerance: float, loss_tolerance: float = LAYOUT_LOSS
) -> None:
    """Losses and gradient norms are those of another layout, but for the order of sums."""
    losses = [abs(a - b) for a, b in zip(ours.losses, reference.losses, strict=True)]
    assert max(losses) <= loss_tolerance, losses
    norms = [abs(a / b - 1) for a, b in zip(ours.grad_norms, reference.grad_norms, strict=True)]
    assert max(norms) <= grad_norm_tolerance, norms
