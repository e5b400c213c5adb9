"""Reports of a goodput study, as text and as JSON data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megafp8.planning.goodput import Goodput
from megafp8.planning.goodput_inputs import DAY_S, GoodputInputs
from megafp8.planning.goodput_simulation import PARTS, USEFUL
from megafp8.planning.save_interval import daly_interval_s, young_interval_s
from megafp8.utils.formatting import text_table

LITTLE_PROGRESS = 0.01
FEW_FAILURES = 5
"""A run with fewer failures is a matter of chance: its interval says more than its mean."""


def goodput_text(goodput: Goodput, cluster: str, sources: list[str]) -> str:
    """The complete study as text.

    Args:
        cluster: the GPUs, for the first line.
        sources: where step time and checkpoint size come from.
    """
    inputs = goodput.inputs
    sections = [
        f"goodput of {inputs.days:g} days on {cluster}, {interval_text(goodput)}: {inputs.replicas:,} simulated runs",
        summary_text(goodput),
        "where the time goes\n" + parts_table(goodput),
    ]
    if goodput.at_intervals:
        sections.append("time between saves\n" + intervals_table(goodput))
    if goodput.improvements:
        sections.append("what to improve first: one cost halved\n" + improvements_table(goodput))
    sections.append(
        "\n".join(["assumptions (docs/goodput.md)", *(f"  {line}" for line in assumptions(inputs, sources))])
    )
    return "\n\n".join(sections)


def interval_text(goodput: Goodput) -> str:
    """How often the run saves."""
    if goodput.save_interval is None:
        return "never saved"
    origin = "given" if goodput.inputs.save_interval else "best"
    interval = time_text(goodput.save_interval * goodput.inputs.step_s)
    return f"a save every {goodput.save_interval:,} steps, {interval} ({origin})"


def time_text(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, name in ((DAY_S, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.3g} s"


def tokens_text(tokens: float) -> str:
    """A number of tokens with three digits."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= unit:
            return f"{tokens / unit:.3g} {name}"
    return f"{tokens:,.0f}"


def summary_text(goodput: Goodput) -> str:
    """Effective time, tokens and interruptions, each with its range."""
    interval, full = goodput.interval, goodput.full_speed_tokens_per_day
    rows = [
        (
            "effective training time", f"{goodput.effective_fraction:.1%}",
            f"{interval.low:.1%} to {interval.high:.1%}",
            f"standard error of the mean {goodput.standard_error * 100:.2f} percentage points",
        ),
        (
            "tokens per day", tokens_text(goodput.tokens_per_day),
            f"{tokens_text(interval.low * full)} to {tokens_text(interval.high * full)}",
            f"{tokens_text(full)} without interruptions",
        ),
        ("failures", f"{goodput.num_failures:.1f}", "", f"one every {mtbf_text(goodput.inputs)}"),
        ("planned interruptions", f"{goodput.num_planned:.1f}", "", ""),
    ]  # fmt: skip
    table = text_table(("", "mean", f"{interval.coverage:.0%} of runs", ""), rows, "lrl")
    if goodput.effective_fraction < LITTLE_PROGRESS:
        table += "\nthe run hardly trains: it loses more to failures and saves than it computes"
    if goodput.num_failures < FEW_FAILURES:
        table += "\nfew failures: runs differ by chance more than by their settings"
    return table


def mtbf_text(inputs: GoodputInputs) -> str:
    """Mean time between failures."""
    mtbf_s = inputs.mean_time_between_failures_s
    return "infinity" if math.isinf(mtbf_s) else time_text(mtbf_s)


def parts_table(goodput: Goodput) -> str:
    """Share and hours of each part that takes time."""
    hours = goodput.inputs.duration_s / 3600
    rows = [
        (part, f"{goodput.parts[part]:.2%}", f"{goodput.parts[part] * hours:,.1f}")
        for part in PARTS if goodput.parts[part]
    ]  # fmt: skip
    return text_table(("", "share", "hours"), rows, "lrr")


def intervals_table(goodput: Goodput) -> str:
    """Effective time at each interval of interest."""
    inputs = goodput.inputs
    rows = [
        (name, f"{steps:,}", time_text(steps * inputs.step_s), f"{fraction:.2%}")
        for name, (steps, fraction) in goodput.at_intervals.items()
    ]
    return text_table(("", "steps", "time", "effective"), rows, "lrrr")


