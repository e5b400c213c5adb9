"""Settings of mixture-of-experts layers: base classes of the sections `model` and `parallel`.

They are base classes and not sections of their own, so that a preset or a `--config` file describes a complete model in
one section, and so that functions of the model's shape need no second argument.
"""

from dataclasses import dataclass
from typing import ClassVar, Optional

from megafp8.config.schema.setting import (
    AT_LEAST_1,
    COEFFICIENT,
    DEPRECATED,
    FRACTION_BELOW_1,
    NOT_NEGATIVE,
    OWN,
    POSITIVE_COEFFICIENT,
    TESTS,
    Range,
    Role,
    setting,
)

LOAD_BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 20


# A table: default and help of each setting, then what else is known about it.
# fmt: off


@dataclass(frozen=True, kw_only=True)
class MixtureModelConfig:
    """Experts and router."""

    GROUP: ClassVar[str] = "experts"

    num_experts: Optional[int] = setting(
        None, "experts of each mixture-of-experts layer",
        maximum=MAX_EXPERTS, range=NOT_NEGATIVE, unset="a dense model",
    )
    moe_layer_freq: str = setting(
        "1", "layers with experts; N: every N-th layer, from the first; or a list of 0 and 1 for each layer, for "
        "example ([0]*3+[1]*58)",
        needs="--num-experts",
    )
    moe_ffn_hidden_size: Optional[int] = setting(
        None, "hidden size of the MLP of one expert",
        maximum=MAX_WIDTH, needs="--num-experts", range=AT_LEAST_1, unset="that of dense layers",
    )
    moe_shared_expert_intermediate_size: Optional[int] = setting(
        None, "hidden size of all shared experts together, which every token passes",
        maximum=MAX_WIDTH, needs="--num-experts", range=AT_LEAST_1, unset="none",
    )
    moe_shared_expert_gate: bool = setting(
        False, "multiply the output of the shared experts by a learned gate", needs="--num-experts"
    )
    moe_router_topk: int = setting(
        2, "experts of each token", maximum=MAX_EXPERTS, needs="--num-experts", range=AT_LEAST_1
    )
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("aux_loss",), "load balancing of the experts; several auxiliary losses are added; aux_loss: of a microbatch, "
        "seq_aux_loss: of each sequence, global_aux_loss: of a global batch, sinkhorn: routing without a loss",
        choices=LOAD_BALANCING_TYPES, many=True, needs="--num-experts",
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting(
        (0.0,), "coefficient of the auxiliary loss; one for each of several losses",
        many=True, needs="--num-experts", range=COEFFICIENT, role=Role.LEARNING | Role.MEMORY,
    )
    moe_z_loss_coeff: Optional[float] = setting(
        None, "coefficient of the z-loss of the router",
        needs="--num-experts", range=COEFFICIENT, role=Role.LEARNING | Role.MEMORY, unset="no z-loss",
    )
    moe_input_jitter_eps: Optional[float] = setting(
        None, "multiply the input of the router by uniform noise from 1 - eps to 1 + eps",
        needs="--num-experts", range=FRACTION_BELOW_1, role=Role.LEARNING | Role.MEMORY, unset="no noise",
    )
    moe_router_score_function: str = setting(
        "softmax", "function from the router's logits to scores", choices=("softmax", "sigmoid"), needs="--num-experts"
    )
    moe_router_pre_softmax: bool = setting(
        False, "apply the softmax before the selection of experts, not after", needs="--num-experts"
    )
    moe_router_topk_scaling_factor: Optional[float] = setting(
        None, "factor of the scores of the selected experts", needs="--num-experts", range=POSITIVE_COEFFICIENT
    )
    moe_router_enable_expert_bias: bool = setting(
        False, "balance the load by a bias of each expert in the selection, without a loss", needs="--num-experts"
    )
    moe_router_bias_update_rate: float = setting(
        1e-3, "change of an expert's bias in each step",
        needs="--num-experts", range=COEFFICIENT, role=Role.LEARNING | Role.MEMORY,
    )
    moe_router_num_groups: Optional[int] = setting(
        None, "groups of experts; each token selects --moe-router-group-topk of them first",
        maximum=MAX_EXPERTS, needs="--num-experts", range=AT_LEAST_1,
    )
    moe_router_group_topk: Optional[int] = setting(
        None, "groups of experts that a token selects", maximum=MAX_EXPERTS, needs="--num-experts", range=AT_LEAST_1
    )
    moe_router_dtype: Optional[str] = setting(
        None, "dtype of the router",
        choices=("fp32", "fp64"), needs="--num-experts", role=Role.LEARNING | Role.MEMORY, unset="fp32",
        megatron="the default is the dtype of the weights",
    )
    moe_router_force_load_balancing: bool = setting(
        False, "replace the router's logits by random numbers, for benchmarks of a balanced load",
        needs="--num-experts", role=Role.FUNCTION | Role.LEARNING | Role.MEMORY, audience=TESTS,
    )
    moe_router_padding_for_quantization: bool = setting(
        False, "assign more tokens to an expert until their number fits the quantized GEMMs, in place of zeros",
        flags=("--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"), needs="--num-experts",
        role=Role.LEARNING | Role.MEMORY,
    )
    moe_expert_capacity_factor: Optional[float] = setting(
        None, "tokens of an expert at most, as a multiple of a balanced load; the others are dropped; negative: no "
        "limit",
        needs="--num-experts", range=Range(-1e12, 1e12), role=Role.LEARNING | Role.MEMORY, unset="no limit",
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        False, "pad the input of each expert to its capacity", needs="--num-experts", role=Role.LEARNING | Role.MEMORY
    )
    moe_token_drop_policy: str = setting(
        "probs", "tokens that an expert above its capacity keeps; probs: those with the highest score, position: the "
        "first",
        choices=("probs", "position"), needs="--num-experts", role=Role.LEARNING | Role.MEMORY,
    )
    moe_apply_probs_on_input: bool = setting(
        False, "multiply the input of the experts by the scores, not their output (only with --moe-router-topk 1)",
        needs="--num-experts",
    )


