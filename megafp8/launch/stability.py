"""The runs of a stability suite: parts of paired runs, expanded by the machinery of studies (`launch/study.py`).

Every part is a grid of one study, so runs that two parts share are made once: the pairs of the first seeds are those of
the sweep at its first learning rate. `stability.json` in the suite's folder says which run belongs to which part; the
report reads it and the records only. Known-bad controls are forks of runs in BF16 (`launch/forks.py`), in the folder
`controls`: whole runs of these sizes drift apart by more than the controls cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from megafp8.config import flags as config_flags
from megafp8.config import precision_map, rules, variants
from megafp8.config.rules.base import Rule
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import settings_by_name, value_of, with_values
from megafp8.config.variants import BASELINE, CONTROL
from megafp8.errors import ConfigError, NumericsError
from megafp8.launch.built_in_sizes import (
    DROPOUT,
    MODEL_SETTINGS,
    SIZES,
    data_parallel_ranks,
    names_model,
    part_flags,
    rate_flags,
    shared_micro_batch_size,
    size_flags,
    without_settings,
)
from megafp8.launch.forks import ForkPlan, ForkRuns, plan_forks
from megafp8.launch.process_pool import PooledRun
from megafp8.launch.study import Grid, Option, Study, StudyRun, expand
from megafp8.launch.study_execution import DONE, StudyProgress, is_due
from megafp8.recipes.known_bad import KNOWN_BAD
from megafp8.utils.files import atomic_write_json

SUITE_FILE = "stability.json"
NUM_SEEDS = 5
PAIRS, SWEEP, CONTROLS, CONTINUATION = "pairs", "sweep", "controls", "continuation"
PARTS = {
    PAIRS: "paired runs over seeds, through the decay of the learning rate",
    SWEEP: "a sweep of the learning rate to divergence",
    CONTROLS: "settings that are known to be worse, each against its good form, as forks of runs in BF16",
    CONTINUATION: "continuation of a checkpoint in BF16 and in each recipe",
}
FAULTS_ELSEWHERE = "the suite plants no faults; use benchmarks/planted_faults.py"

PAIRED = (PAIRS, CONTROLS, CONTINUATION)
"""Parts whose verdicts are over paired seeds."""


@dataclass(frozen=True)
class PartSettings:
    """What all runs of a part share.

    Attributes:
        flags: on the command line of every run.
        config: the settings that they give.
        problems: what is wrong with them.
    """

    flags: tuple[str, ...]
    config: RunConfig
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What a suite asks for.

    Attributes:
        num_sweep_seeds: None: as many as the size says.
        flags: of all runs, after those of the size. A learning rate among them replaces that of the size; the minimum
            follows it, unless it is given, too. A model among them replaces that of the size completely.
        checkpoint: folder of the checkpoint that CONTINUATION continues.
        checkpoint_flags: its model, sequence length and tokenizer.
        slurm: fields of the jobs.
    """

    folder: Path
    size: str
    parts: tuple[str, ...]
    recipes: tuple[str, ...]
    num_seeds: int = NUM_SEEDS
    num_sweep_seeds: Optional[int] = None
    flags: tuple[str, ...] = ()
    checkpoint: str = ""
    checkpoint_flags: tuple[str, ...] = ()
    gpus: int = 1
    slurm: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def parsed(self) -> config_flags.ParsedArgs:
        """The flags of all runs, without those of the size; without its problems."""
        return config_flags.parse_with_problems(self.flags)[0]

    @cached_property
    def given(self) -> frozenset[str]:
        """Names of the settings that the flags of all runs give, each by a flag or in the --config file.

        A file may hold all settings, as that of a run does. It gives those that the suite sets only if it changes them.
        """
        config, from_file = self.parsed.config, self.parsed.from_file
        set_by_suite = from_file & {*SET_BY_SUITE, SET_BY_CONTROLS}
        defaults = {name for name in set_by_suite if value_of(config, name) == settings_by_name()[name].default}
        return self.parsed.given | (from_file - defaults)

    @cached_property
    def part_settings(self) -> Mapping[str, PartSettings]:
        """What all runs of each part share."""
        return {part: self._part_settings(part) for part in self.parts}

    def _part_settings(self, part: str) -> PartSettings:
        replaced = set(self.given)
        if part == CONTINUATION:
            # What the flags of all runs give stays theirs, and is compared with the checkpoint.
            theirs = {*self.parsed.from_file, *(MODEL_SETTINGS if names_model(self.parsed) else ())}
            saved = without_settings(self.checkpoint_flags, theirs)
            own = (*saved, *size_flags(SIZES[self.size], {*replaced, *MODEL_SETTINGS, "data.seq_length"}))
        else:
            replaced.update(set(MODEL_SETTINGS).difference(DROPOUT) if names_model(self.parsed) else ())
            own = size_flags(SIZES[self.size], replaced)
        rates = rate_flags(self.base_rate, self.given)
        words = (*own, *rates, *part_flags(self.size, part, self.given), *self.flags)
        parsed, problems = config_flags.parse_with_problems(words)
        config = parsed.config
        micro = shared_micro_batch_size(config, self.given, self.gpus)
        if micro is not None:
            words = (*words, "--micro-batch-size", str(micro))
            config = with_values(config, {"training.micro_batch_size": micro})
        return PartSettings(words, config, tuple(problems))

    @property
    def base_rate(self) -> float:
        """The learning rate as given, else that of the size; see `Size`."""
        rate = self.parsed.config.optimizer.lr if "optimizer.lr" in self.given else None
        return SIZES[self.size].lr if rate is None else rate


