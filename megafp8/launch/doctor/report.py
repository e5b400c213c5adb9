"""The doctor's report: results as text, as JSON data, and as an exit status."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megafp8.errors import ConfigError
from megafp8.launch.doctor.checks import ERROR, OK, WARNING, DoctorResult, recipe_support
from megafp8.launch.doctor.facts import Machine

WARNINGS_STATUS = 1


def exit_status(results: Sequence[DoctorResult], strict: bool = False) -> int:
    """0 if training can run, 64 if it cannot; with `strict`, 1 for warnings."""
    levels = {result.level for result in results}
    if ERROR in levels:
        return ConfigError.exit_status
    return WARNINGS_STATUS if strict and WARNING in levels else 0


def report_text(machine: Machine, results: Sequence[DoctorResult]) -> str:
    """All results, the recipes, and a verdict."""
    width = max(len(result.check) for result in results)
    lines = []
    for result in results:
        mark = "" if result.level == OK else result.level
        lines.append(f"{mark:<8}{result.check:<{width}}  {result.text}")
        if result.fix is not None:
            lines.append(f"{'':8}{'':{width}}  -> {result.fix}")
    shown = ", ".join(f"{name} {how}" for name, how in recipe_support(machine).items())
    lines += ["", f"recipes: {shown}", verdict(machine, results)]
    return "\n".join(lines)


def verdict(machine: Machine, results: Sequence[DoctorResult]) -> str:
    """One sentence on whether training can run."""
    errors = sum(result.level == ERROR for result in results)
    num_warnings = sum(result.level == WARNING for result in results)
    warnings = "1 warning" if num_warnings == 1 else f"{num_warnings} warnings"
    if errors:
        return f"training cannot run on this machine: {errors} error{'s' * (errors > 1)}, {warnings}"
    if machine.slow_imports:
        return "unknown whether training can run: imports took too long"
    return f"training can run; {warnings}" if num_warnings else "training can run; nothing to fix"


def report_data(machine: Machine, results: Sequence[DoctorResult]) -> dict[str, Any]:
    """The report as JSON data, with all facts. Of environment variables only the names: values may be secret."""
    facts = dataclasses.asdict(machine)
    facts["environment"] = sorted(machine.environment)
    has_errors = any(result.level == ERROR for result in results)
    return {
        "can_train": None if machine.slow_imports and not has_errors else not has_errors,
        "findings": [
            # `mend` is the key that readers of earlier reports know.
            {"check": result.check, "level": result.level, "text": result.text, "mend": result.fix}
            for result in results
        ],
        "recipes": recipe_support(machine),
        "machine": facts,
    }
