"""`--micro-batch-size auto`: the search for the fastest micro-batch size that fits, before the run is built.

Each rank measures the sizes in a separate process (`processes.py`). `resources/micro_batch.py` chooses the order.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.config import dimensions, iterations, topology
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.micro_batch_sizes import last_batch_size, possible_sizes, refused_sizes, with_size
from megafp8.config.schema import RunConfig
from megafp8.config.schema.setting import Role
from megafp8.config.settings import settings_with, value_of
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.device.collective_errors import call_on_all_ranks, call_on_rank_0
from megafp8.device.platform import Platform, rank, resident_bytes, world_size
from megafp8.errors import ConfigError, DataError
from megafp8.resilience.watchdog import Watchdog
from megafp8.resources import micro_batch
from megafp8.resources.micro_batch import gib
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION, non_torch_bytes
from megafp8.training.micro_batch_search.messages import TrialResult, TrialSetup
from megafp8.training.micro_batch_search.processes import TrialProcess
from megafp8.training.run import run_folder
from megafp8.training.signals import record_stop_signals
from megafp8.utils.files import UnreadableFile, atomic_write_json
from megafp8.utils.plain_data import from_plain
from megafp8.utils.strict_json import read_json

CHOICE_FILE = "micro_batch_size.json"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class SizeChoice:
    """The micro-batch size of a run and how it was found; saved in the run's folder.

    Attributes:
        settings: those on which the choice depends, by name.
        device, memory_bytes: of one rank during the search.
        limit_bytes: memory limit of the trials.
    """

    micro_batch_size: int
    world_size: int
    implementation: str
    settings: dict[str, Any]
    device: str
    memory_bytes: int
    limit_bytes: int
    trials: tuple[micro_batch.Trial, ...]

    def describe(self) -> str:
        """The choice and its trials in one line."""
        tried = ", ".join(
            f"{each.size}: {each.note}" if each.ms_per_sample is None or each.peak_bytes is None
            else f"{each.size}: {gib(each.peak_bytes)} GiB {each.ms_per_sample:.4g} ms/sample"
            for each in sorted(self.trials, key=lambda each: each.size)
        )  # fmt: skip
        return f"{self.micro_batch_size}, from trials on {self.device} within {gib(self.limit_bytes)} GiB ({tried})"


def choose_micro_batch(
    config: RunConfig, platform: Platform, implementation: LayerBackend, watchdog: Watchdog
) -> tuple[Optional[int], str]:
    """The micro-batch size, and a description for the record; all ranks call it.

    A run that resumes or restarts takes the size that was found before. If a signal ends the search, `stop_agreed` of
    the watchdog is set on all ranks, and there is no size.

    Raises:
        ConfigError: on all ranks: no size fits.
    """
    known, note = call_on_rank_0(lambda: load_known_choice(config, platform, implementation))
    if note:
        report(f"micro-batch size: {note}")
    if known is not None:
        return known, note
    choice = search_sizes(config, platform, implementation, watchdog)
    if choice is None:
        return None, watchdog.reason
    folder = run_folder(config)
    if folder is not None:
        call_on_rank_0(lambda: atomic_write_json(folder / CHOICE_FILE, dataclasses.asdict(choice)))
    return choice.micro_batch_size, choice.describe()


def report(text: str) -> None:
    """Print progress on rank 0."""
    if rank() == 0:
        print(text, flush=True)


# ---- a saved choice -------------------------------------------------------------------------------------------------


def relevant_settings(config: RunConfig) -> dict[str, Any]:
    """The settings on which the choice depends, with values as JSON stores them."""
    values = {name: value_of(config, name) for name in settings_with(Role.MEMORY)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def load_known_choice(config: RunConfig, platform: Platform, implementation: LayerBackend) -> tuple[Optional[int], str]:
    """The size saved in the folder of the run, or in the one that it loads from, and a description.

    There is none if the relevant settings changed, or if it took more memory than the limit is now.

    Raises:
        DataError: the file is damaged.
    """
    folders = [folder for folder in (run_folder(config), config.checkpoint.load) if folder]
    paths = [path for folder in folders if (path := Path(folder) / CHOICE_FILE).is_file()]
    if not paths:
        return None, ""
    choice = read_choice(paths[0])
    was = {"world_size": choice.world_size, "layers": choice.implementation}
    was |= relevant_settings(RunConfig()) | choice.settings  # older versions recorded fewer settings
    now = {"world_size": world_size(), "layers": implementation.name} | relevant_settings(config)
    changed = [f"{name} {was.get(name)} -> {value}" for name, value in now.items() if was.get(name) != value]
    if changed:
        return None, f"{paths[0]} belongs to a different run ({'; '.join(changed)}): repeating the search"
    requested = config.training.micro_batch_size_memory_limit
    peak_bytes = next((each.peak_bytes or 0 for each in choice.trials if each.size == choice.micro_batch_size), 0)
    if requested is not None and peak_bytes > requested * GIB:
        return None, (
            f"{paths[0]} has {choice.micro_batch_size}, which needed {gib(peak_bytes)} GiB, more than "
            f"--micro-batch-size-memory-limit {requested:g}: repeating the search"
        )
    note = f"{choice.micro_batch_size}, from {paths[0]}"
    if requested is not None and int(requested * GIB) != choice.limit_bytes:
        note += f"; found within {gib(choice.limit_bytes)} GiB, and below --micro-batch-size-memory-limit {requested:g}"
    memory_bytes = platform.total_memory_bytes()
    if (choice.device, choice.memory_bytes) != (platform.name, memory_bytes):
        note += (
            f"; found on {choice.device} with {gib(choice.memory_bytes)} GiB, this machine is {platform.name} with "
            f"{gib(memory_bytes)} GiB: kept, so that the run continues unchanged; to repeat the search, delete the file"
        )
    return choice.micro_batch_size, note


def read_choice(path: Path) -> SizeChoice:
    """Read a saved choice.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return from_plain(SizeChoice, read_json(path))
    except UnreadableFile as error:
        raise DataError(f"{path} is damaged ({error}): delete it to repeat the search") from error


