"""`--micro-batch-size auto`: sizes are tried before the run is built, and the fastest that fits is the run's.

Each rank tries them in a process of its own (`processes.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, value_of
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.device.collective_errors import call_on_all_ranks, on_rank_0
from megafp8.device.platform import Platform, rank, resident_bytes, world_size
from megafp8.errors import ConfigError, DataError
from megafp8.planning.layouts import MARGIN_FRACTION
from megafp8.planning.memory import outside_bytes
from megafp8.planning.micro_batch import (
    HEADING,
    NOT_TRIED,
    Trial,
    best_size,
    first_size,
    gib,
    hopeful_sizes,
    next_size,
    possible_sizes,
    predicted_bytes,
    refused_sizes,
    row,
    with_size,
)
from megafp8.resilience.watchdog import Guard
from megafp8.training.extensions.stop import stopped_by_signals
from megafp8.training.micro_batch_search.messages import Answer, Failed, TooLarge, TrialSetup
from megafp8.training.micro_batch_search.processes import TrialProcess
from megafp8.training.run import run_folder
from megafp8.training.setup import print_progress
from megafp8.utils.files import atomic_write_json
from megafp8.utils.strict_json import read_json

CHOICE_FILE = "micro_batch_size.json"
GIB = 2**30
# What memory and time of a step follow from.
SECTIONS_THAT_MATTER = ("model", "parallel", "precision", "overrides")
SETTINGS_THAT_MATTER = (
    "data.seq_length", "training.global_batch_size", "training.recompute_activations",
    "training.recompute_granularity", "training.recompute_method", "training.recompute_num_layers",
    "training.recompute_modules", "training.distribute_saved_activations", "optimizer.optimizer",
    "optimizer.use_precision_aware_optimizer", "optimizer.main_grads_dtype", "optimizer.main_params_dtype",
    "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype", "logging.fp8_log_interval", "logging.fp8_log_layers",
    "logging.fp8_what_if",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SizeChoice:
    """The size of a run, and how it was found; in the run's folder.

    Attributes:
        settings: those that it follows from, by name.
        device, memory_bytes: that it was found on, of one rank.
        limit_bytes: that trials had to stay below.
    """

    micro_batch_size: int
    world_size: int
    implementation: str
    settings: dict[str, Any]
    device: str
    memory_bytes: int
    limit_bytes: int
    trials: tuple[Trial, ...]

    def describe(self) -> str:
        """The choice in a line, with what it was chosen from."""
        tried = ", ".join(
            f"{each.size}: {each.note}" if each.ms_per_sample is None or each.peak_bytes is None
            else f"{each.size}: {gib(each.peak_bytes)} GiB {each.ms_per_sample:.4g} ms/sample"
            for each in sorted(self.trials, key=lambda each: each.size)
        )  # fmt: skip
        return f"{self.micro_batch_size}, from trials on {self.device} below {gib(self.limit_bytes)} GiB ({tried})"


def choose_micro_batch(
    config: RunConfig, platform: Platform, implementation: str, guard: Guard
) -> tuple[RunConfig, str]:
    """The configuration with a size, and a description for the record; all ranks call it, before anything is built.

    A start that resumes or restarts a run takes the size that was found before. Where a signal ends the search,
    `guard.stop_agreed` is set on all ranks, and the configuration is returned without a size.

    Raises:
        ConfigError: on all ranks: no size fits.
    """
    known, note = on_rank_0(lambda: known_choice(config, platform, implementation))
    if known is not None:
        if rank() == 0:
            print_progress(f"micro-batch size: {note}")
        return with_size(config, known), note
    if rank() == 0 and note:
        print_progress(f"micro-batch size: {note}")
    choice = find_choice(config, platform, implementation, guard)
    if choice is None:
        return config, guard.reason
    folder = run_folder(config)
    if folder is not None:
        on_rank_0(lambda: atomic_write_json(folder / CHOICE_FILE, dataclasses.asdict(choice)))
    return with_size(config, choice.micro_batch_size), choice.describe()


# ---- what was found before ----------------------------------------------------------------------------------------


def settings_that_matter(config: RunConfig) -> dict[str, Any]:
    """What the choice follows from, as JSON has it."""
    names = [
        setting.name for setting in all_settings()
        if (setting.section or setting.name) in SECTIONS_THAT_MATTER or setting.name in SETTINGS_THAT_MATTER
    ]  # fmt: skip
    values = {name: value_of(config, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def known_choice(config: RunConfig, platform: Platform, implementation: str) -> tuple[Optional[int], str]:
    """The size that the run's folder, or the one that it loads from, has for such a run; and a description.

    Raises:
        DataError: the file is damaged.
    """
    folders = [folder for folder in (run_folder(config), config.checkpoint.load) if folder]
    paths = [path for folder in folders if (path := Path(folder) / CHOICE_FILE).is_file()]
    if not paths:
        return None, ""
    choice = read_choice(paths[0])
    was = {"world_size": choice.world_size, "layers": choice.implementation} | choice.settings
    now = {"world_size": world_size(), "layers": implementation} | settings_that_matter(config)
    defaults = settings_that_matter(RunConfig())  # of a setting that was not recorded when the size was found
    changed = [
        f"{name} {was.get(name, defaults.get(name))} -> {value}"
        for name, value in now.items()
        if was.get(name, defaults.get(name)) != value
    ]
    if changed:
        return None, f"{paths[0]} is of another run ({'; '.join(changed)}): sizes are tried anew"
    asked = config.training.micro_batch_size_memory_limit
    peak_bytes = next((each.peak_bytes for each in choice.trials if each.size == choice.micro_batch_size), None)
    if asked is not None and (peak_bytes or 0) > asked * GIB:
        return None, (
            f"{paths[0]} has {choice.micro_batch_size}, which took {gib(peak_bytes)} GiB, and "
            f"--micro-batch-size-memory-limit is {asked:g}: sizes are tried anew"
        )
    note = f"{choice.micro_batch_size}, as {paths[0]} has it"
    if asked is not None and int(asked * GIB) != choice.limit_bytes:
        note += f"; found below {gib(choice.limit_bytes)} GiB, and also below --micro-batch-size-memory-limit {asked:g}"
    memory_bytes = platform.total_memory_bytes()
    if (choice.device, choice.memory_bytes) != (platform.name, memory_bytes):
        note += (
            f"; found on {choice.device} with {gib(choice.memory_bytes)} GiB, here is {platform.name} with "
            f"{gib(memory_bytes)} GiB: kept, so that the run goes on as it was; delete the file to try anew"
        )
    return choice.micro_batch_size, note


def read_choice(path: Path) -> SizeChoice:
    """The choice in a file.

    Raises:
        DataError: it is damaged.
    """
    try:
        content = read_json(path)
        trials = tuple(Trial(**each) for each in content.pop("trials"))
        return SizeChoice(**content, trials=trials)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}): delete it to try sizes anew") from error


# ---- trying -------------------------------------------------------------------------------------------------------


def find_choice(config: RunConfig, platform: Platform, implementation: str, guard: Guard) -> Optional[SizeChoice]:
    """Try sizes until the fastest that fits is known; None where a signal ended that. All ranks return the same.

    Raises:
        ConfigError: none fits.
    """
    limit_bytes = min(call_on_all_ranks(lambda: memory_limit(config, platform)))
    sizes, ranks = possible_sizes(config, world_size()), world_size()
    vocab_size = build_tokenizer(config.data, config.model.vocab_size).vocab_size
    padded_vocab = derived.padded_vocab_size(config, derived.vocabulary_size(config, vocab_size))
    predicted = {size: predicted_bytes(config, size, ranks, padded_vocab, implementation) for size in sizes}
    outside = outside_bytes(config, ranks) if platform.kind == "cuda" else max(call_on_all_ranks(resident_bytes))
    needed = {size: each + outside for size, each in predicted.items()}
    hopeful, first = hopeful_sizes(needed, limit_bytes), first_size(needed, limit_bytes)
    report: Callable[[str], None] = print_progress if rank() == 0 else lambda text: None
    hopeless = [
        Trial(size=size, predicted_bytes=predicted[size], note=NOT_TRIED) for size in sizes if size not in hopeful
    ]
    report(introduction(config, sizes, limit_bytes, first))
    report("\n".join([HEADING, *map(row, hopeless)]))
    trials: dict[int, Trial] = {}
    process = TrialProcess(TrialSetup(config=config, implementation=implementation, limit_bytes=limit_bytes))
    try:
        while (size := next_size(hopeful, times_of(trials), first)) is not None:
            if is_stopped(guard):
                return None
            trials[size] = as_trial(size, predicted[size], process.measure(size))
            report(row(trials[size]))
    finally:
        process.close()
    size = best_size(times_of(trials))
    if size is None:
        raise ConfigError(
            f"--micro-batch-size auto: not even {min(trials)} fits below {gib(limit_bytes)} GiB a rank "
            f"({trials[min(trials)].note}). Give --recompute-granularity, --use-distributed-optimizer or more ranks to "
            "share the model, or a higher --micro-batch-size-memory-limit; tools/plan.py finds layouts"
        )
    choice = SizeChoice(
        micro_batch_size=size, world_size=ranks, implementation=implementation, settings=settings_that_matter(config),
        device=platform.name, memory_bytes=platform.total_memory_bytes(), limit_bytes=limit_bytes,
        trials=(*trials.values(), *hopeless),
    )  # fmt: skip
    report(f"micro-batch size: {size}, {derived.num_microbatches(with_size(config, size), ranks)} microbatches a step")
    return choice


def is_stopped(guard: Guard) -> bool:
    """Whether a signal asked any rank to stop, which is noted then; all ranks call it."""
    guard.agree(sum(map(bool, call_on_all_ranks(lambda: guard.asked))))
    if guard.stop_agreed:
        stopped_by_signals(guard)
    return guard.stop_agreed


def memory_limit(config: RunConfig, platform: Platform) -> int:
    """What this rank may take, in bytes."""
    asked = config.training.micro_batch_size_memory_limit
    share = int((1 - MARGIN_FRACTION) * platform.free_memory_bytes())
    return share if asked is None else min(int(asked * GIB), platform.total_memory_bytes())


def introduction(config: RunConfig, sizes: list[int], limit_bytes: int, first: int) -> str:
    """What is going to be tried in a line, and another for each divisor that is not."""
    batch, ranks = config.training.global_batch_size, world_size()
    assert batch is not None
    tried = (
        f"micro-batch size: auto tries divisors of the {batch // derived.data_parallel_size(config, ranks)} sequences "
        f"that each data-parallel rank has of --global-batch-size {batch} ({', '.join(map(str, sizes))}) below "
        f"{gib(limit_bytes)} GiB a rank, from {first} on"
    )
    return "\n".join([tried, *(f"micro-batch size: {line}" for line in refused_sizes(config, ranks))])


def times_of(trials: dict[int, Trial]) -> dict[int, Optional[float]]:
    """Milliseconds per sample of the sizes that were tried; None where one did not fit."""
    return {size: each.ms_per_sample for size, each in trials.items()}


def as_trial(size: int, predicted: int, answer: Answer) -> Trial:
    """What became of a size.

    Raises:
        RuntimeError: neither did it fit nor was it too large.
    """
    if isinstance(answer, Failed):
        raise RuntimeError(f"the trial of --micro-batch-size {size} failed: {answer.reason}")
    if isinstance(answer, TooLarge):
        return Trial(size=size, predicted_bytes=predicted, note=f"does not fit: {answer.reason}")
    return Trial(size=size, predicted_bytes=predicted, peak_bytes=answer.peak_bytes, ms_per_sample=answer.ms_per_sample)
