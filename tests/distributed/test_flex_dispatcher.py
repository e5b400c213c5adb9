"""megatron-core's flex dispatcher with a stand-in for DeepEP and HybridEP: runs follow those of alltoall.

NOT RUN with the real libraries, which need GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import standin_deep_ep
from load_records import train_with_loads
from ranks import run_ranks
from small_run import PLAIN, Curve, build_run, small_config
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.config.layer_backends import EMULATED
from megafp8.config.settings import with_values
from megafp8.mcore.config import build_transformer_config
from megafp8.metrics.expert_load import LayerLoad

NUM_STEPS = 3
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --micro-batch-size 2 --moe-shared-expert-intermediate-size 32"
)
EP2 = "--expert-model-parallel-size 2"
TP2 = f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel"
CAPACITY = "--moe-expert-capacity-factor 0.75 --moe-token-drop-policy position"
QUANTIZED = "--bf16 --transformer-impl emulated --fp8-format hybrid --fp8-recipe tensorwise"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LOSS_BOUND_FP8 = 2e-3
"""Rows of an expert arrive in another order, so that sums of wgrad are rounded differently."""


def trained(flags: str, world_size: int, flex: dict[str, Any]) -> tuple[Curve, dict[str, LayerLoad]]:
    """The curve, and the load of the experts in all steps."""
    config = with_values(small_config("llama", f"{EXPERTS} {flags}", world_size), flex)
    if flex:
        standin_deep_ep.install()
    run = build_run(config)
    return train_with_loads(run, NUM_STEPS)


@pytest.mark.parametrize(
    ("backend", "flags", "world_size"),
    [
        pytest.param("deepep", f"{PLAIN} {EP2}", 2, id="deepep-ep2"),
        pytest.param("deepep", f"{PLAIN} {EP2} {CAPACITY} {RECOMPUTED}", 2, id="deepep-capacity-recomputed"),
        pytest.param("deepep", f"{PLAIN} {TP2}", 4, id="deepep-ep2-tp2"),
        pytest.param("deepep", f"{QUANTIZED} {EP2}", 2, id="deepep-fp8"),
        pytest.param("hybridep", f"{PLAIN} {TP2}", 4, id="hybridep-ep2-tp2"),
        pytest.param(
            "hybridep", f"{PLAIN} {EP2} {CAPACITY} --moe-pad-expert-input-to-capacity", 2, id="hybridep-capacity"
        ),
    ],
)
def test_a_run_follows_that_of_alltoall(backend: str, flags: str, world_size: int) -> None:
    flex = {"parallel.moe_token_dispatcher_type": "flex", "parallel.moe_flex_dispatcher_backend": backend}
    expected, expected_load = run_ranks(world_size, trained, flags, world_size, {})[0]
    curve, load = run_ranks(world_size, trained, flags, world_size, flex)[0]
    bounds = (LOSS_BOUND_FP8, 10 * LOSS_BOUND_FP8) if "fp8" in flags else (LAYOUT_LOSS, LAYOUT_GRAD_NORM["llama"])
    assert max(abs(a - b) for a, b in zip(curve.losses, expected.losses, strict=True)) <= bounds[0]
    assert max(abs(a / b - 1) for a, b in zip(curve.grad_norms, expected.grad_norms, strict=True)) <= bounds[1]
    assert all(layer.dispatch_bytes for layer in expected_load.values())
    if "fp8" not in flags:
        assert load == {  # bytes that arrive are not counted, rather than wrong
            name: replace(layer, dispatch_bytes=None, entropy_fraction=pytest.approx(layer.entropy_fraction, rel=1e-6))
            for name, layer in expected_load.items()
        }


def test_megatron_core_gets_the_library_and_its_sms() -> None:
    flags = f"{EXPERTS} --bf16 {EP2} --moe-token-dispatcher-type flex --moe-deepep-num-sms 24"
    fields = build_transformer_config(small_config("llama", flags, 2), EMULATED, on_cuda=False)
    assert (fields.moe_token_dispatcher_type, fields.moe_flex_dispatcher_backend) == ("flex", "deepep")
    assert 24 in (fields.moe_deepep_num_sms, getattr(fields, "moe_flex_dispatcher_num_sms", None))
