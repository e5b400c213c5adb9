"""The runs of a comparison by forks: trunks in BF16, and from their checkpoints forks in every recipe.

    OUTPUT/trunks/seed1234                    a trunk, which saves at the steps of the forks
    OUTPUT/forks/RECIPE/seed1234-step400      a fork

A fork loads a checkpoint of its trunk with optimizer and random state, reads the samples that the trunk would read
next, and keeps the trunk's schedule of the learning rate. It saves nothing to resume from: an interrupted one restarts.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.config import flags, iterations, rules
from megafp8.config.rules.base import Rule
from megafp8.config.schema import RunConfig
from megafp8.config.variants import BASELINE, CONTROL, FORKS, TRUNKS, Variant, build_variant, control_variants
from megafp8.errors import ConfigError
from megafp8.launch.compared_runs import run_problems
from megafp8.launch.process_pool import PooledRun, training_command
from megafp8.resilience.run_state import current_state, finished_state, has_diverged

NUM_VALIDATIONS = 4
"""Of a fork, at equal distances."""
DEFAULT_LENGTH_PART = 8


@dataclass(frozen=True, kw_only=True)
class ForkPlan:
    """What a comparison by forks asks for.

    Attributes:
        flags: of all runs.
        steps: at which others fork, as in 200,400; empty: `num_points` at equal distances.
        length: of a fork, in steps; None: an eighth of the run.
        controls: settings that are known to be worse, and their good forms.
        compares_recipes: the recipes, too.
    """

    folder: Path
    flags: Sequence[str]
    num_seeds: int
    ranks: int = 1
    steps: str = ""
    num_points: int = 3
    length: Optional[int] = None
    controls: bool = False
    compares_recipes: bool = True

    def length_of(self, shared: RunConfig) -> int:
        """The steps of a fork."""
        if self.length is not None:
            return self.length
        steps = iterations.train_iters(shared, self.ranks) // DEFAULT_LENGTH_PART
        return max(1, steps // NUM_VALIDATIONS) * NUM_VALIDATIONS


class ForkRuns(NamedTuple):
    """The runs of a comparison by forks.

    Attributes:
        forks: by step and recipe, in the order in which they are trained.
        last_step: of a trunk.
        length: of a fork.
    """

    trunks: list[PooledRun]
    forks: list[PooledRun]
    last_step: int
    length: int


def fork_steps(plan: ForkPlan, shared: RunConfig) -> list[int]:
    """The steps of the trunks at which others fork, ascending.

    Raises:
        ConfigError: steps that are none, or a length that does not fit.
    """
    length, total = plan.length_of(shared), iterations.train_iters(shared, plan.ranks)
    checkpoint, problems = shared.checkpoint, list[str]()
    if length < NUM_VALIDATIONS or length % NUM_VALIDATIONS:
        problems.append(f"--fork-length {length} must be a multiple of {NUM_VALIDATIONS}, the validations of a fork")
    if checkpoint.ckpt_keep is not None or checkpoint.save_retain_interval is not None:
        problems.append("--forks: trunks keep the checkpoints of all forks; remove --ckpt-keep, --save-retain-interval")
    if shared.training.eval_iters == 0:
        problems.append("--forks compares validation losses; give --eval-iters 1 or more")
    if shared.optimizer.weight_decay_incr_style != "constant":
        problems.append("--forks: a --weight-decay that grows over --train-iters would be another one in a fork")
    if checkpoint.no_save_optim or checkpoint.no_save_rng:
        problems.append("--forks: forks load the complete state of their trunks; remove --no-save-optim, --no-save-rng")
    if shared.training.train_samples is not None:
        problems.append("--forks needs --train-iters in place of --train-samples: a fork has a number of steps")
    distance = max(1, length // NUM_VALIDATIONS)
    room = total - length
    parts = (number / (plan.num_points + 1) for number in range(1, plan.num_points + 1))
    defaults = [str(max(1, int(room * part) // distance) * distance) for part in parts]
    words = plan.steps.split(",") if plan.steps else list(dict.fromkeys(defaults))
    steps = sorted({int(word) for word in words if word.strip().isdecimal()})
    if len(steps) < len(words):
        problems.append(f"--forks {','.join(words)}: give different steps, as in 200,400,600")
    for step in steps:
        if step < 1 or step % distance:
            problems.append(f"--forks: step {step} must be a multiple of {distance}, the distance of the validations")
        elif step + length > total:
            problems.append(f"--forks: step {step} and --fork-length {length} end after --train-iters {total}")
    if problems:
        raise ConfigError(problems)
    return steps


def compared_variants(chosen: Sequence[Variant], shared: RunConfig, ranks: int) -> list[Variant]:
    """The baseline, the control if the batch has one, and the others.

    Raises:
        ConfigError: the first variant is not the baseline.
    """
    if chosen[0].name != BASELINE:
        raise ConfigError(f"--forks: the first of --recipes must be {BASELINE}, the precision of the trunks")
    names = [each.name for each in chosen]
    if CONTROL in names:
        return list(chosen)
    try:
        return [chosen[0], build_variant(CONTROL, shared, ranks), *chosen[1:]]
    except ConfigError:  # a global batch of one sequence has no other order of summation
        return list(chosen)


def plan_forks(
    plan: ForkPlan, shared: RunConfig, chosen: Sequence[Variant], device_flags: Sequence[str], script: Path,
    checked: tuple[Rule, ...] = rules.ALL_RULES,
) -> ForkRuns:  # fmt: skip
    """The trunks and the forks.

    Args:
        shared: settings of all runs.
        chosen: the baseline first.
        script: `pretrain_gpt.py`.

    Raises:
        ConfigError: everything that is wrong with any of them.
    """
    steps, ranks, length = fork_steps(plan, shared), plan.ranks, plan.length_of(shared)
    variants = compared_variants(chosen, shared, ranks) if plan.compares_recipes else []
    variants += control_variants(shared, ranks) if plan.controls else []
    counts = Counter(each.name for each in variants)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ConfigError(f"{', '.join(twice)}: named twice, by --controls, too: give the --variant another name")
    total, folder = iterations.train_iters(shared, ranks), plan.folder
    schedule = () if shared.optimizer.lr_decay_iters is not None else ("--lr-decay-iters", str(total))
    # They are trained first.
    before_trunks = tuple(rule for rule in checked if rule is not rules.paths.checkpoints_to_load_are_there)
    trunks, forks, problems = list[PooledRun](), list[PooledRun](), list[str]()

    def planned(name: str, path: Path, *own: str) -> PooledRun:
        words = [*device_flags, *plan.flags, *schedule, *own, "--save", str(path)]
        applied = before_trunks if "--ckpt-step" in own else checked
        # The runs of a recipe have the same problems.
        problems.extend(f"{name.partition('/')[0]}: {text}" for text in run_problems(words, ranks, path, applied))
        return PooledRun(name=name, command=training_command(script, ranks, words), folder=path, gpus=ranks)

    trunk_of = {
        seed: folder / TRUNKS / f"seed{seed}"
        for seed in range(shared.training.seed, shared.training.seed + plan.num_seeds)
    }
    for seed, trunk in trunk_of.items():
        if finished_state(trunk) is not None:
            problems += [
                f"{trunk} is done and has no checkpoint of step {step}: take another --output-dir"
                for step in steps if not checkpoint_path(trunk, step).is_dir()
            ]  # fmt: skip
        saves = ("--save-interval", str(math.gcd(*steps)), "--load", str(trunk), "--train-iters", str(steps[-1]))
        trunks.append(planned(f"trunk/seed{seed}", trunk, *chosen[0].flags, "--seed", str(seed), *saves))
    # The recipes one after the other: each has its interval over all trunks as early as can be.
    for step, variant, (seed, trunk) in itertools.product(steps, variants, trunk_of.items()):
        start = ("--seed", str(seed), "--load", str(trunk), "--ckpt-step", str(step), "--override-precision")
        ends = ("--train-iters", str(step + length), "--eval-interval", str(length // NUM_VALIDATIONS))
        name = f"{variant.name}/seed{seed}-step{step}"
        own = (*variant.flags, *start, *ends)
        own += high_precision_flags(variant, plan.flags) if plan.compares_recipes else ()
        forks.append(planned(name, folder / FORKS / name, *own, "--no-save-optim", "--no-save-rng"))
    problems += other_lengths(folder, length)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return ForkRuns(trunks, forks, steps[-1], length)


def other_lengths(folder: Path, length: int) -> list[str]:
    """Forks of another command in the folder, with which the report would mix these."""
    found = set()
    for path in (folder / FORKS).glob("*/seed*-step*"):
        state, step = current_state(path), path.name.rpartition("-step")[2]
        if state is not None and state.last_step is not None and step.isdecimal():
            found.add(state.last_step - int(step))
    others = sorted(found - {length})
    return [f"{folder} has forks of {', '.join(map(str, others))} steps: take another --output-dir"] if others else []


def has_result(run: PooledRun) -> bool:
    """Whether a run needs not be started: it is done, or it has diverged."""
    return finished_state(run.folder) is not None or has_diverged(run.folder)


def high_precision_flags(variant: Variant, shared: Sequence[str]) -> tuple[str, ...]:
    """A second validation in BF16 arithmetic, where the recipe has another one and its weights are not codes."""
    config = flags.parse_with_problems([*shared, *variant.flags])[0].config
    is_quantized = config.precision.fp8_format is not None or config.precision.fp4_format is not None
    return ("--eval-high-precision",) if is_quantized and not config.precision.fp8_param_gather else ()


def discard_partial_forks(forks: Sequence[PooledRun]) -> None:
    """Remove what interrupted forks left, since they restart from their trunks, and weights of those that are done.

    Raises:
        ConfigError: one is running.
    """
    for run in forks:
        state = current_state(run.folder)
        if state is not None and state.state == "running":
            raise ConfigError(f"{run.folder} is running: wait for the command that started it, or stop it")
    for run in forks:
        if has_result(run):
            discard_weights(run)
        elif run.folder.exists():
            shutil.rmtree(run.folder)


def discard_weights(run: PooledRun) -> None:
    """Remove the checkpoint of a fork that is done: its records are the result."""
    for checkpoint in run.folder.glob("iter_*"):
        shutil.rmtree(checkpoint)
