"""The plan of a model has what its settings choose, however they are spelled."""

from __future__ import annotations

import pytest

from megafp8.config import flags
from megafp8.config.model_plan import ModelPlan, plan_model

DENSE = "--model-preset tiny --num-layers 8 --seq-length 64 --micro-batch-size 2 --bf16"
FP8 = f"{DENSE} --fp8-format hybrid --fp8-recipe tensorwise"
EXPERTS = f"{DENSE} --num-experts 4 --moe-router-topk 2"
FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"


def plan_of(text: str) -> ModelPlan:
    return plan_model(flags.parse(text.split()).config)


def test_layers_are_by_stage_and_chunk() -> None:
    plan = plan_of(f"{DENSE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2")
    assert plan.stages == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))


@pytest.mark.parametrize(
    ("text", "stores_codes"),
    [(FP8, False), (f"{FP8} --fp8-param-gather", True), (f"{FP8} --fp8-param-gather {FSDP}", False)],
)
def test_sharded_rows_are_no_codes(text: str, stores_codes: bool) -> None:
    assert plan_of(text).stores_codes is stores_codes


@pytest.mark.parametrize(
    ("text", "dispatcher", "launch"),
    [
        (EXPERTS, "allgather", (False, True)),
        (f"{EXPERTS} --moe-expert-kernels triton --expert-model-parallel-size 2", "alltoall", (True, True)),
        (f"{EXPERTS} --moe-expert-kernels te --moe-token-dispatcher-type flex", "flex", (False, False)),
    ],
)
def test_experts(text: str, dispatcher: str, launch: tuple[bool, bool]) -> None:
    experts = plan_of(text).experts
    assert experts.dispatcher == dispatcher
    assert (experts.requests_one_launch, experts.supports_one_launch) == launch


@pytest.mark.parametrize(("layout", "has_op_fuser"), [("", True), ("--tensor-model-parallel-size 2", False)])
def test_kernels_are_those_of_the_layout(layout: str, has_op_fuser: bool) -> None:
    kernels = plan_of(f"{FP8} {layout}").kernels
    assert (kernels.has_op_fuser, kernels.splits_rope) == (has_op_fuser, True)
