"""What each FP8 recipe costs in loss: one small model on real text, trained in every recipe from the same seeds.

    python benchmarks/recipe_quality.py [--recipes bf16 mxfp8-e4m3 ...] [--seeds 1 2 3] [--train-iters 300]

The text is the source of Python's standard library, the model a Llama-style GPT of two layers, 1 million parameters. A
seed sets initial weights and order of the data, and is the same for all recipes: the gap is taken within a seed,

    (final validation loss - that of bf16) / that of bf16

Two runs that differ in nothing but rounding drift apart too. How far is shown by `bf16-control`: the same BF16
arithmetic in two microbatches instead of one, so that gradients are summed in another order. A gap within the
control's is not one that this benchmark can tell from zero.

Every run is a process of `pretrain_gpt.py` on one thread; `--jobs` of them run at a time, so that step times are only
a hint. A run that has finished is not made again, unless its flags have changed. Recipes that cannot be trained here
are left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing  # noqa: E402
from megafp8.errors import ConfigError, DataError  # noqa: E402
from megafp8.reports.load import load_run  # noqa: E402

VOCABULARY = 2048
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 384 --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --qk-layernorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--bf16 --global-batch-size 16 --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.07 "
    "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --eval-iters 48 --log-interval 100 --num-threads 1 "
    "--num-workers 0 --no-progress-bar --no-save-optim --no-save-rng"
)
WHOLE_BATCH = "--micro-batch-size 16"
BASELINE, CONTROL = "bf16", "bf16-control"
RECIPES: Mapping[str, str] = {
    BASELINE: WHOLE_BATCH,
    CONTROL: "--micro-batch-size 8",
    "tensorwise-hybrid": f"{WHOLE_BATCH} --fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise-e4m3": f"{WHOLE_BATCH} --fp8-format e4m3 --fp8-recipe tensorwise",
    "delayed-hybrid": f"{WHOLE_BATCH} --fp8-format hybrid --fp8-recipe delayed",
    "delayed-hybrid-te-start": f"{WHOLE_BATCH} --fp8-format hybrid --fp8-recipe delayed --fp8-delayed-start te",
    "blockwise-e4m3": f"{WHOLE_BATCH} --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8-e4m3": f"{WHOLE_BATCH} --fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": f"{WHOLE_BATCH} --fp4-format e2m1 --fp4-recipe nvfp4",
}
WARMUP_STEPS = 10
MIN_REACH_FRACTION = 0.002  # of the picture to both sides: noise should not look like a finding
ERROR_LINES = 15


class Failed(Exception):
    """A process ended with an error; the text is the end of what it said."""


@dataclass(frozen=True)
class Result:
    """What one run found.

    Attributes:
        loss: final validation loss, nats per token.
        perplexity: of the same.
        step_ms: median over the steps after the first ten.
    """

    recipe: str
    seed: int
    loss: float
    perplexity: float
    step_ms: float


@dataclass(frozen=True)
class Row:
    """One recipe over all its seeds; fractions are relative to the baseline's loss of the same seed.

    Attributes:
        mean_loss: final validation loss, over all seeds.
        gaps_fraction: one a seed, in the order of `seeds`.
        spread_fraction: standard deviation of the gaps; None with one seed.
        step_ratio: median over the seeds of step time to the baseline's.
    """

    recipe: str
    seeds: tuple[int, ...]
    mean_loss: float
    gaps_fraction: tuple[float, ...]
    mean_gap_fraction: float
    spread_fraction: Optional[float]
    step_ratio: float


# --- the runs ---------------------------------------------------------------------------------------------------------


def run_process(argv: Sequence[str]) -> None:
    """Run a Python program of this project on one thread.

    Raises:
        Failed: it did not end well.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ended.returncode:
        tail = "\n".join(ended.stdout.splitlines()[-ERROR_LINES:])
        raise Failed(f"{shlex.join(argv)}\nended with {ended.returncode}:\n{tail}")


def tokenizer_flags(data: Path) -> list[str]:
    """The flags that name the tokenizer."""
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(data / "tokenizer.model")]


def prepare_data(data: Path) -> None:
    """Corpus, tokenizer and token shards, unless they are there.

    Raises:
        Failed: a tool did not end well.
    """
    if (data / "finished").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer = str(data / "corpus.jsonl"), str(data / "tokenizer")
    run_process(["tools/build_stdlib_corpus.py", "--output", corpus])
    run_process(["tools/train_tokenizer.py", "--input", corpus, "--vocab-size", str(VOCABULARY),
                 "--model-prefix", tokenizer])  # fmt: skip
    run_process(["tools/preprocess_data.py", "--input", corpus, "--output-prefix", str(data / "stdlib"), "--append-eod",
                 *tokenizer_flags(data)])  # fmt: skip
    (data / "finished").touch()


