"""Which settings decide what a run comes to, and from which step on a run had which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath
from typing import Any, Union

from megafp8.config.variants import NEUTRAL_SETTINGS
from megafp8.reports.load import Run
from megafp8.telemetry.records import RunRecord

SEED = "training.seed"
# How a run is watched and stopped, which a resumption may well do otherwise.
WATCHING = (
    "training.exit_", "training.step_timeout_s", "training.checkpoint_timeout_s", "training.max_crashes",
    "training.manual_gc", "training.check_weight_hash_", "training.skip_train", "parallel.distributed_timeout_minutes",
    "parallel.rendezvous_timeout_s", "data.mmap_bin_files",
)  # fmt: skip
# A run goes on where these lie in other folders, as on another machine. That samples are the same it checks by itself.
PATHS = (
    "data.data_path", "data.train_data_path", "data.valid_data_path", "data.test_data_path", "data.tokenizer_model",
    "data.vocab_file", "data.merge_file",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Steps of a run that were made with the same settings, from `first_step` on.

    Attributes:
        changes: from the stage before, as "section.setting: before -> now"; empty for the first.
    """

    first_step: int
    info: RunRecord
    changes: tuple[str, ...] = ()


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run record that decide what is learned, as `section.setting`."""
    flat = {}
    for section, settings in config.items():
        if isinstance(settings, dict):
            flat |= {f"{section}.{name}": value for name, value in settings.items()}
        else:
            flat[section] = settings
    return {name: value for name, value in flat.items() if not name.startswith((*NEUTRAL_SETTINGS, *WATCHING))}


def without_folders(paths: Union[None, str, Sequence[str]]) -> list[str]:
    """The last parts of a path, or of shards and their weights."""
    return [PurePath(path).name for path in ([paths] if isinstance(paths, str) else paths or ())]


def seed_of(run: Run) -> int:
    """The seed of initialization, data order and dropout."""
    return flatten(run.info.config).get(SEED, 0)


def changed_settings(old: RunRecord, new: RunRecord) -> dict[str, tuple[Any, Any]]:
    """`differing_settings` of a run and of its resumption, which may have its files in other folders."""
    found = differing_settings(old, new)
    return {
        name: both for name, both in found.items()
        if name not in PATHS or without_folders(both[0]) != without_folders(both[1])
    }  # fmt: skip


def differing_settings(old: RunRecord, new: RunRecord) -> dict[str, tuple[Any, Any]]:
    """(old, new) of the settings that decide what is learned and differ, by `section.setting`. One that only one of the
    records has is of another version of megafp8, and no difference."""
    before, after = flatten(old.config), flatten(new.config)
    return {name: (before[name], after[name]) for name in before if name in after and before[name] != after[name]}


def differences(old: RunRecord, new: RunRecord, *, with_seed: bool = True) -> list[str]:
    """In which settings and devices two records differ, as "section.setting: old -> new"."""
    texts = texts_of(differing_settings(old, new), with_seed)
    return texts + device_texts(old, new)


def texts_of(settings: dict[str, tuple[Any, Any]], with_seed: bool = True) -> list[str]:
    """As "section.setting: old -> new"."""
    return [f"{name}: {before} -> {after}" for name, (before, after) in settings.items() if with_seed or name != SEED]


def device_texts(old: RunRecord, new: RunRecord) -> list[str]:
    """As "devices: 1 x cpu -> 2 x cpu", where they differ."""
    if old.device_name != new.device_name or old.world_size != new.world_size:
        return [f"devices: {old.world_size} x {old.device_name} -> {new.world_size} x {new.device_name}"]
    return []


def stages_of(run: Run) -> list[Stage]:
    """The stages of a run, in order; one of a run that did not change. Resumptions as before begin no other."""
    stages = [Stage(first_step=1, info=run.stages[0])]
    for info in run.stages[1:]:
        before = stages[-1].info
        arithmetic = [f"{before.recipe} -> {info.recipe}"] if info.recipe != before.recipe else []
        if changes := (*arithmetic, *texts_of(changed_settings(before, info)), *device_texts(before, info)):
            stages.append(Stage(first_step=(info.resumed_from_step or 0) + 1, info=info, changes=changes))
    return stages


def recipe_of(run: Run) -> str:
    """The arithmetic in words: "bf16", or "bf16, then from step 8 fp8 hybrid tensorwise" of a run that changed it."""
    stages = stages_of(run)
    text = stages[0].info.recipe
    for before, now in zip(stages, stages[1:], strict=False):
        if now.info.recipe != before.info.recipe:
            text += f", then from step {now.first_step} {now.info.recipe}"
        elif changed_settings(before.info, now.info):
            text += f", from step {now.first_step} with other settings"
    return text


def settings_key(run: Run) -> list[Any]:
    """What runs agree in that differ in their seed alone: settings, and from which steps on; devices are not in it."""
    settings = groupby(stages_of(run), key=lambda stage: (seedless(stage.info), stage.info.recipe))
    return [[next(stages).first_step, *key] for key, stages in settings]


def device_key(run: Run) -> list[Any]:
    """On what a run was made, and from which steps on."""
    devices = groupby(stages_of(run), key=lambda stage: (stage.info.device_name, stage.info.world_size))
    return [[next(stages).first_step, *key] for key, stages in devices]


def seedless(info: RunRecord) -> dict[str, Any]:
    """What decides what is learned, but for the seed."""
    return {name: value for name, value in flatten(info.config).items() if name != SEED}


def change_warnings(run: Run) -> list[str]:
    """What changed on the way, a line for each time."""
    return [
        f"{run.name} changed on the way, from step {stage.first_step} on: {'; '.join(stage.changes)}. Its figures are "
        "of all its steps, not of the last settings alone"
        for stage in stages_of(run)[1:]
    ]
