"""Runs whose ranks send tokens to the experts of other ranks by address, against the all-to-all.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/distributed`.
"""

from __future__ import annotations

import interpreter
import pytest
from interpreter import IS_INTERPRETED
from ranks import run_ranks
from small_run import Curve, build_run, small_config, train
from stacked_experts import EP2, MODEL, stack_experts

interpreter.skip_without_kernels()

from megafp8.models.grouped_moe import PeerMoELayer

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="ranks on a CPU")


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.make_exact(monkeypatch)


def trained(flags: str, dispatcher: str) -> tuple[Curve, int]:
    stack_experts(are_peers=dispatcher == "peer")
    run = build_run(small_config("llama", f"{MODEL} {flags} {EP2} --moe-token-dispatcher-type {dispatcher}", 2))
    modules = [module for chunk in run.training_state.chunks for module in chunk.modules()]
    return train(run, 2), sum(isinstance(module, PeerMoELayer) for module in modules)


@pytest.mark.parametrize("flags", ["", "--fp8-format hybrid"], ids=["e4m3", "hybrid"])
def test_peers_train_as_the_all_to_all_does(flags: str) -> None:
    (peers, num_layers), (exchanged, none) = (
        run_ranks(2, trained, flags, dispatcher, timeout_s=280.0)[0] for dispatcher in ("peer", "alltoall")
    )
    assert num_layers > 0 and none == 0
    assert peers.losses == pytest.approx(exchanged.losses, rel=2e-3)
    assert peers.grad_norms == pytest.approx(exchanged.grad_norms, rel=2e-2)


@pytest.mark.parametrize(
    "flags",
    ["--moe-layer-recompute", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"],
)
def test_peers_recompute_to_the_bit(flags: str) -> None:
    recomputed, plain = (run_ranks(2, trained, each, "peer", timeout_s=280.0)[0][0] for each in (flags, ""))
    assert recomputed == plain


def test_peers_drop_the_tokens_of_the_all_to_all() -> None:
    flags = "--moe-expert-capacity-factor 0.5"
    peers, exchanged = (run_ranks(2, trained, flags, each, timeout_s=280.0)[0][0] for each in ("peer", "alltoall"))
    assert peers.losses == pytest.approx(exchanged.losses, rel=2e-3)
