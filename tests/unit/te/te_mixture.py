"""A program of `test_te_without_cuda.py`: mixtures on Transformer Engine have megafp8's router, and its experts in one
launch where they support the settings, whatever form megatron-core's spec has."""

import te_without_cuda  # noqa: F401  (first)

from megafp8.config import flags
from megafp8.mcore.modules import mlp_submodules
from megafp8.models.grouped_moe import ExchangedExperts, GroupedExperts, GroupedMoELayer
from megafp8.models.layer_specs import te_layer_spec
from megafp8.models.router import Router

RUN = (
    "--model-preset tiny --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--bf16 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 500 --transformer-impl transformer_engine"
)


def mixture(extra: str) -> object:
    """The entry `mlp` of a layer with experts."""
    return te_layer_spec(flags.parse(f"{RUN} {extra}".split()).config, has_experts=True).submodules.mlp


for extra in ("--moe-expert-kernels te", "--fp8-format hybrid --fp8-recipe delayed --moe-expert-kernels te"):
    found = mlp_submodules(mixture(extra))
    assert found.router is Router, extra
    assert getattr(found.experts, "module", None) is not GroupedExperts, extra

grouped = mixture("--moe-expert-kernels triton")
assert grouped.module is GroupedMoELayer and grouped.submodules.router is Router
assert grouped.submodules.experts.module is GroupedExperts
ranks = mixture("--moe-expert-kernels triton --expert-model-parallel-size 2")
assert ranks.submodules.experts.module is ExchangedExperts
