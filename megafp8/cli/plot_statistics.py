"""Plot the quantization statistics of a run with --fp8-log-interval, and print its findings.

    megafp8 plot-statistics runs/first --output-dir report
    megafp8 plot-statistics runs/first --field sqnr_db --recipe mxfp8 --output-dir report

Top: a field of the operands of every linear over the steps. Bottom: the codes of the last record, by exponent. The
experts of a layer have one row, of the worst expert. The load of experts is a picture of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from megafp8.cli.command_flags import add_flags, argument, path_flag
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.utils.files import path_text, visible

if TYPE_CHECKING:
    from megafp8.analysis.runs import LoadedRun

PICTURE, EXPERTS_PICTURE = "telemetry.png", "experts.png"
NUM_WORST = 5  # experts that are named
# Those of megafp8/analysis/plot_quantization.py, whose import is too slow for --help.
FIELDS = ("underflow_fraction", "saturated_fraction", "codes_changed_fraction", "update_to_weight", "sqnr_db",
          "mean_local_sqnr_db", "amax", "scale_spread_octaves", "staleness_octaves", "outlier_octaves")  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        argument("run", "folder of a run (its --save)", type=path_text, metavar="RUN"),
        argument("--field", f"field to plot (default: {FIELDS[0]})", choices=FIELDS, default=FIELDS[0]),
        argument("--recipe", "one of --fp8-what-if (default: the recipe of the run)", metavar="NAME"),
        path_flag("--output-dir", f"write {PICTURE} and {EXPERTS_PICTURE} here", default=Path("."), metavar="D"),
    )  # fmt: skip


@returns_exit_status("plot-statistics")
def main(argv: Sequence[str]) -> int:
    """Write the picture and print the findings; return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.analysis.plot_experts import plot_experts
    from megafp8.analysis.plot_quantization import plot_telemetry
    from megafp8.analysis.runs import load_run

    run = load_run(arguments.run)
    pictures = []
    if run.expert_records:
        pictures.append(plot_experts(run, arguments.output_dir / EXPERTS_PICTURE))
    if run.quantization_records or not pictures:
        picture = arguments.output_dir / PICTURE
        pictures.append(plot_telemetry(run, picture, field=arguments.field, recipe=arguments.recipe))
    for event in run.events:
        if event.name == "health":
            print(visible(f"step {event.step}: {event.detail}"))
    for line in worst_experts(run, arguments.field, arguments.recipe):
        print(visible(line))
    for picture in pictures:
        print(visible(f"wrote {picture}"), file=sys.stderr)
    return 0


def worst_experts(run: LoadedRun, field: str, recipe: Optional[str]) -> Iterator[str]:
    """The worst experts of the last statistics step, each of another tensor, where experts differ."""
    from megafp8.metrics.expert_statistics import LOW_IS_WORSE, expert_groups, spread_of

    if not run.quantization_records:
        return
    last = run.quantization_records[-1]
    tensors = last.tensors if recipe is None else last.what_if.get(recipe, {})
    found = [(name, len(each), spread_of(each, field)) for name, each in expert_groups(tensors).items()]
    known = [(spread, name, count) for name, count, spread in found if spread and spread.worst != spread.mean]
    known.sort(key=lambda item: item[0].worst, reverse=field not in LOW_IS_WORSE)
    for spread, name, count in known[:NUM_WORST]:
        yield (
            f"step {last.step}: {name}: {field} is worst in expert {spread.worst_expert}: {spread.worst:.4g}, "
            f"mean of {count} experts {spread.mean:.4g}"
        )
