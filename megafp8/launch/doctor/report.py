"""The doctor's report: findings as text, as JSON data, and as an exit status."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megafp8.errors import ConfigError
from megafp8.launch.doctor.checks import recipe_support
from megafp8.launch.doctor.facts import Machine
from megafp8.launch.doctor.findings import ERROR, OK, WARNING, DoctorFinding

WARNINGS_STATUS = 1


def exit_status(findings: Sequence[DoctorFinding], strict: bool = False) -> int:
    """0 if training can run, 64 if it cannot; with `strict`, 1 for warnings."""
    levels = {finding.level for finding in findings}
    if ERROR in levels:
        return ConfigError.exit_status
    return WARNINGS_STATUS if strict and WARNING in levels else 0


def report_text(machine: Machine, findings: Sequence[DoctorFinding]) -> str:
    """All findings, the recipes, and a verdict."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        mark = "" if finding.level == OK else finding.level
        lines.append(f"{mark:<8}{finding.check:<{width}}  {finding.text}")
        if finding.fix is not None:
            lines.append(f"{'':8}{'':{width}}  -> {finding.fix}")
    shown = ", ".join(f"{name} {how}" for name, how in recipe_support(machine).items())
    lines += ["", f"recipes: {shown}", verdict(machine, findings)]
    return "\n".join(lines)


def verdict(machine: Machine, findings: Sequence[DoctorFinding]) -> str:
    """One sentence on whether training can run."""
    errors = sum(finding.level == ERROR for finding in findings)
    num_warnings = sum(finding.level == WARNING for finding in findings)
    warnings = "1 warning" if num_warnings == 1 else f"{num_warnings} warnings"
    if errors:
        return f"training cannot run on this machine: {errors} error{'s' * (errors > 1)}, {warnings}"
    if machine.slow_imports:
        return "unknown whether training can run: imports took too long"
    return f"training can run; {warnings}" if num_warnings else "training can run; nothing to fix"


def report_data(machine: Machine, findings: Sequence[DoctorFinding]) -> dict[str, Any]:
    """The report as JSON data, with all facts. Of environment variables only the names: values may be secret."""
    facts = dataclasses.asdict(machine)
    facts["environment"] = sorted(machine.environment)
    has_errors = any(finding.level == ERROR for finding in findings)
    return {
        "can_train": None if machine.slow_imports and not has_errors else not has_errors,
        "findings": [
            # `mend` is the key that readers of earlier reports know.
            {"check": finding.check, "level": finding.level, "text": finding.text, "mend": finding.fix}
            for finding in findings
        ],
        "recipes": recipe_support(machine),
        "machine": facts,
    }
