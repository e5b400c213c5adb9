"""Which settings decide what a run comes to, and from which step on a run had which of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megafp8.config.variants import NEUTRAL_SETTINGS
from megafp8.reports.load import Run
from megafp8.telemetry.records import RunRecord

SEED = "training.seed"
# How a run is watched and stopped, which a resumption may well do otherwise.
WATCHING = (
    "training.exit_", "training.step_timeout_s", "training.checkpoint_timeout_s", "training.max_crashes",
    "training.manual_gc", "training.check_weight_hash_", "training.skip_train", "parallel.distributed_timeout_minutes",
    "data.mmap_bin_files",
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


def seed_of(run: Run) -> int:
    """The seed of initialization, data order and dropout."""
    return flatten(run.info.config).get(SEED, 0)


def differing_settings(old: RunRecord, new: RunRecord) -> dict[str, tuple[Any, Any]]:
    """(old, new) of the settings that decide what is learned and differ, by `section.setting`."""
    before, after = flatten(old.config), flatten(new.config)
    names = [name for name in (before | after) if before.get(name) != after.get(name)]
    return {name: (before.get(name), after.get(name)) for name in names}


def differences(old: RunRecord, new: RunRecord, *, with_seed: bool = True) -> list[str]:
    """In which settings and devices two records differ, as "section.setting: old -> new"."""
    found = differing_settings(old, new)
    texts = [f"{name}: {before} -> {after}" for name, (before, after) in found.items() if with_seed or name != SEED]
    if old.device_name != new.device_name or old.world_size != new.world_size:
        texts.append(f"devices: {old.world_size} x {old.device_name} -> {new.world_size} x {new.device_name}")
    return texts


def stages_of(run: Run) -> list[Stage]:
    """The stages of a run, in order; one of a run that did not change. Resumptions as before begin no other."""
    stages = [Stage(first_step=1, info=run.stages[0])]
    for info in run.stages[1:]:
        before = stages[-1].info
        arithmetic = [f"{before.recipe} -> {info.recipe}"] if info.recipe != before.recipe else []
        if changes := (*arithmetic, *differences(before, info)):
            stages.append(Stage(first_step=(info.resumed_from_step or 0) + 1, info=info, changes=changes))
    return stages


def recipe_of(run: Run) -> str:
    """The arithmetic in words: "bf16", or "bf16, then from step 8 fp8 hybrid tensorwise" of a run that changed it."""
    stages = stages_of(run)
    text = stages[0].info.recipe
    for before, now in zip(stages, stages[1:], strict=False):
        if now.info.recipe != before.info.recipe:
            text += f", then from step {now.first_step} {now.info.recipe}"
        elif differing_settings(before.info, now.info):
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