@dataclass(frozen=True, kw_only=True)
class MixtureParallelConfig:
    """Layout and kernels of mixture-of-experts layers."""

    GROUP: ClassVar[str] = "experts"

    expert_model_parallel_size: int = setting(
        1, "expert-parallel ranks; they divide the experts",
        needs="--num-experts", range=AT_LEAST_1, unit="ranks",
    )
    expert_tensor_parallel_size: Optional[int] = setting(
        None, "number of tensor-parallel ranks of the experts",
        needs="--num-experts", range=AT_LEAST_1, unset="that of the other layers", unit="ranks",
    )
    moe_token_dispatcher_type: str = setting(
        "auto", "exchange of tokens between expert-parallel ranks; peer: GPUs of a node write them into each other's "
        "memory; auto: peer where all settings support it, else alltoall with several ranks and where a setting needs "
        "it, else allgather; flex: by DeepEP or HybridEP, which must be installed",
        choices=("auto", "allgather", "alltoall", "flex", "peer"), needs="--num-experts",
        megatron="the default is allgather; there is no auto",
    )
    moe_dispatch_in_fp8: bool = setting(
        False, "send tokens to the ranks of their experts as the codes that the experts multiply, half the bytes "
        "(alltoall, a recipe with one scale for each tensor; emulated layers, or --moe-expert-kernels triton)",
        needs="--num-experts", megatron=OWN,
    )
    moe_flex_dispatcher_backend: str = setting(
        "deepep", "library of --moe-token-dispatcher-type flex",
        choices=("deepep", "hybridep"), needs="--moe-token-dispatcher-type flex",
    )
    moe_enable_deepep: bool = setting(
        False, "Megatron-LM's older name of --moe-flex-dispatcher-backend deepep",
        needs="--num-experts", audience=DEPRECATED,
    )
    moe_flex_dispatcher_num_sms: Optional[int] = setting(
        None, "SMs of a GPU that exchange tokens with --moe-token-dispatcher-type flex",
        flags=("--moe-flex-dispatcher-num-sms", "--moe-deepep-num-sms", "--moe-hybridep-num-sms"),
        needs="--moe-token-dispatcher-type flex", range=AT_LEAST_1, unset="megatron-core's",
    )
    moe_shared_expert_overlap: bool = setting(
        False, "overlap the shared experts with the exchange of tokens (alltoall only)", needs="--num-experts"
    )
    moe_grouped_gemm: bool = setting(
        False, "multiply all experts of a rank in one call (Transformer Engine); emulated layers have the same results",
        needs="--num-experts",
    )
    moe_expert_kernels: Optional[str] = setting(
        None, "experts on a GPU; triton: all in one launch per GEMM, with fused casts; te: Transformer Engine's "
        "linears",
        choices=("triton", "te"), needs="--num-experts", role=Role.MEMORY | Role.AUTOMATIC,
        unset="triton where Transformer Engine's layers and the settings allow it", megatron=OWN,
    )
    moe_permute_fusion: bool = setting(
        False, "permute tokens by Transformer Engine's kernels, with the same results", needs="--num-experts"
    )
    moe_router_fusion: bool = setting(
        False, "compute scores and losses of the router by Transformer Engine's kernels", needs="--num-experts"
    )