def command_of(recipe: str, seed: int, train_iters: int, folder: Path) -> list[str]:
    """The command line of one run, with its records below `folder`."""
    data = folder / "data"
    return [
        "pretrain_gpt.py", *MODEL.split(), *TRAINING.split(), *RECIPES[recipe].split(),
        "--train-iters", str(train_iters), "--eval-interval", str(train_iters), "--seed", str(seed),
        *tokenizer_flags(data), "--data-path", str(data / "stdlib_text_document"), "--split", "90,10,0",
        "--data-cache-path", str(data / "cache"), "--save", str(folder / f"{recipe}-seed{seed}"),
    ]  # fmt: skip


def reasons_against(recipe: str) -> list[str]:
    """Why a recipe cannot be trained here; empty if it can."""
    from megafp8.config import flags, rules
    from megafp8.device import capability

    try:
        config = flags.parse(command_of(recipe, 1, 1, Path("runs"))[1:]).config
    except ConfigError as error:
        return error.problems
    return rules.setting_problems(config, 1) + capability.problems(config, capability.detect_target())


def train(
    recipe: str, seed: int, train_iters: int, folder: Path, start: Callable[[Sequence[str]], None] = run_process
) -> Result:
    """One run, made now or before.

    Args:
        start: runs a command line to its end.

    Raises:
        Failed: the process did not end well.
        DataError: it left no usable records.
    """
    argv = command_of(recipe, seed, train_iters, folder)
    place = folder / f"{recipe}-seed{seed}"
    finished = place / "finished"
    if not finished.exists() or finished.read_text(encoding="utf-8") != shlex.join(argv):
        shutil.rmtree(place, ignore_errors=True)
        start(argv)
        result_of(recipe, seed, place)  # only what can be read counts as finished
        finished.write_text(shlex.join(argv), encoding="utf-8")
    return result_of(recipe, seed, place)


