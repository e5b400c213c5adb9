"""A program of `test_te_without_cuda.py`: mixtures on Transformer Engine have megafp8's router, and its experts in one
launch where they support the settings, whatever form megatron-core's spec has."""

from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
from small_te_mlp import small_mlp
from transformer_engine.common.recipe import DelayedScaling

from megafp8.config import flags
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.config.model_plan import plan_model
from megafp8.mcore.modules import mlp_submodules
from megafp8.models import grouped_moe
from megafp8.models.grouped_moe import ExchangedExperts, GroupedExperts, GroupedMoELayer
from megafp8.models.layer_specs import te_layer_spec
from megafp8.models.router import Router
from megafp8.training.precision import DelayedScalingSnapshot

RUN = (
    "--model-preset tiny --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--bf16 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 500 --transformer-impl transformer_engine"
)


def mixture(extra: str) -> object:
    """The entry `mlp` of a layer with experts."""
    return te_layer_spec(plan_model(flags.parse(f"{RUN} {extra}".split()).config), has_experts=True).submodules.mlp


for extra in ("--moe-expert-kernels te", "--fp8-format hybrid --fp8-recipe delayed --moe-expert-kernels te"):
    found = mlp_submodules(mixture(extra))
    assert found.router is Router, extra
    assert getattr(found.experts, "module", None) is not GroupedExperts, extra

grouped = mixture("--moe-expert-kernels triton")
assert grouped.module is GroupedMoELayer and grouped.submodules.router is Router
assert grouped.submodules.experts.module is GroupedExperts
ranks = mixture("--moe-expert-kernels triton --expert-model-parallel-size 2")
assert ranks.submodules.experts.module is ExchangedExperts

# Delayed scaling: all layers of a spec share what updates their scales.
grouped_moe.amax_reduction_group = lambda options: None
spec = mixture("--fp8-format e4m3 --fp8-recipe delayed").submodules.experts
assert spec.module is GroupedExperts and spec.params["recipe"].delayed is not None
config = SimpleNamespace(
    moe_ffn_hidden_size=256, hidden_size=128, use_cpu_initialization=True, params_dtype=torch.bfloat16,
    expert_model_parallel_size=1,
)  # fmt: skip
layers = [spec.module(4, config, SimpleNamespace(expt_dp=None, ep=None), **spec.params) for _ in range(2)]
assert len(spec.params["exchange"].states) == 4

# A snapshot has them from the start, and the state of Transformer Engine's linears once that exists.
model = torch.nn.ModuleList([*layers, small_mlp()])
snapshot = DelayedScalingSnapshot([model], TRANSFORMER_ENGINE)
for num_states, is_complete in ((4, False), (4, False), (6, False), (6, True)):
    if num_states == 6:
        state = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3))
        model[-1].linear_fc1.fp8_meta.update(recipe=DelayedScaling(), scaling_fwd=state, scaling_bwd=state)
    snapshot.save()
    assert (len(snapshot._tensors), snapshot._is_complete) == (2 * num_states, is_complete)
scale = layers[0].quantizer_state["linear_fc1"].quant_scale
scale.fill_(3.0)
snapshot.restore()
assert (scale == 1).all()