# ---- the search -----------------------------------------------------------------------------------------------------


def search_sizes(
    config: RunConfig, platform: Platform, implementation: LayerBackend, watchdog: Watchdog
) -> Optional[SizeChoice]:
    """Try sizes until the fastest that fits is found; None if a signal ended the search. All ranks return the same.

    Raises:
        ConfigError: no size fits.
    """
    limit_bytes = min(call_on_all_ranks(lambda: memory_limit(config, platform)))
    sizes, ranks = possible_sizes(config, world_size()), world_size()
    num_ids = build_tokenizer(config.data, config.model.vocab_size).vocab_size
    vocab_size = dimensions.vocabulary_size(config.model, config.data, num_ids)
    padded_vocab = dimensions.padded_vocab_size(config, vocab_size)
    is_gpu = platform.kind == "cuda"
    outside = non_torch_bytes(config, ranks) if is_gpu else max(call_on_all_ranks(resident_bytes))
    if is_gpu and limit_bytes <= outside:
        raise ConfigError(
            f"--micro-batch-size auto: a process takes {gib(outside)} GiB beside its tensors, and the limit is "
            f"{gib(limit_bytes)}: give a higher --micro-batch-size-memory-limit, or free the GPU"
        )
    predicted = micro_batch.predicted_bytes(config, sizes, ranks, padded_vocab, implementation, outside)
    candidates, first = micro_batch.sizes_to_try(predicted, limit_bytes), micro_batch.first_size(predicted, limit_bytes)
    skipped = [
        micro_batch.Trial(size=size, predicted_bytes=predicted[size], note=micro_batch.NOT_TRIED)
        for size in sizes
        if size not in candidates
    ]
    is_verbose, opening = config.logging.verbose, introduction(config, sizes, limit_bytes, first)
    report(opening if is_verbose else opening.splitlines()[0])
    report("\n".join([micro_batch.HEADING, *map(micro_batch.table_row, skipped if is_verbose else ())]))
    trials: dict[int, micro_batch.Trial] = {}
    times_ms: dict[int, Optional[float]] = {}
    setup = TrialSetup(
        config=config,
        implementation=implementation.name,
        limit_bytes=limit_bytes,
        outside_bytes=outside if is_gpu else 0,
    )
    with closing(TrialProcess(setup)) as process:
        while (size := micro_batch.next_size(candidates, times_ms, first)) is not None:
            if is_search_stopped(watchdog):
                return None
            trials[size] = as_trial(size, predicted[size], process.measure(size))
            times_ms[size] = trials[size].ms_per_sample
            report(micro_batch.table_row(trials[size]))
    size = micro_batch.best_size(times_ms)
    if size is None:
        raise ConfigError(
            f"--micro-batch-size auto: even {min(trials)} does not fit in {gib(limit_bytes)} GiB per rank "
            f"({trials[min(trials)].note}). Use --recompute-granularity, --use-distributed-optimizer, more "
            "model-parallel ranks, or a higher --micro-batch-size-memory-limit; megafp8 plan searches for layouts"
        )
    choice = SizeChoice(
        micro_batch_size=size, world_size=ranks, implementation=implementation.name, settings=relevant_settings(config),
        device=platform.name, memory_bytes=platform.total_memory_bytes(), limit_bytes=limit_bytes,
        trials=(*trials.values(), *skipped),
    )  # fmt: skip
    if is_verbose:
        num_microbatches = iterations.num_microbatches(with_size(config, size), ranks)
        report(f"micro-batch size: {size}, {num_microbatches} microbatches per step")
    return choice


