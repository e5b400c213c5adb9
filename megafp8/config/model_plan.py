"""What a model is built from, resolved once from the sections of a configuration that passed the checks."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import mixture
from megafp8.config.grouped_experts import grouped_expert_problems
from megafp8.config.rules import precision as choices
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.config.stages import Stages, stage_layers


@dataclass(frozen=True)
class ExpertPlan:
    """How the experts of a layer run. It has no effect on a dense model.

    Attributes:
        dispatcher: the exchange of tokens, see `mixture.token_dispatcher`.
        num_ranks: expert-parallel ranks.
        sends_codes: tokens travel as codes.
        has_grouped_linear: on Transformer Engine, one linear for all experts of a rank, else an MLP for each.
        requests_one_launch, supports_one_launch: one launch per GEMM is asked for, or no setting excludes it.
    """

    dispatcher: str
    num_ranks: int
    sends_codes: bool
    has_grouped_linear: bool
    requests_one_launch: bool
    supports_one_launch: bool


@dataclass(frozen=True)
class KernelPlan:
    """The kernels of Transformer Engine's layers.

    Attributes:
        cast_recipes: recipes whose activations and gradients Triton casts.
        casts_need_amax_pass: one of these casts reads its input twice.
        has_op_fuser: MLPs use the op fuser.
        quantizes_in_swiglu: with the Triton SwiGLU.
        splits_rope: heads are split and rotated in one kernel.
    """

    cast_recipes: tuple[str, ...]
    casts_need_amax_pass: bool
    has_op_fuser: bool
    quantizes_in_swiglu: bool
    splits_rope: bool


@dataclass(frozen=True)
class ModelPlan:
    """What `models.builder` builds.

    Attributes:
        stages: layers of each pipeline stage, by model chunk.
        max_positions: length of learned position embeddings.
        seed: of initial weights and of stochastic rounding.
        separates_documents: attention stops at the borders of documents.
        stores_codes: weights are codes; where ranks share the rows of a weight, they are not.
    """

    model: ModelConfig
    precision: PrecisionConfig
    stages: Stages
    max_positions: int
    seed: int
    separates_documents: bool
    stores_codes: bool
    experts: ExpertPlan
    kernels: KernelPlan


def plan_model(config: RunConfig) -> ModelPlan:
    """Resolve the plan of a model."""
    model, parallel = config.model, config.parallel
    positions = model.max_position_embeddings or config.data.seq_length
    assert positions is not None
    return ModelPlan(
        model=model,
        precision=config.precision,
        stages=stage_layers(config),
        max_positions=positions,
        seed=config.training.seed,
        separates_documents=config.data.reset_attention_mask,
        stores_codes=config.precision.fp8_param_gather and not parallel.shards_weights,
        experts=ExpertPlan(
            dispatcher=mixture.token_dispatcher(config),
            num_ranks=parallel.expert_model_parallel_size,
            sends_codes=parallel.moe_dispatch_in_fp8,
            has_grouped_linear=parallel.moe_grouped_gemm,
            requests_one_launch=parallel.moe_expert_kernels == "triton",
            supports_one_launch=not any(grouped_expert_problems(config)),
        ),
        kernels=KernelPlan(
            cast_recipes=choices.triton_cast_recipes(config),
            casts_need_amax_pass=choices.triton_casts_need_amax_pass(config),
            has_op_fuser=choices.uses_op_fuser(config),
            quantizes_in_swiglu=choices.fuses_swiglu_quantization(config),
            splits_rope=choices.uses_split_rope_kernel(config),
        ),
    )
