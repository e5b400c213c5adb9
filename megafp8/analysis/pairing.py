"""Which settings decide what a run comes to, and from which step on a run had which of them.

Which runs are one recipe under several seeds, and which are pairs of one seed.

Whether two runs learned from the same samples in the same order, and were validated on the same text.

Records hold no hash of the data. They hold where it lay: shards of one name in two folders are taken for copies, as two
machines have them, and shards of other names for other data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath
from typing import Any, Optional, Union

from megafp8.analysis.runs import LoadedRun, recipe_folder
from megafp8.config.data_blend import parse_blend
from megafp8.config.derived import DEFAULT_SPLIT, split_shares
from megafp8.config.variants import NEUTRAL_SETTINGS
from megafp8.metrics.records import RunRecord

SEED = "training.seed"
# How a run is watched and stopped, which a resumption may well do otherwise.
MONITORING = (
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
class RunStage:
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
    return {name: value for name, value in flat.items() if not name.startswith((*NEUTRAL_SETTINGS, *MONITORING))}


def without_folders(paths: Union[None, str, Sequence[str]]) -> list[str]:
    """The last parts of a path, or of shards and their weights."""
    return [PurePath(path).name for path in ([paths] if isinstance(paths, str) else paths or ())]


def seed_of(run: LoadedRun) -> int:
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


def stages_of(run: LoadedRun) -> list[RunStage]:
    """The stages of a run, in order; one of a run that did not change. Resumptions as before begin no other."""
    stages = [RunStage(first_step=1, info=run.stages[0])]
    for info in run.stages[1:]:
        before = stages[-1].info
        arithmetic = [f"{before.recipe} -> {info.recipe}"] if info.recipe != before.recipe else []
        if changes := (*arithmetic, *texts_of(changed_settings(before, info)), *device_texts(before, info)):
            stages.append(RunStage(first_step=(info.resumed_from_step or 0) + 1, info=info, changes=changes))
    return stages


def recipe_of(run: LoadedRun) -> str:
    """The arithmetic in words: "bf16", or "bf16, then from step 8 fp8 hybrid tensorwise" of a run that changed it."""
    stages = stages_of(run)
    text = stages[0].info.recipe
    for before, now in zip(stages, stages[1:], strict=False):
        if now.info.recipe != before.info.recipe:
            text += f", then from step {now.first_step} {now.info.recipe}"
        elif changed_settings(before.info, now.info):
            text += f", from step {now.first_step} with other settings"
    return text


def settings_key(run: LoadedRun) -> list[Any]:
    """What runs agree in that differ in their seed alone: settings, and from which steps on; devices are not in it."""
    settings = groupby(stages_of(run), key=lambda stage: (seedless(stage.info), stage.info.recipe))
    return [[next(stages).first_step, *key] for key, stages in settings]


def device_key(run: LoadedRun) -> list[Any]:
    """On what a run was made, and from which steps on."""
    devices = groupby(stages_of(run), key=lambda stage: (stage.info.device_name, stage.info.world_size))
    return [[next(stages).first_step, *key] for key, stages in devices]


def seedless(info: RunRecord) -> dict[str, Any]:
    """What decides what is learned, but for the seed."""
    return {name: value for name, value in flatten(info.config).items() if name != SEED}


def change_warnings(run: LoadedRun) -> list[str]:
    """What changed on the way, a line for each time."""
    return [
        f"{run.name} changed on the way, from step {stage.first_step} on: {'; '.join(stage.changes)}. Its figures are "
        "of all its steps, not of the last settings alone"
        for stage in stages_of(run)[1:]
    ]


@dataclass(frozen=True, kw_only=True)
class RecipeRuns:
    """Runs that differ in nothing but the seed, in its order."""

    name: str
    runs: tuple[LoadedRun, ...]

    @property
    def folders(self) -> set[str]:
        """Those whose runs are called after seeds, as `recipe_folder` names them."""
        return {folder for run in self.runs if (folder := recipe_folder(run.folder, run.name)) is not None}

    @property
    def text(self) -> str:
        """The arithmetic in words."""
        return recipe_of(self.runs[0])


@dataclass(frozen=True)
class Pair:
    """A run and the baseline's run of the same seed."""

    base: LoadedRun
    run: LoadedRun


def is_control(name: str) -> bool:
    """Whether a recipe is the baseline in another order of sums, which shows what mere rounding does."""
    return name.endswith("-control")