@dataclass(frozen=True)
class PartRun:
    """A run in a part. The same run may be in several parts.

    Attributes:
        choice: name of its option on each axis of the part.
    """

    part: str
    choice: Mapping[str, str]
    run: StudyRun


def build_study(suite: Suite) -> Study:
    """The study of a suite: one grid for each part.

    Raises:
        ConfigError: an unknown part or recipe, or flags that the suite sets itself.
    """
    if problems := suite_problems(suite):
        raise ConfigError(problems)
    if problems := list(dict.fromkeys(problem for part in suite.part_settings.values() for problem in part.problems)):
        raise ConfigError(problems)
    if problems := batch_problems(suite):
        raise ConfigError(problems)
    return Study(
        path=suite.folder / SUITE_FILE, name="stability", folder=suite.folder,
        common=Option(sizes={"gpus": float(suite.gpus)}), slurm=suite.slurm, slurm_flag="--job",
        grids=tuple(part_grid(suite, part) for part in suite.parts if part != CONTROLS),
    )  # fmt: skip


def plan_controls(suite: Suite, script: Path, checked: tuple[Rule, ...] = rules.ALL_RULES) -> ForkRuns:
    """The runs of the part CONTROLS.

    Raises:
        ConfigError: what is wrong with them.
    """
    shared, size = suite.part_settings[CONTROLS], SIZES[suite.size]
    plan = ForkPlan(
        folder=suite.folder / CONTROLS, flags=shared.flags, num_seeds=suite.num_seeds, ranks=suite.gpus,
        num_points=size.fork_points, length=None if "training.train_iters" in suite.given else size.fork_length,
        controls=True, compares_recipes=False,
    )  # fmt: skip
    config = with_values(shared.config, {"training.seed": 1})
    trunk = variants.build_variant(BASELINE, config, suite.gpus)
    try:
        return plan_forks(plan, config, [trunk], (), script, checked)
    except ConfigError as error:
        raise ConfigError([f"{CONTROLS}: {text.removeprefix('--forks: ')}" for text in error.problems]) from None


def batch_problems(suite: Suite) -> list[str]:
    """Global batches that the ranks of a run cannot share."""
    configs = [part.config for part in suite.part_settings.values()]
    shares = {(config.training.global_batch_size, data_parallel_ranks(config, suite.gpus)) for config in configs}
    return [
        f"--gpus {suite.gpus}: {replicas} data-parallel ranks cannot share the {batch} sequences of a step; use "
        "another number, or give --global-batch-size after --"
        for batch, replicas in shares
        if batch and replicas is not None and batch % replicas
    ]


def suite_problems(suite: Suite) -> list[str]:
    """What is wrong with a suite; empty if nothing is."""
    problems = [f"--parts {part}: choose from {', '.join(PARTS)}" for part in suite.parts if part not in PARTS]
    if "faults" in suite.parts:
        problems.append(f"--parts faults: {FAULTS_ELSEWHERE}")
    if CONTINUATION in suite.parts and not suite.checkpoint:
        problems.append(f"--parts {CONTINUATION}: give the checkpoint to continue with --checkpoint FOLDER")
    if suite.num_seeds < 2:
        problems.append(f"--seeds {suite.num_seeds}: intervals over seeds need at least 2")
    if suite.num_sweep_seeds is not None and suite.num_sweep_seeds < 2:
        problems.append(f"--sweep-seeds {suite.num_sweep_seeds}: intervals over seeds need at least 2")
    if BASELINE in suite.recipes or CONTROL in suite.recipes:
        problems.append(f"--recipes: {BASELINE} and {CONTROL} are in every suite; remove them")
    if not suite.recipes:
        problems.append(f"--recipes names no recipe: choose from {', '.join(variants.recipe_names())}")
    problems += [f"--recipes {variants.unknown_name_text(name, variants.recipe_names())}" for name in suite.recipes
                 if not variants.is_known(name)]  # fmt: skip
    return problems + flag_problems(suite)


