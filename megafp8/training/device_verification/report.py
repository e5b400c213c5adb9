"""The report of a verified device: Markdown for an issue, JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megafp8.device.capability import capability_text
from megafp8.training.device_verification.verify import Verification
from megafp8.utils.strict_json import finite_or_null

SHOWN_DIFFERENCES = 20
CAST_HEADER = ("recipe", "format", "casts", "differing")


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
    lines += ["", "## Verdict", ""]
    agreed = "Everything that was compared agrees." if found.has_compared else "Nothing native was compared."
    lines += [f"- {problem}" for problem in found.problems] or [agreed, ""]
    lines += [f"- NOT RUN: {part}: {reason}" for part, reason in found.not_run.items()]
    for title, header, rows in sections(found):
        if rows:
            lines += ["", f"## {title}", "", *table(header, rows)]
    differing = [f"{each.recipe} {each.format}: {line}" for each in found.casts for line in each.differing]
    if differing:
        lines += ["", "## Casts that differ", "", *(f"- {line}" for line in differing[:SHOWN_DIFFERENCES])]
        lines += [f"- and {len(differing) - SHOWN_DIFFERENCES} more"] * (len(differing) > SHOWN_DIFFERENCES)
    return "\n".join(lines) + "\n"


Rows = list[Sequence[str]]


def sections(found: Verification) -> Iterator[tuple[str, Sequence[str], Rows]]:
    """Title, header and rows of each table."""
    for title, casts in (
        ("Casts: codes and scales, byte for byte", found.casts),
        ("Emulation on this GPU and on the CPU", found.emulation),
    ):
        yield title, CAST_HEADER, [(it.recipe, it.format, str(it.compared), str(len(it.differing))) for it in casts]
    yield (
        "Linears: the largest difference as a fraction of its bound",
        ("recipe", "format", "largest", "fprop rms", "dgrad rms", "wgrad rms"),
        linear_rows(found),
    )
    yield (
        "Ten training steps",
        ("recipe", "format", "native against emulated", "last loss, emulated"),
        [each.row() for each in found.steps],
    )
    yield (
        "Speed of a linear, forward and backward pass, with casts",
        ("tokens x inputs x outputs", "recipe", "ms", "to BF16"),
        [
            (" x ".join(map(str, each.sizes)), each.recipe or "bf16", f"{each.ms:.3f}", f"{each.speedup:.2f}")
            for each in found.speed
        ],
    )
    yield "Attention backends, BF16", ("backend", "ms", "error against FP32"), [each.row() for each in found.attention]


def linear_rows(found: Verification) -> Rows:
    """A row for each recipe and format. A NaN counts as infinite."""
    rows: Rows = []
    for (recipe, number_format), group in itertools.groupby(found.linears, lambda each: (each.recipe, each.format)):
        comparisons = list(group)
        fractions = (each.bound_fraction for each in comparisons)
        largest = max(math.inf if math.isnan(fraction) else fraction for fraction in fractions)
        errors = {each.gemm: each.rms_error for each in comparisons}  # of the largest sizes, which come last
        texts = (f"{errors[gemm]:.1e}" if gemm in errors else "" for gemm in ("fprop", "dgrad", "wgrad"))
        rows.append((recipe, number_format, f"{largest:.2f}", *texts))
    return rows


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]