def result_of(recipe: str, seed: int, place: Path) -> Result:
    """Read the records of a run."""
    run = load_run(place)
    final = run.final_validation
    step_ms = run.series("step_ms")[min(WARMUP_STEPS, len(run.steps) // 2) :]
    return Result(recipe, seed, final.loss, final.perplexity, float(statistics.median(step_ms)))


def train_all(
    recipes: Sequence[str],
    seeds: Sequence[int],
    train_iters: int,
    folder: Path,
    jobs: int,
    start: Callable[[Sequence[str]], None] = run_process,
) -> Iterator[tuple[str, Result | Failed | DataError]]:
    """All runs, `jobs` at a time, a seed after the other; what each gave, as it comes."""
    with ThreadPoolExecutor(jobs) as pool:
        names = {
            pool.submit(train, recipe, seed, train_iters, folder, start): f"{recipe}, seed {seed}"
            for seed in seeds
            for recipe in recipes
        }
        for future in as_completed(names):
            try:
                yield names[future], future.result()
            except (Failed, DataError) as error:
                yield names[future], error


# --- the result -------------------------------------------------------------------------------------------------------


def summarize(results: Sequence[Result]) -> list[Row]:
    """A row for each recipe, from the seeds that both it and the baseline have finished."""
    baseline = {result.seed: result for result in results if result.recipe == BASELINE}
    rows = []
    for recipe in dict.fromkeys(result.recipe for result in results):
        mine = sorted((r for r in results if r.recipe == recipe and r.seed in baseline), key=lambda r: r.seed)
        if not mine:
            continue
        gaps = tuple(result.loss / baseline[result.seed].loss - 1 for result in mine)
        rows.append(
            Row(
                recipe=recipe,
                seeds=tuple(result.seed for result in mine),
                mean_loss=statistics.mean(result.loss for result in mine),
                gaps_fraction=gaps,
                mean_gap_fraction=statistics.mean(gaps),
                spread_fraction=statistics.stdev(gaps) if len(gaps) > 1 else None,
                step_ratio=statistics.median(result.step_ms / baseline[result.seed].step_ms for result in mine),
            )
        )
    order = list(RECIPES)
    return sorted(rows, key=lambda row: order.index(row.recipe))


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    header = ("recipe", "validation loss", "gap, mean", "standard deviation", "gap of each seed", "step to bf16")
    cells = [
        (
            row.recipe,
            f"{row.mean_loss:.4f}",
            "baseline" if row.recipe == BASELINE else f"{row.mean_gap_fraction:+.2%}",
            "" if row.recipe == BASELINE or row.spread_fraction is None else f"{row.spread_fraction:.2%}",
            "" if row.recipe == BASELINE else " ".join(f"{gap:+.2%}" for gap in row.gaps_fraction),
            f"{row.step_ratio:.2f}",
        )
        for row in rows
    ]
    return timing.format_table(header, cells)


def plot_gaps(rows: Sequence[Row], path: Path) -> None:
    """A picture: a dot for each seed's gap, a bar for the mean, and the control's range as a band behind."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    shown = [row for row in rows if row.recipe != BASELINE]
    figure = Figure(figsize=(9, 1.8 + 0.5 * len(shown)), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for row in shown:
        if row.recipe == CONTROL:
            reach = max(map(abs, row.gaps_fraction))
            axes.axvspan(-reach, reach, color="#adb5bd", alpha=0.3, linewidth=0)
    axes.axvline(0, color="#3a3f47", linewidth=1.2)
    for place, row in enumerate(shown):
        color = "#868e96" if row.recipe == CONTROL else "#1971c2"
        axes.plot(row.gaps_fraction, [place] * len(row.gaps_fraction), "o", color=color, alpha=0.6, markersize=7,
                  markeredgewidth=0)  # fmt: skip
        axes.plot(row.mean_gap_fraction, place, "|", color=color, markersize=22, markeredgewidth=3)
    axes.set_yticks(range(len(shown)), [row.recipe for row in shown], fontsize=12)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    reach = max([MIN_REACH_FRACTION, *(1.1 * abs(gap) for row in shown for gap in row.gaps_fraction)])
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=1 if reach > 0.002 else 2))
    axes.set_xlabel("gap of the final validation loss to bf16 of the same seed", fontsize=12)
    axes.set_title("dot: a seed   bar: their mean   band: bf16 against itself, summed in another order", loc="left",
                   fontsize=11, color="#495057")  # fmt: skip
    axes.grid(True, axis="x", color="#e9ecef")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, color="#adb5bd")
    figure.savefig(path)


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, help="default: all that can be trained here")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--train-iters", type=int, default=300, help="steps of a run (default 300)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one thread (default 2)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "recipe_quality",
                        help="data, runs and results (default runs/recipe_quality)")  # fmt: skip
    options = parser.parse_args(argv)
    options.folder = options.folder.resolve()
    return options


def choose(asked: Optional[Sequence[str]]) -> list[str]:
    """The recipes to train, the baseline first.

    Raises:
        ConfigError: one was asked for that cannot be trained here.
    """
    against = {recipe: reasons_against(recipe) for recipe in asked or RECIPES}
    impossible = {recipe: "; ".join(reasons) for recipe, reasons in against.items() if reasons}
    if asked and impossible:
        raise ConfigError([f"{recipe}: {reason}" for recipe, reason in impossible.items()])
    for recipe, reason in impossible.items():
        print(f"left out: {recipe}: {reason}", file=sys.stderr)
    return [recipe for recipe in RECIPES if recipe == BASELINE or (recipe in against and recipe not in impossible)]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 if a run failed."""
    options = parse(argv)
    try:
        recipes = choose(options.recipes)
    except ConfigError as error:
        print(f"recipe_quality: {error}", file=sys.stderr)
        return error.exit_status
    try:
        prepare_data(options.folder / "data")
    except Failed as error:
        print(f"recipe_quality: no data: {error}", file=sys.stderr)
        return 1
    results, failures = [], {}
    for name, result in train_all(recipes, options.seeds, options.train_iters, options.folder, options.jobs):
        if isinstance(result, Result):
            results.append(result)
            print(f"{name}: validation loss {result.loss:.4f}, {result.step_ms:.0f} ms a step", file=sys.stderr)
        else:
            failures[name] = str(result)
    rows = summarize(results)
    if rows:
        text = table(rows)
        print(text)
        (options.folder / "recipe_quality.md").write_text(text + "\n", encoding="utf-8")
        content = {"options": vars(options), "rows": rows, "runs": results, "failures": failures}
        timing.write_json(options.folder / "recipe_quality.json", json.loads(json.dumps(content, default=timing.plain)))
        if len(rows) > 1:
            plot_gaps(rows, options.folder / "recipe_quality.png")
    for name, text in failures.items():
        print(f"FAILED: {name}: {text}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
