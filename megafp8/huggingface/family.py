"""What a family of transformers' models is to a conversion."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.huggingface.table import Row
from megafp8.huggingface.their_config import TheirConfig


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_type: as config.json has it.
        architecture: its causal language model's class.
        inexpressible: what of a run's model the family does not have, in words.
        to_theirs: a run's model as fields of config.json, but for the vocabulary.
        from_theirs: fields of config.json as settings by `section.field`; what it cannot take over is a problem there.
        rows: the tensors, given tokens and rows of our embedding.
        buffers: names of theirs that are no weights, and are made anew there.
        prefix: of their names; some files leave it out.
    """

    model_type: str
    architecture: str
    inexpressible: Callable[[RunConfig], list[str]]
    to_theirs: Callable[[RunConfig], dict[str, Any]]
    from_theirs: Callable[[TheirConfig], dict[str, Any]]
    rows: Callable[[ModelConfig, int, int], list[Row]]
    buffers: re.Pattern[str]
    prefix: str


def named(is_wrong: bool, text: str) -> list[str]:
    """A problem or none."""
    return [text] if is_wrong else []


def foreign_to_all(config: RunConfig) -> list[str]:
    """What no family has."""
    model = config.model
    return [
        *named(model.apply_layernorm_1p, "--apply-layernorm-1p: norm weights there are not stored - 1"),
        *named(model.qk_layernorm, "--qk-layernorm: queries and keys are not normalized there"),
        *named(model.squared_relu, "--squared-relu: not an activation there"),
        *named(model.window_size is not None, f"--window-size {model.window_size}: attention sees all tokens there"),
    ]
