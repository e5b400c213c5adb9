"""The record of the experts' load: what the routers assigned, on any layout, and the rows that experts multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from load_records import train_with_loads
from ranks import run_ranks
from small_run import build_run, small_config

from megafp8.metrics.expert_load import LayerLoad
from megafp8.models.experts import PaddedExperts

MICRO, TOPK, EXPERTS = 2, 2, 4
MODEL = (
    f"--num-layers 2 --num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 64 "
    f"--micro-batch-size {MICRO} --moe-token-dispatcher-type alltoall --moe-layer-freq [0]*1+[1]*1"
)
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
PLAIN = "--transformer-impl local"
FP8 = "--bf16 --transformer-impl emulated --fp8-format e4m3 --fp8-recipe mxfp8"
DROPS = f"{PLAIN} --moe-expert-capacity-factor 0.75"
CAPACITY = f"{DROPS} --moe-pad-expert-input-to-capacity"
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TOKENS = 8 * 32  # of a global batch


def record_of(flags: str, world_size: int) -> tuple[dict[str, LayerLoad], list[int], float]:
    """The record of one step, the tokens of each expert of this rank, and the rows that they multiplied."""
    run = build_run(small_config("llama", f"{MODEL} {flags}", world_size))
    counts, rows = torch.zeros(EXPERTS), 0.0
    (experts,) = [
        each for chunk in run.training_state.chunks for each in chunk.modules() if isinstance(each, PaddedExperts)
    ]
    first = experts.ep_group.rank() * experts.num_local_experts
    for index, expert in enumerate(experts.local_experts):

        def count(module: Any, inputs: Any, output: Any, index: int = index) -> None:
            nonlocal rows
            rows += len(inputs[0])
            counts[first + index] += len(inputs[0])

        expert.register_forward_hook(count)
    _, loads = train_with_loads(run, 1)
    return loads, counts.tolist(), rows


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, "", id="one"),
        pytest.param(2, EP2, id="ep2"),
        pytest.param(2, TP2, id="tp2"),
        pytest.param(4, f"{EP2} {TP2} --expert-tensor-parallel-size 1", id="ep2-tp2-etp1"),
    ],
)
def test_the_record_equals_what_experts_multiplied(world_size: int, flags: str) -> None:
    """Without padding rows are tokens."""
    ranks = run_ranks(world_size, record_of, f"{PLAIN} {flags}", world_size)
    layers = ranks[0][0]
    assert list(layers) == ["1"] and not any(rank[0] for rank in ranks[1:]), "rank 0 makes the record"
    copies = 2 if flags == TP2 else 1  # ranks with parts of an expert multiply the same tokens
    counts = [sum(expert) / copies for expert in zip(*(rank[1] for rank in ranks), strict=True)]
    assert sum(counts) == TOKENS * TOPK
    load, mean = layers["1"], sum(counts) / EXPERTS
    assert load.max_to_mean == pytest.approx(max(counts) / mean)
    assert counts[load.busiest_expert or 0] == max(counts)
    assert load.variation == pytest.approx(torch.tensor(counts).std(correction=0).item() / mean)
    assert load.padded_fraction == load.dropped_fraction == 0
    assert 0.5 < load.entropy_fraction < 1 and load.bias_max is None


def test_padding_to_the_blocks_of_a_recipe_is_counted() -> None:
    """MXFP8 pads the tokens of each expert to multiples of 32."""
    ranks = run_ranks(2, record_of, f"{FP8} {EP2}", 2)
    load = ranks[0][0]["1"]
    padding = 1 - TOKENS * TOPK / sum(rows for _, _, rows in ranks)
    assert padding > 0 and load.padded_fraction == pytest.approx(padding)


def test_dropped_and_padded_tokens_of_a_capacity_are_counted() -> None:
    layers, counts, rows = run_ranks(1, record_of, CAPACITY, 1)[0]
    load, microbatches = layers["1"], TOKENS // (MICRO * 32)
    capacity = 0.75 * MICRO * 32 * TOPK / EXPERTS
    assert counts == [capacity * microbatches] * EXPERTS
    assert 0.25 <= load.dropped_fraction < 0.6
    assert load.padded_fraction == pytest.approx(1 - (1 - load.dropped_fraction) * TOKENS * TOPK / rows)


@pytest.mark.parametrize("capacity", [DROPS, CAPACITY])
@pytest.mark.parametrize("options", ["", BIAS, "--moe-router-num-groups 2 --moe-router-group-topk 1"])
def test_a_capacity_does_not_hide_the_load_that_the_router_chose(capacity: str, options: str) -> None:
    """The only layer with experts has the same router and tokens in the first step with a capacity and without."""
    chosen = run_ranks(1, record_of, f"{PLAIN} {options}", 1)[0][0]["1"]
    load = run_ranks(1, record_of, f"{capacity} {options}", 1)[0][0]["1"]
    assert chosen.max_to_mean > 1 and chosen.dropped_fraction == 0 < load.dropped_fraction
    selected = {name: getattr(load, name) for name in ("max_to_mean", "variation", "num_idle", "busiest_expert")}
    assert selected == {name: getattr(chosen, name) for name in selected}


def test_the_bias_of_experts_has_a_range() -> None:
    load = run_ranks(1, record_of, f"{PLAIN} {BIAS}", 1)[0][0]["1"]
    assert load.bias_min is not None and load.bias_max is not None
    assert load.bias_min == pytest.approx(-1e-3) and load.bias_max == pytest.approx(1e-3), "one update"
