"""Experts in one launch per GEMM for tokens that a dispatcher brought, against each expert alone.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/models`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from megatron.core.transformer.spec_utils import ModuleSpec
from ranks import run_ranks
from small_run import Curve, curve_of, small_config
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.config.model_plan import plan_model
from megafp8.models import layer_specs
from megafp8.models.grouped_moe import ExchangedExperts
from megafp8.recipes import registry
from megafp8.recipes.base import LinearRecipe
from megafp8.training.precision import high_precision

HIDDEN, FFN = 128, 128
TENSORWISE = registry.get("tensorwise").rules("e4m3")
COUNTS = [[5, 0, 20], [0, 0, 0], [0, 0, 7]]


@pytest.fixture(autouse=IS_INTERPRETED)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.make_exact(monkeypatch)


def build(num_experts: int, recipe: Optional[LinearRecipe] = None) -> ExchangedExperts:
    config: Any = SimpleNamespace(
        moe_ffn_hidden_size=FFN, hidden_size=HIDDEN, use_cpu_initialization=DEVICE == "cpu",
        params_dtype=torch.bfloat16, expert_model_parallel_size=2,
    )  # fmt: skip
    experts = ExchangedExperts(num_experts, config, SimpleNamespace(expt_dp=None, ep=None), recipe)
    generator = torch.Generator().manual_seed(0)
    for weight in experts.parameters():
        drawn = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
        weight.data.copy_(drawn)
    return experts


def leaf(*shape: int, seed: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().to(DEVICE).requires_grad_()


def expected(experts: ExchangedExperts, tokens: Tensor, probs: Tensor, counts: list[int]) -> Tensor:
    """In FP32, one expert after the other."""
    outputs = []
    parts = zip(tokens.float().split(counts), probs.split(counts), experts.linear_fc1, experts.linear_fc2, strict=True)
    for rows, scores, fc1, fc2 in parts:
        gate, up = (rows @ fc1.float().t()).chunk(2, 1)
        outputs.append((torch.nn.functional.silu(gate) * up * scores[:, None]) @ fc2.float().t())
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", COUNTS)
def test_the_tokens_of_each_expert_pass_it(counts: list[int]) -> None:
    experts = build(len(counts))
    tokens, probs = leaf(sum(counts), HIDDEN, seed=1), torch.rand(sum(counts), device=DEVICE).requires_grad_()
    results = []
    for compute in (
        lambda: experts(tokens, torch.tensor(counts), probs)[0],
        lambda: expected(experts, tokens, probs, counts),
    ):
        outputs = compute()
        assert outputs.shape == tokens.shape
        inputs = (tokens, probs, experts.linear_fc1, experts.linear_fc2)
        results.append([outputs.detach(), *torch.autograd.grad(outputs.float().square().sum(), inputs)])
    for found, plain in zip(*results, strict=True):
        assert (found.float() - plain.float()).norm() <= 0.02 * plain.float().norm()


MODEL = (
    "--num-layers 1 --hidden-size 128 --kv-channels 32 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2 --bf16 "
    "--seq-length 16 --transformer-impl local"
)


def curve(is_stacked: bool, flags: str = "", num_ranks: int = 2, dispatcher: str = "alltoall") -> Curve:
    """A run with linears, or with stacked experts."""
    model = MODEL.replace("--expert-model-parallel-size 2", f"--expert-model-parallel-size {num_ranks}")
    config = small_config("llama", f"{model.replace('type alltoall', f'type {dispatcher}')} {flags}", num_ranks)
    if is_stacked:
        original = layer_specs.mixture_spec

        def mixture_spec(*args: Any) -> ModuleSpec:
            return layer_specs.grouped_mixture_spec(original(*args).submodules, plan_model(config))

        layer_specs.mixture_spec = mixture_spec
    return curve_of(config, 3)


on_cpu_ranks = pytest.mark.skipif(not IS_INTERPRETED, reason="ranks on a CPU")


@on_cpu_ranks
@pytest.mark.parametrize(("num_ranks", "dispatcher"), [(1, "alltoall"), (2, "alltoall"), (2, "allgather")])
def test_a_run_is_that_of_linears(num_ranks: int, dispatcher: str) -> None:
    """With two ranks: dispatch, gradient buffers of experts, their reduction and the update."""
    stacked, linears = (run_ranks(num_ranks, curve, each, "", num_ranks, dispatcher)[0] for each in (True, False))
    assert stacked.losses == pytest.approx(linears.losses, rel=1e-3)
    assert stacked.grad_norms == pytest.approx(linears.grad_norms, rel=1e-2)


@on_cpu_ranks
def test_codes_that_travel_are_those_of_the_experts() -> None:
    recipe = "--transformer-impl emulated --fp8-format e4m3 --fp8-recipe tensorwise"
    codes, tokens, bf16 = (
        run_ranks(2, curve, True, flags) for flags in (f"{recipe} --moe-dispatch-in-fp8", recipe, "")
    )
    assert codes == tokens
    assert codes[0].losses != bf16[0].losses and codes[0].losses == pytest.approx(bf16[0].losses, rel=1e-2)


def test_a_phase_in_high_precision_has_no_codes() -> None:
    experts = build(2, TENSORWISE)
    assert experts._weight_codes() is not None
    config = SimpleNamespace(fp8="e4m3", fp4=None)
    with high_precision(config, [experts]):  # type: ignore[arg-type]  # of which it reads two fields
        assert experts._weight_codes() is None
    assert experts._weight_codes() is not None
