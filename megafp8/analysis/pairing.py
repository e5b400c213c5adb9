"""Grouping of runs into recipes and pairs of one seed, and the differences in their settings and data.

Records have no hash of the data, only its paths. Shards with the same name in two folders count as copies, as on two
machines. Shards with different names count as different data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath
from typing import Any, Optional, Union

from megafp8.analysis.runs import LoadedRun, recipe_folder
from megafp8.config.data_blend import parse_blend
from megafp8.config.derived import DEFAULT_SPLIT, split_shares
from megafp8.config.schema.setting import Role
from megafp8.config.settings import all_settings, settings_with
from megafp8.config.variants import NEUTRAL_SETTINGS
from megafp8.metrics.records import RunRecord

SEED = "training.seed"


@dataclass(frozen=True)
class RunStage:
    """Steps of a run with the same settings, from `first_step` on.

    Attributes:
        changes: from the previous stage, as "section.setting: before -> now"; empty for the first.
    """

    first_step: int
    info: RunRecord
    changes: tuple[str, ...] = ()


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that affect the results of a run, by `section.setting`."""
    flat: dict[str, Any] = {}
    for section, settings in config.items():
        if isinstance(settings, dict):
            flat |= {f"{section}.{name}": value for name, value in settings.items()}
        else:
            flat[section] = settings
    neutral = settings_with(Role.OUTPUT)
    return {
        name: value for name, value in flat.items() if name not in neutral and not name.startswith(NEUTRAL_SETTINGS)
    }


def without_folders(paths: Union[None, str, Sequence[str]]) -> list[str]:
    """The last part of a path, or of each of several paths and blend weights."""
    return [PurePath(path).name for path in ([paths] if isinstance(paths, str) else paths or ())]


def seed_of(run: LoadedRun) -> int:
    """The seed of initialization, data order and dropout."""
    return flatten(run.info.config).get(SEED, 0)


def changed_settings(old: RunRecord, new: RunRecord) -> dict[str, tuple[Any, Any]]:
    """`differing_settings` of a run and its resumption, which may have the same files in other folders."""
    found = differing_settings(old, new)
    # On another machine; the run checks the samples itself.
    paths = {each.name for each in all_settings() if each.section == "data" and each.is_path}
    return {
        name: both for name, both in found.items()
        if name not in paths or without_folders(both[0]) != without_folders(both[1])
    }  # fmt: skip


def differing_settings(old: RunRecord, new: RunRecord) -> dict[str, tuple[Any, Any]]:
    """(old, new) of the settings that affect the results and differ, by `section.setting`.

    Settings of only one record are ignored: the other one is from another version of megafp8.
    """
    before, after = flatten(old.config), flatten(new.config)
    return {name: (before[name], after[name]) for name in before if name in after and before[name] != after[name]}


def differences(old: RunRecord, new: RunRecord, *, with_seed: bool = True) -> list[str]:
    """Differences between two records in settings and devices, as "section.setting: old -> new"."""
    return setting_texts(differing_settings(old, new), with_seed) + device_texts(old, new)


def setting_texts(settings: dict[str, tuple[Any, Any]], with_seed: bool = True) -> list[str]:
    """Changed settings as "section.setting: old -> new"."""
    return [f"{name}: {before} -> {after}" for name, (before, after) in settings.items() if with_seed or name != SEED]


def device_texts(old: RunRecord, new: RunRecord) -> list[str]:
    """Changed devices as "devices: 1 x cpu -> 2 x cpu"."""
    if old.device_name != new.device_name or old.world_size != new.world_size:
        return [f"devices: {old.world_size} x {old.device_name} -> {new.world_size} x {new.device_name}"]
    return []


def stages_of(run: LoadedRun) -> list[RunStage]:
    """The stages of a run, in order. A resumption without changes starts no new stage."""
    stages = [RunStage(first_step=1, info=run.stages[0])]
    for info in run.stages[1:]:
        before = stages[-1].info
        arithmetic = [f"{before.recipe} -> {info.recipe}"] if info.recipe != before.recipe else []
        if changes := (*arithmetic, *setting_texts(changed_settings(before, info)), *device_texts(before, info)):
            stages.append(RunStage(first_step=(info.resumed_from_step or 0) + 1, info=info, changes=changes))
    return stages


def recipe_of(run: LoadedRun) -> str:
    """The recipe in words: "bf16", or "bf16, then from step 8 fp8 hybrid tensorwise" for a run that changed it."""
    stages = stages_of(run)
    text = stages[0].info.recipe
    for before, now in zip(stages, stages[1:], strict=False):
        if now.info.recipe != before.info.recipe:
            text += f", then from step {now.first_step} {now.info.recipe}"
        elif changed_settings(before.info, now.info):
            text += f", from step {now.first_step} with other settings"
    return text