SET_BY_SUITE = {
    "training.seed": "give the number of seeds with --seeds or --sweep-seeds",
    "checkpoint.use_checkpoint_args": f"give the checkpoint with --checkpoint: the part {CONTINUATION} takes its model",
    "checkpoint.pretrained_checkpoint": f"give it with --checkpoint, for the part {CONTINUATION}",
    **dict.fromkeys(variants.FOLDER_FLAGS, "give the folder of all runs with --output-dir"),
    **dict.fromkeys(variants.RECIPE_FLAGS, "name recipes with --recipes, such as delayed-e4m3"),
}
"""Settings that no part takes from the user, with what to do instead."""
SET_BY_CONTROLS = "precision.transformer_impl"


def flag_problems(suite: Suite) -> list[str]:
    """Flags of all runs that the suite sets itself, or with which it has no verdict."""
    config, given = suite.parsed.config, suite.given
    found = {name: f"set by the suite; remove it, and {text}" for name, text in SET_BY_SUITE.items() if name in given}
    if CONTROLS in suite.parts and SET_BY_CONTROLS in given:
        found[SET_BY_CONTROLS] = f"set by the part {CONTROLS}; remove it, or leave the part out of --parts"
    problems = [f"{settings_by_name()[name].flags[0]}: {text}" for name, text in found.items()]
    if precision_map.is_quantized(config.precision) and given.isdisjoint(variants.RECIPE_FLAGS):
        problems.append("the flags of all runs quantize, which would apply to bf16, too: name recipes with --recipes")
    if config.training.micro_batch_size == AUTO:
        problems.append("--micro-batch-size auto: each run could find a different size; give a number")
    if config.training.eval_iters == 0:
        problems.append("--eval-iters 0: verdicts are on the last validation; give at least 1")
    return problems


def part_grid(suite: Suite, part: str) -> Grid:
    """The grid of a part, with the axes `part`, `recipe` and `seed` and one of its own."""
    size, given, shared = SIZES[suite.size], suite.given, suite.part_settings[part]

    def recipes(*names: str) -> tuple[Option, ...]:
        built = (variants.build_variant(name, shared.config, suite.gpus) for name in names)
        return tuple(Option(name=variant.name, flags=variant.flags) for variant in built)

    def grid(recipes: tuple[Option, ...], num_seeds: int, **axes: tuple[Option, ...]) -> Grid:
        seeds = tuple(Option(name=f"seed{seed}", flags=("--seed", str(seed))) for seed in range(1, num_seeds + 1))
        return {"part": (Option(name=part, flags=shared.flags),), "recipe": recipes, **axes, "seed": seeds}

    if part == PAIRS:
        return grid(recipes(BASELINE, CONTROL, *suite.recipes), suite.num_seeds)
    if part == SWEEP:
        rates = [suite.base_rate * factor for factor in size.factors]
        lrs = tuple(Option(name=f"lr{rate:.3g}", flags=rate_flags(rate, given)) for rate in rates)
        return grid(recipes(BASELINE, *suite.recipes), suite.num_sweep_seeds or size.sweep_seeds, lr=lrs)
    start = Option(name="continued", flags=("--pretrained-checkpoint", suite.checkpoint))
    return grid(recipes(BASELINE, *suite.recipes), suite.num_seeds, start=(start,))


def part_runs(study: Study) -> list[PartRun]:
    """The runs of every part. Runs that parts share have the folder of the first.

    Raises:
        ConfigError: as `expand`.
    """
    first: dict[str, StudyRun] = {}
    found = []
    for grid in study.grids:
        for run in expand(dataclasses.replace(study, grids=(grid,))):
            choice = {axis: name for axis, name in run.choice.items() if axis != "part"}
            found.append(PartRun(run.choice["part"], choice, first.setdefault(run.id, run)))
    return found


def unique_runs(parts: Sequence[PartRun]) -> list[StudyRun]:
    """Every run once, in order."""
    return list({each.run.id: each.run for each in parts}.values())


def write_suite_file(suite: Suite, runs: Sequence[PartRun], controls: Sequence[PooledRun] = ()) -> Path:
    """Write the runs of every part to the suite's folder, for the report.

    Args:
        controls: the forks of known-bad controls and of their good forms.
    """
    content = {
        "size": suite.size, "parts": list(suite.parts), "recipes": list(suite.recipes), "seeds": suite.num_seeds,
        "lr": suite.base_rate,
        "known_bad": {name: f"{good}{variants.EMULATED_FORM}" for name, (good, _) in KNOWN_BAD.items()},
        "control_forks": [run.name for run in controls],
        "runs": [
            {"part": each.part, "folder": each.run.folder.name, "tokens": each.run.tokens, **each.choice}
            for each in runs
        ],
    }  # fmt: skip
    path = suite.folder / SUITE_FILE
    atomic_write_json(path, content)
    return path


def is_finished(progress: StudyProgress) -> bool:
    """Whether a run has a result: it is done, or it diverged, which the suite wants to know."""
    state = progress.found
    return progress.state == DONE or (state is not None and state.exit_status == NumericsError.exit_status)


def is_unfinished(progress: StudyProgress) -> bool:
    """Whether a run should be started or resumed."""
    return is_due(progress) and not is_finished(progress)
