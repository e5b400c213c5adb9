"""Which settings exclude one launch for all experts, by their messages."""

from __future__ import annotations

import pytest

from megafp8.config import flags
from megafp8.config.grouped_experts import grouped_expert_obstacles

DELAYED, HYBRID = "--fp8-format e4m3 --fp8-recipe delayed", "--fp8-format hybrid --fp8-recipe delayed"
ROWWISE = "--fp8-format e4m3 --fp8-recipe rowwise"
TRITON = "--moe-expert-kernels triton"
OTHERS = ["experts in another precision than BF16 or tensorwise e4m3, delayed e4m3, rowwise e4m3"]


@pytest.mark.parametrize(
    ("extra", "obstacles"),
    [
        ("--fp8-format e4m3 --fp8-recipe tensorwise", []),
        (DELAYED, []),
        (f"{DELAYED} {TRITON} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", []),
        ("--expert-tensor-parallel-size 2", ["expert tensor-parallel ranks: give --expert-tensor-parallel-size 1"]),
        ("--tensor-model-parallel-size 2", ["tensor-parallel ranks without expert-parallel ones"]),
        (f"{HYBRID} {TRITON}", OTHERS),
        (HYBRID, OTHERS),
        (f"{DELAYED} --planted-fault inflated-qk", []),
        (
            f"{DELAYED} --planted-fault infinite-activation",
            ["--planted-fault infinite-activation, whose linear is not called"],
        ),
        (f"{ROWWISE} {TRITON}", []),
        (ROWWISE, ["emulated experts, unless --moe-expert-kernels triton is given"]),
        (f"--fp8-format hybrid --fp8-recipe rowwise {TRITON}", OTHERS),
        (f"{ROWWISE} --no-fp8-wgrad {TRITON}", OTHERS),
    ],
)
def test_obstacles(extra: str, obstacles: list[str]) -> None:
    config = flags.parse(f"--model-preset mixtral-8x7b --bf16 {extra}".split()).config
    assert list(grouped_expert_obstacles(config)) == obstacles
