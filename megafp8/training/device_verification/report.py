"""The report of a verified device: Markdown for an issue, JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from megafp8.device.capability import capability_text
from megafp8.training.device_verification.casts import CastComparison
from megafp8.training.device_verification.linears import largest
from megafp8.training.device_verification.verify import Verification
from megafp8.utils.strict_json import finite_or_null

SHOWN_DIFFERENCES = 20


def report_data(found: Verification) -> dict[str, Any]:
    """All results for JSON; numbers that are not finite are None."""
    return finite_or_null({"ok": not found.problems, "problems": found.problems, **dataclasses.asdict(found)})


def report_text(found: Verification) -> str:
    """The report in Markdown."""
    device = found.device
    capability = "" if device.compute_capability is None else f", {capability_text(device.compute_capability)}"
    native = ", ".join(device.native_recipes) or "none"
    lines = [f"# {device.name}{capability}", "", f"Native recipes: {native}.", ""]
    lines += table(("package", "version"), device.versions.items())
    problems = found.problems
    lines += ["", "## Verdict", ""]
    agreed = "Everything that was compared agrees." if found.has_compared else "Nothing native was compared."
    lines += [f"- {problem}" for problem in problems] or [agreed, ""]
    lines += [f"- NOT RUN: {part}: {reason}" for part, reason in found.not_run.items()]
    sections = {
        "Casts: codes and scales, byte for byte": cast_rows(found.casts),
        "Emulation on this GPU and on the CPU": cast_rows(found.emulation),
        "Linears: the largest difference as a fraction of its bound": linear_rows(found),
        "Ten training steps": step_rows(found),
        "Speed of a linear, forward and backward pass, with casts": speed_rows(found),
        "Attention backends, BF16": attention_rows(found),
    }
    for title, rows in sections.items():
        if len(rows) > 1:
            lines += ["", f"## {title}", "", *table(rows[0], rows[1:])]
    differing = [f"{each.recipe} {each.format}: {line}" for each in found.casts for line in each.differing]
    if differing:
        lines += ["", "## Casts that differ", "", *(f"- {line}" for line in differing[:SHOWN_DIFFERENCES])]
        lines += [f"- and {len(differing) - SHOWN_DIFFERENCES} more"] * (len(differing) > SHOWN_DIFFERENCES)
    return "\n".join(lines) + "\n"


Rows = list[Sequence[str]]


def cast_rows(comparisons: Iterable[CastComparison]) -> Rows:
    """Header and rows."""
    rows: Rows = [("recipe", "format", "casts", "differing")]
    return rows + [(each.recipe, each.format, str(each.compared), str(len(each.differing))) for each in comparisons]


def linear_rows(found: Verification) -> Rows:
    """Header and rows, one for a recipe and format."""
    rows: Rows = [("recipe", "format", "largest", "fprop rms", "dgrad rms", "wgrad rms")]
    for (recipe, number_format), group in itertools.groupby(found.linears, lambda each: (each.recipe, each.format)):
        comparisons = list(group)
        errors = {each.gemm: each.rms_error for each in comparisons}  # of the largest sizes, which come last
        texts = (f"{errors[gemm]:.1e}" if gemm in errors else "" for gemm in ("fprop", "dgrad", "wgrad"))
        rows.append((recipe, number_format, f"{largest(comparisons):.2f}", *texts))
    return rows


def step_rows(found: Verification) -> Rows:
    """Header and rows."""
    rows: Rows = [("recipe", "format", "native against emulated", "last loss, emulated")]
    for each in found.steps:
        gap = each.failure or ("emulated only" if each.gap is None else f"{each.gap:.1e}")
        last = "" if each.last_loss is None else f"{each.last_loss:.4f}"
        rows.append((each.recipe, each.format, " ".join(gap.split()), last))
    return rows


def speed_rows(found: Verification) -> Rows:
    """Header and rows."""
    rows: Rows = [("tokens x inputs x outputs", "recipe", "ms", "to BF16")]
    for each in found.speed:
        rows.append((" x ".join(map(str, each.sizes)), each.recipe or "bf16", f"{each.ms:.3f}", f"{each.speedup:.2f}"))
    return rows


def attention_rows(found: Verification) -> Rows:
    """Header and rows."""
    rows: Rows = [("backend", "ms", "error against FP32")]
    for each in found.attention:
        if each.error is None or each.ms is None:
            rows.append((each.backend, "", each.wrong or f"not available: {each.unavailable}"))
        else:
            rows.append((each.backend, f"{each.ms:.3f}", f"{each.error:.1e}"))
    return rows


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]