def improvements_table(goodput: Goodput) -> str:
    """The gain of each halved cost, the largest first."""
    full = goodput.full_speed_tokens_per_day
    rows = [
        (
            improvement.name, f"{improvement.effective_fraction:.2%}", f"{improvement.gain_fraction * 100:+.2f}",
            f"{improvement.gain_fraction * full / 1e9:+.2f}",
        )
        for improvement in goodput.improvements
    ]  # fmt: skip
    return text_table(("", "effective", "points", "B tokens/day"), rows, "lrrr")


def assumptions(inputs: GoodputInputs, sources: list[str]) -> list[str]:
    """The inputs in words, and what is not simulated."""
    spares = "one spare is always available"
    if inputs.spare_nodes is not None:
        spares = f"{inputs.spare_nodes:,} spare nodes, a replaced one returns after {time_text(inputs.repair_s)}"
    process = "independent, exponential"
    if inputs.failures_per_burst > 1:
        process = f"bursts of {inputs.failures_per_burst:g} on average, {time_text(inputs.burst_gap_s)} apart"
    kind = "asynchronous" if inputs.is_async else "synchronous"
    gpu, node, slow = (
        f"{rate * 1000 * DAY_S:.3g}"
        for rate in (inputs.gpu_failures_per_s, inputs.node_failures_per_s, inputs.stragglers_per_s)
    )
    lines = [
        *sources,
        f"failures: {gpu} per GPU and {node} per node in 1,000 days; {process}; {inputs.hang_fraction:.1%} hang, "
        f"{inputs.hardware_fraction:.0%} replace a node ({spares})",
        f"recovery: {inputs.detection_s:g} s to detect a crash, {inputs.hang_detection_s:g} s a hang; "
        f"{inputs.restart_s:g} s to restart; {inputs.load_s:.3g} s to load",
        f"saves: {kind}, training stops for {inputs.stall_s:.3g} s, complete after {inputs.write_s:.3g} s",
    ]
    if inputs.maintenance_interval_s is not None:
        between, duration = time_text(inputs.maintenance_interval_s), time_text(inputs.maintenance_s)
        lines.append(f"planned interruptions: every {between} for {duration}, then a restart")
    if inputs.stragglers_per_s:
        lines.append(
            f"stragglers: {slow} per 1,000 node-days, steps {inputs.straggler_slowdown:g} times as long, for "
            f"{time_text(inputs.straggler_s)} on average"
        )
    return [*lines, "training stops while a node is missing; a failure loses everything after the last complete save"]


def goodput_data(goodput: Goodput, gpu: str, sources: list[str]) -> dict[str, Any]:
    """The complete study as JSON data, in seconds and fractions."""
    inputs = goodput.inputs
    mtbf_s = inputs.mean_time_between_failures_s
    has_failures = not math.isinf(mtbf_s)
    full = goodput.full_speed_tokens_per_day
    return {
        "gpu": gpu,
        "inputs": dataclasses.asdict(inputs),
        "sources": sources,
        "mean_time_between_failures_s": mtbf_s if has_failures else None,
        "save_interval": goodput.save_interval,
        "best_save_interval": goodput.best and goodput.best.steps,
        "young_interval_s": young_interval_s(inputs.stall_s, mtbf_s) if has_failures else None,
        "daly_interval_s": daly_interval_s(inputs.stall_s, mtbf_s) if has_failures else None,
        "at_intervals": {
            name: {"steps": steps, "effective_fraction": fraction}
            for name, (steps, fraction) in goodput.at_intervals.items()
        },
        "searched_intervals": {
            str(steps): fraction for steps, fraction in (goodput.best.fractions if goodput.best else {}).items()
        },
        "effective_fraction": goodput.effective_fraction,
        "standard_error": goodput.standard_error,
        "interval": dataclasses.asdict(goodput.interval),
        "tokens_per_day": goodput.tokens_per_day,
        "tokens_per_day_interval": [goodput.interval.low * full, goodput.interval.high * full],
        "full_speed_tokens_per_day": full,
        "parts": goodput.parts,
        "useful_part": USEFUL,
        "num_failures": goodput.num_failures,
        "num_planned": goodput.num_planned,
        "improvements": [dataclasses.asdict(improvement) for improvement in goodput.improvements],
    }
