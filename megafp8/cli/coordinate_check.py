"""Train small models of several widths for a few steps, with and without muP, and compare the sizes of activations.

    megafp8 coordinate-check --output-dir runs/coordinates
    megafp8 coordinate-check --widths 128 512 2048 --recipes bf16 delayed nvfp4 --seeds 5 --output-dir runs/wide
    megafp8 coordinate-check --recipes mxfp8 --output-dir runs/deep -- --num-layers 8 --lr 5e-4

Where muP works, updates change each activation by as much in a wide model as in a narrow one, so that the learning rate
of the narrow model, the base of muP, fits all. Standard parametrization is the control: its activations grow with the
width. Heads have 32 channels, and their number grows, unless the flags after -- give --num-attention-heads.

Slopes are those of log(size) over log(width), with 95% intervals over seeds. An activation is flat if its interval
reaches into -0.1 to 0.1, and excludes -0.5 and 0.5, the smallest growth of the control; otherwise more --seeds decide.
One device trains the models one after the other. OUTPUT_DIR has coordinates.csv and a picture for each recipe. Exit
status: 0, also if something grows; 64 for wrong flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.cli.command_flags import add_flags, argument, int_flag, path_flag
from megafp8.cli.common import build_command_parser, install_patches, launcher_problems, returns_exit_status, stderr_log
from megafp8.config import dimensions, flags, rules, variants
from megafp8.config.settings import settings_by_flag
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.utils.files import atomic_write_text

if TYPE_CHECKING:
    from megafp8.training.coordinates import Sizes

HEAD_CHANNELS, TABLE = 32, "coordinates.csv"
DEFAULT_RECIPES = (variants.BASELINE, registry.DEFAULT_FP8)
MODEL = (
    "--num-layers 2 --seq-length 64 --vocab-size 255 --make-vocab-size-divisible-by 16 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --mock-data --num-workers 0 "
    "--micro-batch-size 4 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --weight-decay 0 "
    "--adam-beta2 0.95 --eval-iters 0 --cuda-graph-impl none"
)
"""No graph: the hooks would see the first step only."""
OWN_FLAGS = (
    "--hidden-size", "--ffn-hidden-size", "--use-mup", "--mup-base-hidden-size", "--mup-base-head-dim", "--seed",
    "--train-iters", "--reset-attention-mask",
)  # fmt: skip
log = stderr_log("coordinate-check: ")


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        path_flag("--output-dir", "folder of the table and the pictures (default %(default)s)", metavar="D",
                  default=Path("runs/coordinates")),
        int_flag("--widths", "hidden sizes; the smallest is the base of muP (default: 128 256 512)", nargs="+",
                 default=[128, 256, 512]),
        argument("--recipes", f"of {', '.join(variants.names())} (default: {' '.join(DEFAULT_RECIPES)})", nargs="+",
                 default=DEFAULT_RECIPES, metavar="NAME"),
        int_flag("--seeds", "seeds of each model, counted up from 1 (default %(default)s)", default=3),
        int_flag("--steps", "training steps of each model (default %(default)s)", default=8),
        argument("flags", "after --: further flags of all models", nargs="*", metavar="FLAGS"),
    )  # fmt: skip


def plan(options: argparse.Namespace) -> dict[tuple[str, str, int, int], list[str]]:
    """Return the flags of each model by recipe, parametrization, seed and width.

    Raises:
        ConfigError: everything that is wrong with any of them.
    """
    from megafp8.analysis.coordinates import MUP, STANDARD

    shared_words = [*MODEL.split(), "--train-iters", str(options.steps), *options.flags]
    shared, problems = variants.parse_shared_flags(shared_words, str(options.output_dir))
    given = flags.parse_with_problems(options.flags)[0].given
    own = [flag for flag in OWN_FLAGS if settings_by_flag()[flag].name in given]
    problems += [f"{flag} after --: set by the check; remove it" for flag in own]
    widths = sorted(set(options.widths))
    problems += ["--widths: give at least two"] if len(widths) < 2 else []
    problems += [f"--widths {widths[0]}: must be at least 1"] if widths[0] < 1 else []
    table = options.output_dir / TABLE
    problems += [f"{table} is there: give another --output-dir, or remove it"] if table.exists() else []
    if "model.num_attention_heads" not in given:
        uneven = [width for width in widths if width % HEAD_CHANNELS]
        problems += [f"--widths {width}: no multiple of {HEAD_CHANNELS}, the channels of a head" for width in uneven]
    problems += [f"--seeds {options.seeds}: must be at least 1"] if options.seeds < 1 else []
    problems += [f"--steps {options.steps}: must be at least 2: the first has no update"] if options.steps < 2 else []
    problems += launcher_problems("trains")
    if problems:
        raise ConfigError(problems)
    base = flags.parse_with_problems([*shared_words, *shape_flags(widths[0], given)])[0].config.model
    channels = dimensions.kv_channels(base)
    of_mup = ["--use-mup", "--mup-base-hidden-size", str(widths[0]), "--mup-base-head-dim", str(channels)]
    models = {
        (recipe, parametrization, seed, width): [
            *shared_words, *of_recipe, *own, "--seed", str(seed), *shape_flags(width, given)
        ]
        for recipe in dict.fromkeys(options.recipes)
        for of_recipe in [variants.build_variant(recipe, shared, 1).flags]
        for parametrization, own in ((STANDARD, []), (MUP, of_mup))
        for seed in range(1, options.seeds + 1)
        for width in widths
    }  # fmt: skip
    for words in models.values():
        parsed, found = flags.parse_with_problems(words)
        problems += found + rules.setting_problems(parsed.config, 1)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return models


def shape_flags(width: int, given: frozenset[str]) -> list[str]:
    """Return the flags of a width."""
    heads = [] if "model.num_attention_heads" in given else ["--num-attention-heads", str(width // HEAD_CHANNELS)]
    return ["--hidden-size", str(width), "--ffn-hidden-size", str(4 * width), *heads]


def measure(words: Sequence[str], num_steps: int) -> list[Sizes]:
    """Train the model of a command line, in a process of its own, whose memory and state end with it."""
    install_patches()
    from megafp8.training.checks import check
    from megafp8.training.coordinates import measure_coordinates

    validated = check(*flags.parse_with_problems(words))
    return measure_coordinates(validated.invocation.config, validated.implementation, num_steps)


def start_method() -> str:
    """How a process starts: forked where it can be, which imports everything once, but CUDA does not outlive a fork."""
    from megafp8.device.platform import has_cuda_device

    if has_cuda_device():
        return "spawn"
    install_patches()
    import megafp8.training.coordinates  # noqa: F401

    return "fork"


@returns_exit_status("coordinate-check")
def main(argv: Sequence[str]) -> int:
    """Measure, write the table and the pictures, and return the exit status."""
    options = build_parser().parse_args(argv)
    from megafp8.analysis import coordinates
    from megafp8.analysis.html import standalone_svg
    from megafp8.analysis.tables import to_csv

    models, rows = plan(options), list[coordinates.Coordinate]()
    table, context = options.output_dir / TABLE, get_context(start_method())
    for number, (key, words) in enumerate(models.items(), 1):
        log(f"{number} of {len(models)}: {', '.join(map(str, key))}")
        with ProcessPoolExecutor(1, context) as process:
            steps = process.submit(measure, words, options.steps).result()
        rows += [
            coordinates.Coordinate(*key, step, activation, *sizes)
            for step, by_name in enumerate(steps, 1) for activation, sizes in by_name.items()
        ]  # fmt: skip
        atomic_write_text(table, to_csv([row._asdict() for row in rows]))  # what an interrupted check leaves
    slopes = coordinates.fit_slopes(rows)
    print("\n".join([coordinates.slope_table(slopes), "", *coordinates.verdict_lines(slopes)]))
    log(f"wrote {table}")
    for recipe in dict.fromkeys(row.recipe for row in rows):
        path = options.output_dir / f"{recipe}.svg"
        figure = coordinates.plot_coordinates(rows, recipe)
        atomic_write_text(path, standalone_svg(figure, f"Activations of widths in {recipe}"))
        log(f"wrote {path}")
    return 0