def settings_key(run: LoadedRun) -> list[Any]:
    """Settings and their first steps, without seed and devices; equal for runs that differ only in these."""
    settings = groupby(stages_of(run), key=lambda stage: (seedless(stage.info), stage.info.recipe))
    return [[next(stages).first_step, *key] for key, stages in settings]


def device_key(run: LoadedRun) -> list[Any]:
    """Devices of a run and their first steps."""
    devices = groupby(stages_of(run), key=lambda stage: (stage.info.device_name, stage.info.world_size))
    return [[next(stages).first_step, *key] for key, stages in devices]


def seedless(info: RunRecord) -> dict[str, Any]:
    """The settings that affect the results, without the seed."""
    return {name: value for name, value in flatten(info.config).items() if name != SEED}


def change_warnings(run: LoadedRun) -> list[str]:
    """A warning for each change of settings during the run."""
    return [
        f"{run.name} changed on the way, from step {stage.first_step} on: {'; '.join(stage.changes)}. Its figures are "
        "of all its steps, not of the last settings alone"
        for stage in stages_of(run)[1:]
    ]


def undrawn(run: LoadedRun) -> list[str]:
    """A warning if losses are missing in the plots, because they are not finite."""
    steps = [record.step for record in run.steps if not math.isfinite(record.loss)]
    steps += [record.step for record in run.evals_of("valid") if not math.isfinite(record.loss)]
    text = f"{run.name}: {len(steps)} losses, the first in step {min(steps, default=0)}, are infinite or not a number"
    return [f"{text}, and left out of the plots"] if steps else []


@dataclass(frozen=True, kw_only=True)
class RecipeRuns:
    """Runs that differ only in the seed, ordered by seed."""

    name: str
    runs: tuple[LoadedRun, ...]

    @property
    def folders(self) -> set[str]:
        """Folders of the seed folders, as `recipe_folder` names them."""
        return {folder for run in self.runs if (folder := recipe_folder(run.folder, run.name)) is not None}

    @property
    def text(self) -> str:
        """The recipe in words."""
        return recipe_of(self.runs[0])


@dataclass(frozen=True)
class Pair:
    """A run and the baseline's run of the same seed."""

    base: LoadedRun
    run: LoadedRun


def is_control(name: str) -> bool:
    """Whether a recipe is the baseline with another summation order, which shows the effect of rounding alone."""
    return name.endswith("-control")


def group_runs(runs: Sequence[LoadedRun]) -> list[RecipeRuns]:
    """Group runs into recipes, in the order of their first runs.

    A second run with the same settings and seed counts as another recipe. Seed folders with one parent folder stay
    together, and their recipe is named after the parent; others are named after their run.
    """
    parts: dict[tuple[str, str, int], list[LoadedRun]] = {}
    for run in runs:
        key = json.dumps([settings_key(run), device_key(run)], sort_keys=True)
        folder, repetition = recipe_folder(run.folder, run.name) or run.name, 0
        while any(seed_of(other) == seed_of(run) for other in parts.get((key, folder, repetition), ())):
            repetition += 1
        parts.setdefault((key, folder, repetition), []).append(run)
    groups: list[tuple[str, list[LoadedRun]]] = []
    for (key, _, _), part in parts.items():
        seeds = set(map(seed_of, part))
        same_key = (members for other, members in groups if other == key)
        members = next((members for members in same_key if seeds.isdisjoint(map(seed_of, members))), None)
        if members is None:
            groups.append((key, part))
        else:
            members.extend(part)
    recipes: list[RecipeRuns] = []
    for _, members in groups:
        taken = {recipe.name for recipe in recipes}
        recipes.append(RecipeRuns(name=_unique_name(members, taken), runs=tuple(sorted(members, key=seed_of))))
    return recipes


def pairs_of(baseline: RecipeRuns, recipe: RecipeRuns) -> list[Pair]:
    """Pairs of runs of one seed. Recipes with a single run each form a pair whatever their seeds."""
    if len(baseline.runs) == len(recipe.runs) == 1:
        return [Pair(baseline.runs[0], recipe.runs[0])]
    by_seed = {seed_of(run): run for run in baseline.runs}
    return [Pair(by_seed[seed_of(run)], run) for run in recipe.runs if seed_of(run) in by_seed]


def _unique_name(runs: Sequence[LoadedRun], taken: set[str]) -> str:
    folders = {recipe_folder(run.folder, run.name) for run in runs}
    name = folders.pop() if len(folders) == 1 else None
    if name is None:
        name = runs[0].name if len(runs) == 1 else recipe_of(runs[0])
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name} ({number})", number + 1
    return unique


