"""Quantize tensors, or the weights of a checkpoint, with FP8 and FP4 recipes and measure the errors.

    megafp8 inspect-quantization outliers:4096x4096
    megafp8 inspect-quantization activations.npy --operand input --recipes tensorwise mxfp8
    megafp8 inspect-quantization runs/quickstart/fp8 --parameter "decoder.*fc2.weight" --output-dir report

Each tensor is quantized as in the emulated layers, along its rows and along its columns where these differ.

    scale min, max   range of the dequantization scales; octaves: log2 of max / min
    underflow        fraction of the nonzero values that become zero
    scale zero       fraction of the nonzero values that become zero because their scale does; NVFP4 scales are E4M3
    saturated        fraction of the values beyond the largest number that their scale can represent
    SQNR             10 log10(sum of squares / sum of squared errors); the largest values dominate it
    local SQNR       median SQNR of groups of 32 adjacent values; small values count equally
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.cli.common import build_command_parser, install_patches, launcher_problems, returns_exit_status
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.utils.files import atomic_write_text, path_text, visible
from megafp8.utils.formatting import text_table
from megafp8.utils.strict_json import to_strict_json

if TYPE_CHECKING:
    from megafp8.metrics.recipe_comparison import QuantizationResult, Tensor

RECIPES = registry.names()
DEFAULT_RECIPES = (*(each.name for each in registry.stateless() if each.family == "fp8"), registry.DEFAULT_FP4)
STATEFUL_RECIPES = tuple(recipe.name for recipe in registry.stateful())
STOCHASTIC_RECIPES = tuple(recipe.name for recipe in registry.recipes() if recipe.is_stochastic({}))
FORMATS = ("e4m3", "e5m2")
OPERANDS = ("input", "weight", "grad_output")
WEIGHTS_OF_LINEARS = "decoder.layers.*.linear_*.weight"  # a full name: those of optimizer state contain it
HEADER = ("recipe", "format", "along", "block", "scale min", "scale max", "octaves", "underflow", "scale zero",
          "saturated", "SQNR dB", "local dB", "max error")  # fmt: skip
ALIGNMENT = "llll"
PICTURE, TABLE = "quantization.png", "quantization.json"


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        argument("source", "a .npy, .pt or .safetensors file; a random matrix, normal:RxC[:DEVIATION] or "
                 "outliers:RxC[:FACTOR]; a run's folder, or one checkpoint in it", type=path_text,
                 metavar="TENSOR_OR_CHECKPOINT"),
        argument("--recipes", f"recipes to apply (default: those of {' '.join(DEFAULT_RECIPES)} that take the tensor's "
                 f"shape); with --operand grad_output, {' and '.join(STOCHASTIC_RECIPES)} uses stochastic rounding",
                 nargs="+", choices=RECIPES),
        argument("--formats", "FP8 formats (default: both)", nargs="+", choices=FORMATS, default=FORMATS),
        argument("--operand", "role of the tensor in a linear layer; some recipes use other blocks for weights "
                 "(default: weight for a checkpoint, else input)", choices=OPERANDS),
        argument("--parameter", f"shell pattern of tensor names (default: {WEIGHTS_OF_LINEARS} for a checkpoint, all "
                 f"matrices of a file)", metavar="PATTERN"),
        int_flag("--ckpt-step", "step of the checkpoint (default: the newest)"),
        float_flag("--delayed-amax-ratio", "for recipes with an amax history: amax of the history divided by that of "
                   "the tensor; 0.5: the tensor's amax has doubled (default: 1)", default=1.0, metavar="R"),
        argument("--seed", "seed of a random matrix (default: 0)", type=int, default=0),
        path_flag("--output-dir", f"write {TABLE} and {PICTURE} to this folder", metavar="D"),
        switch("--json", "print JSON instead of the tables"),
    )  # fmt: skip


def tensors_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the source, one at a time."""
    from megafp8.metrics.recipe_comparison import is_distribution, load_tensor_file, sample_distribution

    path = Path(arguments.source)
    if is_distribution(arguments.source):
        yield arguments.source, sample_distribution(arguments.source, arguments.seed)
    elif path.is_dir():
        yield from checkpoint_tensors(path, arguments)
    else:
        yield from load_tensor_file(path, arguments.parameter).items()