def is_search_stopped(watchdog: Watchdog) -> bool:
    """Whether any rank got a stop signal, which is then recorded in the watchdog; all ranks call it."""
    watchdog.agree_to_stop(sum(map(bool, call_on_all_ranks(lambda: watchdog.received_signal))))
    if watchdog.stop_agreed:
        record_stop_signals(watchdog)
    return watchdog.stop_agreed


def memory_limit(config: RunConfig, platform: Platform) -> int:
    """The memory that a trial of this rank may use, in bytes."""
    requested = config.training.micro_batch_size_memory_limit
    free_bytes = int((1 - FREE_MEMORY_FRACTION) * platform.free_memory_bytes())
    return free_bytes if requested is None else min(int(requested * GIB), platform.total_memory_bytes())


def introduction(config: RunConfig, sizes: list[int], limit_bytes: int, first: int) -> str:
    """Console lines before the search: the sizes to try, and each divisor that breaks a rule."""
    batch, ranks = last_batch_size(config), world_size()
    assert batch is not None
    source = "--global-batch-size" if config.training.global_batch_size else "the last global batch of"
    tried = (
        f"micro-batch size: auto tries divisors of the {batch // topology.data_parallel_size(config, ranks)} sequences "
        f"per data-parallel rank of {source} {batch} ({', '.join(map(str, sizes))}) within "
        f"{gib(limit_bytes)} GiB per rank, starting with {first}"
    )
    return "\n".join([tried, *(f"micro-batch size: {line}" for line in refused_sizes(config, ranks))])


def as_trial(size: int, predicted: int, result: TrialResult) -> micro_batch.Trial:
    """The trial of a size, from its result.

    Raises:
        RuntimeError: the trial failed for another reason than memory.
    """
    peak_bytes, ms_per_sample, too_large, error = result
    if error:
        raise RuntimeError(f"the trial of --micro-batch-size {size} failed: {error}")
    note = f"does not fit: {too_large}" if too_large else ""
    return micro_batch.Trial(
        size=size, predicted_bytes=predicted, peak_bytes=peak_bytes, ms_per_sample=ms_per_sample, note=note
    )
