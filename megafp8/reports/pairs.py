"""Which runs are one recipe under several seeds, and which are pairs of one seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from megafp8.reports.load import Run, recipe_folder
from megafp8.reports.settings import device_key, recipe_of, seed_of, settings_key


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Runs that differ in nothing but the seed, in its order."""

    name: str
    runs: tuple[Run, ...]

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

    base: Run
    run: Run


def is_control(name: str) -> bool:
    """Whether a recipe is the baseline in another order of sums, which shows what mere rounding does."""
    return name.endswith("-control")


def group_runs(runs: Sequence[Run]) -> list[Recipe]:
    """Recipes in the order of their first runs. A second run with the same settings and seed counts as another recipe.

    Runs of one folder that are called seed1, seed2 and so on stay together, and the recipe is named after the folder;
    others after their run.
    """
    parts: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        key = json.dumps([settings_key(run), device_key(run)], sort_keys=True)
        folder, repetition = recipe_folder(run.folder, run.name) or run.name, 0
        while any(seed_of(other) == seed_of(run) for other in parts.get((key, folder, repetition), ())):
            repetition += 1
        parts.setdefault((key, folder, repetition), []).append(run)
    groups: list[tuple[str, list[Run]]] = []
    for (key, _, _), part in parts.items():
        seeds = set(map(seed_of, part))
        of_key = (members for other, members in groups if other == key)
        members = next((members for members in of_key if seeds.isdisjoint(map(seed_of, members))), None)
        if members is None:
            groups.append((key, part))
        else:
            members.extend(part)
    recipes: list[Recipe] = []
    for _, members in groups:
        taken = {recipe.name for recipe in recipes}
        recipes.append(Recipe(name=_name_of(members, taken), runs=tuple(sorted(members, key=seed_of))))
    return recipes


def pairs_of(baseline: Recipe, recipe: Recipe) -> list[Pair]:
    """The pairs of one seed. Two recipes of a single run each are a pair whatever their seeds."""
    if len(baseline.runs) == len(recipe.runs) == 1:
        return [Pair(baseline.runs[0], recipe.runs[0])]
    of_seed = {seed_of(run): run for run in baseline.runs}
    return [Pair(of_seed[seed_of(run)], run) for run in recipe.runs if seed_of(run) in of_seed]


def _name_of(runs: Sequence[Run], taken: set[str]) -> str:
    folders = {recipe_folder(run.folder, run.name) for run in runs}
    name = folders.pop() if len(folders) == 1 else None
    if name is None:
        name = runs[0].name if len(runs) == 1 else recipe_of(runs[0])
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name} ({number})", number + 1
    return unique
