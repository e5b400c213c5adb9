"""Check shards and build the indices of their samples, so that no GPU waits for them when a run starts.

    megafp8 build-index --data-path 0.3 shards/a 0.7 shards/b --seq-length 2048 --train-iters 10000 \\
        --global-batch-size 512 --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model \\
        --data-cache-path indices

takes the flags of megafp8 pretrain: give the command line of the run; flags without influence on the indices are
ignored. The run then finds the indices in --data-cache-path (default: in --save, else next to the shards). Repeating
the command checks existing indices. An index depends on the contents of the shards, --seq-length, --seed,
--split, --packing, the weights, and on the length of the run only as far as that needs more epochs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from megafp8.cli.common import build_command_parser, install_patches, returns_exit_status
from megafp8.config import flags, iterations
from megafp8.config.data_phases import first_samples
from megafp8.config.help import complete_text
from megafp8.config.rules import batch, data, paths, training
from megafp8.config.rules.base import rules_of
from megafp8.config.schema import RunConfig
from megafp8.config.schema.setting import Role
from megafp8.config.settings import settings_with
from megafp8.errors import ConfigError

RULES = (
    *rules_of(data, batch), training.length_is_given_once, training.samples_fill_a_batch, paths.shards_are_there,
    paths.tokenizer_files_are_there, paths.outputs_can_be_written,
)  # fmt: skip


def build_help_parser() -> argparse.ArgumentParser:
    """Build a parser for `--help`, with the training flags that the indices depend on; all others are accepted."""
    parser = build_command_parser(__doc__, usage="%(prog)s FLAGS")
    for setting in settings_with(Role.SAMPLES).values():
        parser.add_argument(setting.flags[0], help=complete_text(setting), metavar="")
    parser.add_argument("--world-size", metavar="", help="number of ranks; needed without --global-batch-size")
    return parser


def problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield everything that is wrong with the settings."""
    for rule in RULES:
        yield from rule(config, world_size)
    if config.data.mock_data:
        yield "--mock-data has no shards to build indices of"
    if config.data.seq_length is None:
        yield "--seq-length is missing: tokens in one training sequence"
    sizes = (
        config.training.global_batch_size, config.training.micro_batch_size, config.training.step_batch_size_schedule,
    )  # fmt: skip
    if sizes == (None, None, None):
        yield "--global-batch-size is missing: sequences in one optimizer step"


def build(config: RunConfig, world_size: int) -> None:
    """Check the shards, build the missing indices and print a summary."""
    started = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    install_patches()
    from megafp8.data.datasets import SPLITS, build_datasets
    from megafp8.data.packed_dataset import packing_text
    from megafp8.data.tokenizers.build import build_tokenizer

    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    num_samples, starts = iterations.dataset_samples(config, world_size), first_samples(config, world_size)
    seed, save = config.training.seed, config.checkpoint.save
    datasets = build_datasets(
        config.data, tokenizer, num_samples, seed=seed, save=save, phase_starts=starts, on_progress=log
    )
    for phase in datasets[0].datasets if starts and datasets[0] else ():
        log(str(phase))
    built = {split: dataset for split, dataset in zip(SPLITS, datasets, strict=True) if dataset is not None}
    for split, dataset in built.items():
        num_shards = len({source.shard for source in dataset.sources})
        shards = f"{num_shards} shard{'s' if num_shards > 1 else ''}"
        packing = packing_text(dataset)
        samples = f"{len(dataset)} samples of {config.data.seq_length} tokens from {shards}"
        log(f"{split}: {samples}{packing and f'; {packing}'}")
    for folder in {dataset.config.cache.folder for dataset in built.values()}:
        log(f"the indices in {folder} are complete")


@returns_exit_status("build-index")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    if "--help" in argv or "-h" in argv:
        print(build_help_parser().format_help())
        return 0
    parsed, found = flags.parse_with_problems(argv)
    config, world_size = parsed.config, parsed.world_size or 1
    found += problems(config, world_size)
    if found:
        raise ConfigError(found)
    build(config, world_size)
    return 0
