"""Tokens that travel to their experts as codes: the same run to the bit, with half the bytes."""

from __future__ import annotations

from typing import Any

import pytest
from load_records import train_with_loads
from ranks import run_ranks
from small_run import Curve, build_run, fingerprint, small_config, statistics_record_of, weights

EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --micro-batch-size 2 --bf16 --transformer-impl emulated"
)
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
}
EP2 = "--expert-model-parallel-size 2"
TP2 = f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel"
CAPACITY = "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CODES = "--moe-dispatch-in-fp8"
STEPS = 2


def trained(flags: str, world_size: int) -> tuple[Curve, str, list[int]]:
    """The curve, a hash of the weights, and the bytes that arrived in the last step, by layer."""
    run = build_run(small_config("llama", f"{EXPERTS} {flags}", world_size))
    curve, loads = train_with_loads(run, STEPS)
    return curve, fingerprint(weights(run)), [layer.dispatch_bytes for layer in loads.values()]


@pytest.mark.parametrize(
    ("recipe", "layout", "world_size"),
    [
        pytest.param("tensorwise", EP2, 2, id="tensorwise-ep2"),
        pytest.param("tensorwise", f"{EP2} {CAPACITY} {RECOMPUTED}", 2, id="tensorwise-capacity"),
        pytest.param("tensorwise", TP2, 4, id="tensorwise-ep2-tp2"),
        pytest.param("delayed", EP2, 2, id="delayed-ep2"),
        pytest.param("delayed", f"{TP2} --expert-tensor-parallel-size 1 {RECOMPUTED}", 4, id="delayed-ep2-tp2-etp1"),
    ],
)
def test_a_run_with_codes_equals_one_with_tokens(recipe: str, layout: str, world_size: int) -> None:
    flags = f"{RECIPES[recipe]} {layout}"
    tokens = run_ranks(world_size, trained, flags, world_size)
    codes = run_ranks(world_size, trained, f"{flags} {CODES}", world_size)
    assert [rank[:2] for rank in codes] == [rank[:2] for rank in tokens]
    assert tokens[0][2] == [2 * num_bytes for num_bytes in codes[0][2]] and all(codes[0][2])


def test_statistics_leave_out_what_arrived_as_codes() -> None:
    flags = f"{EXPERTS} {RECIPES['tensorwise']} {EP2} --fp8-log-interval 1"

    def tensors(more: str) -> dict[str, Any]:
        record = statistics_record_of(build_run(small_config("llama", f"{flags} {more}", 2)))
        return {} if record is None else record.tensors

    codes, tokens = run_ranks(2, tensors, CODES)[0], run_ranks(2, tensors, "")[0]
    left_out = {name for name in tokens if ".experts." in name and name.endswith("linear_fc1.input")}
    assert len(left_out) == 8 and codes == {name: stats for name, stats in tokens.items() if name not in left_out}