TRAINING_TOKENS, VALIDATION_TOKENS = "number of training tokens", "number of validation tokens"
WARNINGS = {
    TRAINING_TOKENS: "{run} was last validated after {own:,} tokens, {base} after {other:,}: the gap is not one of the "
    "recipe alone",
    VALIDATION_TOKENS: "{run} was validated on {own:,} tokens, {base} on {other:,}: the losses are not of the same "
    "data",
    "seed": "{run} has seed {own}, {base} {other}: they are no pair",
}
DATA_WARNING = (
    "{run} has {name} {own}, {base} {other}: they did not learn from the same data in the same order, or were "
    "validated on other data, so their losses cannot be compared"
)


def data_warnings(pair: Pair) -> list[str]:
    """Differences between the two runs' data, tokens and seeds, with both values; numbers of training tokens first."""
    found = sorted(_differing_facts(pair).items(), key=lambda fact: fact[0] != TRAINING_TOKENS)
    return [
        WARNINGS.get(name, DATA_WARNING).format(
            run=pair.run.name, base=pair.base.name, name=name, own=own, other=other
        )
        for name, (own, other) in found
    ]  # fmt: skip


def other_data(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Differences in the data of any pair, whose gap then is not one of the recipe alone: "training data", "seed"."""
    return tuple(dict.fromkeys(name for pair in pairs for name in _differing_facts(pair)))


def _differing_facts(pair: Pair) -> dict[str, tuple[Any, Any]]:
    """(run's, baseline's) facts about data, tokens and seed that differ, of those that both have."""
    own, base = (_data_facts(run) | _token_facts(run) for run in (pair.run, pair.base))
    return {name: (own[name], base[name]) for name in own if name in base and own[name] != base[name]}


def _token_facts(run: LoadedRun) -> dict[str, int]:
    """Tokens of the last validation and before it, if there is one, and the seed."""
    last = run.last_validation
    tokens = {} if last is None else {VALIDATION_TOKENS: last.num_tokens, TRAINING_TOKENS: last.consumed_tokens}
    return tokens | {"seed": seed_of(run)}


def _data_facts(run: LoadedRun) -> dict[str, str]:
    """Facts about the data of all stages, each value once."""
    found: dict[str, dict[str, None]] = {}
    for stage in stages_of(run):
        for name, value in _stage_facts(stage.info).items():
            found.setdefault(name, {})[value] = None
    return {name: ", then ".join(values) for name, values in found.items()}


def _stage_facts(info: RunRecord) -> dict[str, str]:
    """Facts about the data that a record has."""
    data, facts = info.config.get("data", {}), {}
    if "data_path" in data:
        is_separate = any(data.get(f"{part}_data_path") for part in ("train", "valid", "test"))
        shards = data.get("train_data_path") or data["data_path"] or ()
        phases = ", then ".join(data.get("data_phases") or ())
        facts["training data"] = "mock data" if data.get("mock_data") else phases or _blend_text(shards)
        facts["split"] = "none" if is_separate else _split_text(data.get("split") or DEFAULT_SPLIT)
        facts["validation data"] = _blend_text(data.get("valid_data_path") or ()) if is_separate else "of the split"
    if "seq_length" in data:
        facts["sequence length"] = str(data["seq_length"])
    if (batch := _global_batch(info)) is not None:
        facts["global batch"] = batch
    return facts


def _global_batch(info: RunRecord) -> Optional[str]:
    """Sequences per step, and the flag of a batch schedule; None if the record does not have it."""
    training = info.config.get("training", {})
    micro, default = training.get("micro_batch_size"), None
    if "global_batch_size" in training and isinstance(micro, int):  # not "auto"
        default = micro * info.layout.get("data", 1)
    if schedule := training.get("step_batch_size_schedule"):
        return f"--step-batch-size-schedule {schedule!r}"
    size = training.get("global_batch_size") or default
    ramp = " ".join(map(str, training.get("rampup_batch_size") or ()))
    return None if size is None else f"{size} (--rampup-batch-size {ramp})" if ramp else str(size)


def _blend_text(words: Sequence[str]) -> str:
    """The last parts of the shards' names with their weights: "0.25 books, 0.75 web"."""
    if not words:
        return "none"
    blend = parse_blend(words)
    names = [PurePath(prefix).name for prefix in blend.prefixes]
    if blend.weights is None:
        return ", ".join(names)
    return ", ".join(f"{w / sum(blend.weights):.4g} {name}" for w, name in zip(blend.weights, names, strict=True))


def _split_text(split: str) -> str:
    """A split with shares that add up to 1, so that 98,1,1 and 980,10,10 are the same."""
    shares = split_shares(split)
    return ",".join(f"{share / sum(shares):.4g}" for share in shares)
