"""Models that no run accepts, or whose sizes are not those of their files, are refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import FAMILY_MODELS, LLAMA, random_weights, settings_of, write_hf_folder
from hub_configs import HUB_CONFIGS

from megafp8.checkpoint.convert.from_huggingface import plan_import
from megafp8.checkpoint.convert.problems import rule_problems
from megafp8.config.settings import with_values
from megafp8.errors import CheckpointError

GRANITE, PHI3 = FAMILY_MODELS["granite"], FAMILY_MODELS["phi3"]
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16}


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_a_released_model_breaks_no_rule(name: str) -> None:
    for dtype in ({}, {"precision.bf16": True}):
        assert rule_problems(with_values(settings_of(HUB_CONFIGS[name]), dtype)) == []


@pytest.mark.parametrize(
    ("fields", "change", "problem"),
    [
        (LLAMA, {"attention_dropout": 1e308}, r"--attention-dropout 1e\+308 must be"),
        (LLAMA, {"rms_norm_eps": -1}, "--norm-epsilon -1 must be"),
        (LLAMA, {"initializer_range": -0.1}, "--init-method-std -0.1 must be"),
        (LLAMA, {"rope_scaling": LLAMA3 | {"factor": -3}}, "--rope-scaling-factor -3 must be"),
        (LLAMA, {"rope_scaling": YARN | {"factor": -3}}, "--rotary-scaling-factor -3 must be"),
        (LLAMA, {"rope_scaling": YARN | {"factor": 2, "beta_fast": 0}}, "--yarn-beta-fast 0 must be"),
        (GRANITE, {"embedding_multiplier": -1}, "--embedding-multiplier -1 must be"),
        (GRANITE, {"logits_scaling": 0}, "--logits-scaling 0 must be"),
        (PHI3, {"partial_rotary_factor": 1e308}, r"--rotary-percent 1e\+308 must be"),
        (FAMILY_MODELS["gemma2"], {"final_logit_softcapping": -1.0}, "--output-logit-softcapping -1.0 must be"),
        (FAMILY_MODELS["mixtral"], {"num_experts_per_tok": 9}, "--moe-router-topk 9"),
    ],
)  # fmt: skip
def test_a_model_that_no_run_accepts(
    fields: dict[str, Any], change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = write_hf_folder(tmp_path / "theirs", fields | change, random_weights(fields, torch.bfloat16))
    with pytest.raises(CheckpointError, match=f"config.json: {problem}"):
        plan_import(folder)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_numbers_of_tensors_that_are_not_there(is_stacked: bool, tmp_path: Path) -> None:
    """Listing the names of 655 million tensors would fill the memory."""
    fields = FAMILY_MODELS["mixtral"]
    weights = random_weights(fields, torch.bfloat16, is_stacked)
    huge = {"num_hidden_layers": 10_000, "num_local_experts": 65_536}
    folder = write_hf_folder(tmp_path / "theirs", fields | huge, weights)
    least = 10_000 if is_stacked else 655_360_000
    with pytest.raises(CheckpointError, match=f"{len(weights)} tensors, and by config.json at least {least:,}"):
        plan_import(folder)