def group_runs(runs: Sequence[LoadedRun]) -> list[RecipeRuns]:
    """Recipes in the order of their first runs. A second run with the same settings and seed counts as another recipe.

    Runs of one folder that are called seed1, seed2 and so on stay together, and the recipe is named after the folder;
    others after their run.
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
        of_key = (members for other, members in groups if other == key)
        members = next((members for members in of_key if seeds.isdisjoint(map(seed_of, members))), None)
        if members is None:
            groups.append((key, part))
        else:
            members.extend(part)
    recipes: list[RecipeRuns] = []
    for _, members in groups:
        taken = {recipe.name for recipe in recipes}
        recipes.append(RecipeRuns(name=_name_of(members, taken), runs=tuple(sorted(members, key=seed_of))))
    return recipes


def pairs_of(baseline: RecipeRuns, recipe: RecipeRuns) -> list[Pair]:
    """The pairs of one seed. Two recipes of a single run each are a pair whatever their seeds."""
    if len(baseline.runs) == len(recipe.runs) == 1:
        return [Pair(baseline.runs[0], recipe.runs[0])]
    of_seed = {seed_of(run): run for run in baseline.runs}
    return [Pair(of_seed[seed_of(run)], run) for run in recipe.runs if seed_of(run) in of_seed]


def _name_of(runs: Sequence[LoadedRun], taken: set[str]) -> str:
    folders = {recipe_folder(run.folder, run.name) for run in runs}
    name = folders.pop() if len(folders) == 1 else None
    if name is None:
        name = runs[0].name if len(runs) == 1 else recipe_of(runs[0])
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name} ({number})", number + 1
    return unique


def data_warnings(pair: Pair) -> list[str]:
    """What the two runs have otherwise, with both values."""
    run, base = pair.run, pair.base
    texts = [
        f"{run.name} has {name} {ours}, {base.name} {theirs}: they did not learn from the same data in the same order, "
        "or were validated on other data, so nothing is decided"
        for name, (ours, theirs) in _differing(pair).items()
    ]
    if (tokens := _validation_tokens(pair)) is not None:
        texts.append(
            f"{run.name} was validated on {tokens[0]:,} tokens, {base.name} on {tokens[1]:,}: "
            "the losses are not of the same data"
        )
    if seed_of(run) != seed_of(base):
        texts.append(f"{run.name} has seed {seed_of(run)}, {base.name} {seed_of(base)}: they are no pair")
    return texts


def other_data(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """In what any of the pairs differs so that its gap is not one of the recipe: "training data", "seed"."""
    names: dict[str, None] = {}
    for pair in pairs:
        names |= dict.fromkeys(_differing(pair))
        names |= {"number of validation tokens": None} if _validation_tokens(pair) is not None else {}
        names |= {"seed": None} if seed_of(pair.run) != seed_of(pair.base) else {}
    return tuple(names)


def _differing(pair: Pair) -> dict[str, tuple[str, str]]:
    """(run's, baseline's) facts that differ. What a run's records do not say is no difference."""
    ours, theirs = _facts_of(pair.run), _facts_of(pair.base)
    return {name: (ours[name], theirs[name]) for name in ours if name in theirs and ours[name] != theirs[name]}


def _validation_tokens(pair: Pair) -> Optional[tuple[int, int]]:
    """Those of the last validations of the run and of the baseline, where both have one and they differ."""
    ours, theirs = pair.run.last_validation, pair.base.last_validation
    if ours is None or theirs is None or ours.num_tokens == theirs.num_tokens:
        return None
    return ours.num_tokens, theirs.num_tokens


def _facts_of(run: LoadedRun) -> dict[str, str]:
    """Of all stages, each value once."""
    found: dict[str, dict[str, None]] = {}
    for stage in stages_of(run):
        for name, value in _facts(stage.info).items():
            found.setdefault(name, {})[value] = None
    return {name: ", then ".join(values) for name, values in found.items()}


def _facts(info: RunRecord) -> dict[str, str]:
    """What a record says, and nothing of what it does not."""
    data, facts = info.config.get("data", {}), {}
    if "data_path" in data:
        is_apart = any(data.get(f"{part}_data_path") for part in ("train", "valid", "test"))
        shards = data.get("train_data_path") or data["data_path"] or ()
        facts["training data"] = "mock data" if data.get("mock_data") else _blend_text(shards)
        facts["split"] = "none" if is_apart else _split_text(data.get("split") or DEFAULT_SPLIT)
        facts["validation data"] = _blend_text(data.get("valid_data_path") or ()) if is_apart else "of the split"
    if "seq_length" in data:
        facts["sequence length"] = str(data["seq_length"])
    if (batch := _global_batch(info)) is not None:
        facts["global batch"] = str(batch)
    return facts


def _global_batch(info: RunRecord) -> Optional[int]:
    """Sequences of a step; None where the record does not say."""
    training = info.config.get("training", {})
    micro, default = training.get("micro_batch_size"), None
    if "global_batch_size" in training and isinstance(micro, int):  # not auto
        default = micro * info.layout.get("data", 1)
    return training.get("global_batch_size") or default


def _blend_text(words: Sequence[str]) -> str:
    """The shards by the last part of their names, with their shares: "0.25 books, 0.75 web"."""
    if not words:
        return "none"
    blend = parse_blend(words)
    names = [PurePath(prefix).name for prefix in blend.prefixes]
    if blend.weights is None:
        return ", ".join(names)
    return ", ".join(f"{w / sum(blend.weights):.4g} {name}" for w, name in zip(blend.weights, names, strict=True))


def _split_text(split: str) -> str:
    """Shares that add up to 1: 98,1,1 and 980,10,10 are the same."""
    shares = split_shares(split)
    return ",".join(f"{share / sum(shares):.4g}" for share in shares)
