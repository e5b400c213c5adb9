"""Problems of a conversion, which are collected and reported together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megafp8.config import rules
from megafp8.config.rules.declared import numbers_are_in_range
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import CheckpointError

MAX_LISTED_PROBLEMS = 12
# What every run has besides its model.
SMALLEST_RUN: Mapping[str, Any] = MappingProxyType(
    {
        "training.micro_batch_size": 1, "training.train_iters": 1, "optimizer.lr": 1e-4, "data.mock_data": True,
        "data.tokenizer_type": "NullTokenizer",
    }
)  # fmt: skip


def rule_problems(config: RunConfig) -> list[str]:
    """Return why no run accepts a model, as the rules of a run say it.

    Args:
        config: with the settings of the model, its precision and the sequence length.
    """
    config = with_values(config, SMALLEST_RUN)
    # Other rules compute with the numbers.
    return rules.found_by((numbers_are_in_range,), config, 1) or rules.setting_problems(config, 1)


def shape_problems(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], contrast: str, kind: str
) -> list[str]:
    """Return how the shapes of tensors differ from those of a model.

    Args:
        contrast: what is between the two shapes, such as ` instead of`.
        kind: of the model, as text.
    """
    problems = []
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"{name} is missing")
        elif found[name] != shape:
            problems.append(f"{name} has shape {found[name]}{contrast} {shape}")
    return problems + [f"{name} is not part of {kind}" for name in found if name not in expected]


def check_problems(folder: Path, problems: list[str]) -> None:
    """Raise if there are problems.

    Raises:
        CheckpointError: with all of them.
    """
    if problems:
        raise CheckpointError(f"{folder} cannot be expressed here:\n{format_problems(problems)}")


def format_problems(problems: list[str]) -> str:
    """Return the first problems, one per line, and the number of others."""
    shown = problems[:MAX_LISTED_PROBLEMS] + (
        [f"and {len(problems) - MAX_LISTED_PROBLEMS} more"] if len(problems) > MAX_LISTED_PROBLEMS else []
    )
    return "\n".join(f"  {problem}" for problem in shown)
