"""Variables that decide about memory registered with NCCL."""

from __future__ import annotations

import os

import pytest

from megafp8.config.rules.sharding import fsdp_excludes_other_settings
from megafp8.config.schema import ParallelConfig, RunConfig
from megafp8.device.nccl_buffers import expandable_segments, prefer_copy_engines


def test_fsdp2_has_no_buffers() -> None:
    config = RunConfig(parallel=ParallelConfig(use_nccl_ub=True, use_torch_fsdp2=True))
    (problem,) = fsdp_excludes_other_settings(config, 2)
    assert "--use-nccl-ub is not supported with --use-torch-fsdp2" in problem


def test_a_given_policy_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_CTA_POLICY", raising=False)
    prefer_copy_engines(ParallelConfig())
    assert "NCCL_CTA_POLICY" not in os.environ
    prefer_copy_engines(ParallelConfig(use_nccl_ub=True))
    assert os.environ["NCCL_CTA_POLICY"] == "2"
    monkeypatch.setenv("NCCL_CTA_POLICY", "0")
    prefer_copy_engines(ParallelConfig(use_nccl_ub=True))
    assert os.environ["NCCL_CTA_POLICY"] == "0"


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_found(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    assert expandable_segments() == f"{variable}=max_split_size_mb:64,expandable_segments:True"
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert expandable_segments() == ""