def checkpoint_tensors(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a checkpoint, given by its own folder or its run's."""
    install_patches()
    from megafp8.checkpoint.resume_point import find_source
    from megafp8.checkpoint.standalone import load_matching

    yield from load_matching(find_source(folder, arguments.ckpt_step).path, arguments.parameter or WEIGHTS_OF_LINEARS)


def default_recipes(name: str, tensor: Tensor) -> list[str]:
    """The default recipes that take the shape of a tensor. The others are named on standard error."""
    from megafp8.metrics.recipe_comparison import shape_problem

    found = {recipe: shape_problem(tensor, recipe) for recipe in DEFAULT_RECIPES}
    for recipe in (recipe for recipe, problem in found.items() if problem):
        print(f"{visible(name)} without {recipe}: {found[recipe]}", file=sys.stderr)
    return [recipe for recipe, problem in found.items() if not problem]


def problems(arguments: argparse.Namespace) -> list[str]:
    """Return everything that is wrong with the flags."""
    found = []
    if not (math.isfinite(arguments.delayed_amax_ratio) and arguments.delayed_amax_ratio > 0):
        found.append(f"--delayed-amax-ratio {arguments.delayed_amax_ratio:g}: must be above 0")
    elif arguments.delayed_amax_ratio != 1 and not set(STATEFUL_RECIPES).intersection(arguments.recipes or ()):
        stateful = " or ".join(f"--recipes {name}" for name in STATEFUL_RECIPES)
        found.append(f"--delayed-amax-ratio has no effect without {stateful}")
    is_folder = Path(arguments.source).is_dir()
    if arguments.ckpt_step is not None and not is_folder:
        found.append("--ckpt-step has no effect: the source is no run's folder")
    if arguments.parameter is not None and ":" in arguments.source and not Path(arguments.source).exists():
        found.append("--parameter has no effect on a made-up tensor")
    return found + launcher_problems("does it")


def title_of(name: str, tensor: Tensor, results: Sequence[QuantizationResult]) -> str:
    """Return a line on the tensor itself."""
    stats = results[0].stats
    size = " x ".join(map(str, tensor.shape)) or "scalar"
    bad = f", {stats.num_non_finite} not finite" if stats.num_non_finite else ""
    return f"{name}   [{size}] {str(tensor.dtype).removeprefix('torch.')}, amax {stats.amax:.4g}{bad}"


def cells_of(result: QuantizationResult) -> list[str]:
    """Return a row of the table."""
    stats = result.stats
    return [
        result.recipe, result.format, result.orientation, block_of(result),
        number(stats.scale_min, ".4g"), number(stats.scale_max, ".4g"), number(stats.scale_spread_octaves, ".1f"),
        share(stats.underflow_fraction), share(stats.zero_scale_fraction), share(stats.saturated_fraction),
        number(stats.sqnr_db, ".2f"), number(stats.local_sqnr_db, ".2f"), number(stats.max_abs_error, ".3g"),
    ]  # fmt: skip


def block_of(result: QuantizationResult) -> str:
    """Describe the block that shares a scale, and further steps of the recipe."""
    return f"{result.granularity}, {result.extras}" if result.extras else result.granularity


def number(value: Optional[float], spec: str) -> str:
    """Format a number: `-` for None, `exact` for an infinite SQNR."""
    if value is None:
        return "-"
    return "exact" if value == math.inf else f"{value:{spec}}"


def share(fraction: float) -> str:
    """Format a fraction in percent, or in parts per million below 0.01%."""
    if fraction == 0:
        return "0"
    return f"{fraction:.3%}" if fraction >= 1e-4 else f"{fraction * 1e6:.2g} ppm"


def summary(results: Sequence[QuantizationResult]) -> str:
    """Return a row for each recipe, format and direction, over all tensors."""
    groups: dict[tuple[str, ...], list[QuantizationResult]] = {}
    for each in results:
        groups.setdefault((each.recipe, each.format, each.orientation, block_of(each)), []).append(each)
    rows = []
    for key, members in groups.items():
        measured = [(each.stats.sqnr_db, each.tensor) for each in members if each.stats.sqnr_db is not None]
        lowest_db, lowest_tensor = min(measured, key=lambda pair: pair[0], default=(None, "-"))
        rows.append([
            *key, str(len(members)),
            number(statistics.median(sqnr_db for sqnr_db, _ in measured) if measured else None, ".2f"),
            number(lowest_db, ".2f"),
            share(max(each.stats.underflow_fraction for each in members)),
            share(max(each.stats.saturated_fraction for each in members)),
            lowest_tensor,
        ])  # fmt: skip
    header = ("recipe", "format", "along", "block", "tensors", "median dB", "lowest dB", "most underflow",
              "most saturated", "lowest in")  # fmt: skip
    return text_table(header, rows, ALIGNMENT)


def draw(folder: Path, panels: Sequence[tuple[str, Sequence[QuantizationResult]]]) -> Path:
    """Plot a panel for each tensor, with a curve for each recipe, along its rows and in the first format."""
    from megafp8.analysis.plot_quantization import FormatRange, Panel, plot_ranges
    from megafp8.recipes.formats import E2M1, E4M3, E5M2

    ranges = [
        FormatRange(
            name=fmt.name.upper(),
            normal_octaves=math.log2(fmt.max / fmt.min_normal),
            subnormal_octaves=math.log2(fmt.max / fmt.min_subnormal),
        )
        for fmt in (E4M3, E5M2, E2M1)
    ]
    drawn = []
    for title, results in panels:
        counts: dict[str, Sequence[int]] = {}
        for each in results:
            if "row" in each.orientation:
                counts.setdefault(f"{each.recipe}, a scale per {each.granularity}", each.stats.octave_counts)
        drawn.append(Panel(title=title.replace("   ", "\n"), counts=counts))
    return plot_ranges(drawn, ranges, folder / PICTURE)


@returns_exit_status("inspect-quantization")
def main(argv: Sequence[str]) -> int:
    """Read, quantize and report; return the exit status. torch is imported only once the flags are read."""
    arguments = build_parser().parse_args(argv)
    from megafp8.metrics.recipe_comparison import inspect_tensor
    from megafp8.recipes.base import Operand

    if found := problems(arguments):
        raise ConfigError(found)
    operand = Operand(arguments.operand or ("weight" if Path(arguments.source).is_dir() else "input"))
    panels: list[tuple[str, list[QuantizationResult]]] = []
    for name, tensor in tensors_of(arguments):
        ratio = arguments.delayed_amax_ratio
        recipes = arguments.recipes or default_recipes(name, tensor)
        results = inspect_tensor(name, tensor, operand, recipes, arguments.formats, ratio)
        title = title_of(name, tensor, results)
        panels.append((title, results))
        if not arguments.json:
            table = text_table(HEADER, [cells_of(each) for each in results], ALIGNMENT)
            print(f"{visible(title)}\n{table}\n", flush=True)
    everything = [each for _, results in panels for each in results]
    data = to_strict_json([dataclasses.asdict(each) for each in everything])
    if arguments.json:
        print(data, end="")
    elif len(panels) > 1:
        print(f"all {len(panels)} tensors, as {operand.value}\n{summary(everything)}")
    if arguments.output_dir is not None:
        picture = draw(arguments.output_dir, panels)
        atomic_write_text(arguments.output_dir / TABLE, data)
        for path in (picture, arguments.output_dir / TABLE):
            print(visible(f"wrote {path}"), file=sys.stderr)
    return 0
