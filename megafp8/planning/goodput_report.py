"""Reports of the goodput of a run, as text and as JSON data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megafp8.planning import goodput
from megafp8.planning.goodput import DAY_S, GoodputInputs, time_parts
from megafp8.utils.formatting import duration_text, text_table


def goodput_data(inputs: GoodputInputs, gpu: str, sources: list[str]) -> dict[str, Any]:
    """All inputs and results, in seconds and fractions.

    Args:
        sources: where step time and checkpoint size come from.
    """
    mtbf_s, best = inputs.mean_time_between_failures_s, goodput.best_save_interval(inputs)
    used = inputs.save_interval or best
    parts = time_parts(inputs, used)
    return {
        "gpu": gpu,
        "inputs": dataclasses.asdict(inputs),
        "sources": sources,
        "mean_time_between_failures_s": None if math.isinf(mtbf_s) else mtbf_s,
        "save_interval": used,
        "best_save_interval": best,
        "young_interval_s": best and goodput.young_interval_s(inputs.stall_s, mtbf_s),
        "daly_interval_s": best and goodput.daly_interval_s(inputs.stall_s, mtbf_s),
        "at_intervals": {
            name: {"steps": steps, "effective_fraction": time_parts(inputs, steps)[goodput.USEFUL]}
            for name, steps in {"best": best, "--save-interval": inputs.save_interval}.items()
            if steps is not None
        },
        "effective_fraction": parts[goodput.USEFUL],
        "tokens_per_day": parts[goodput.USEFUL] * inputs.full_speed_tokens_per_day,
        "full_speed_tokens_per_day": inputs.full_speed_tokens_per_day,
        "parts": parts,
        "useful_part": goodput.USEFUL,
        "num_failures": inputs.failures_per_s * inputs.days * DAY_S,
    }  # fmt: skip


def goodput_text(data: dict[str, Any], cluster: str) -> str:
    """`goodput_data` as text.

    Args:
        cluster: the GPUs, for the first line.
    """
    inputs, mtbf_s = data["inputs"], data["mean_time_between_failures_s"]
    parts = [
        (name, f"{share:.2%}", f"{share * inputs['days'] * 24:,.1f}") for name, share in data["parts"].items()
    ]  # fmt: skip
    saves = [
        f"{name}: {at['steps']:,} steps between saves, {duration_text(at['steps'] * inputs['step_s'])}: "
        f"{at['effective_fraction']:.2%} effective"
        for name, at in data["at_intervals"].items()
    ]
    rates = (f"{inputs[f'{part}_failures_per_s'] * 1000 * DAY_S:.3g} per {part}" for part in ("gpu", "node"))
    return "\n".join([
        f"goodput of {inputs['days']:g} days on {cluster}",
        f"effective training time {data['effective_fraction']:.1%}: {data['tokens_per_day'] / 1e9:,.4g} billion tokens "
        f"per day, {data['full_speed_tokens_per_day'] / 1e9:,.4g} without failures and saves",
        f"{data['num_failures']:,.1f} failures" + (f", one every {duration_text(mtbf_s)}" if mtbf_s else ""),
        *(saves or ["never saved"]),
        "", text_table(("where the time goes", "share", "hours"), parts, "lrr"),
        "", "assumptions (docs/planning.md)", *(f"  {line}" for line in data["sources"]),
        f"  failures in 1,000 days: {' and '.join(rates)}; independent, exponential",
        f"  recovery: {inputs['detection_s']:g} s to detect a failure, {inputs['restart_s']:g} s to restart, "
        f"{inputs['load_s']:.3g} s to load",
        f"  saves: training stops for {inputs['stall_s']:.3g} s, complete after {inputs['write_s']:.3g} s",
    ])  # fmt: skip
