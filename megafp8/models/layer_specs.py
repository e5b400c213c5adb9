"""megatron-core layer specs of every implementation, and LayerNorm and RMSNorm without Transformer Engine.

Emulated and Transformer Engine layers have the same parameters under the same checkpoint keys, so either can load the
other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megafp8.config import attention_layers, derived, dimensions, latent_attention, precision_map
from megafp8.config.grouped_experts import expert_choices
from megafp8.config.mixture import PEER
from megafp8.config.model_plan import ModelPlan
from megafp8.config.precision_map import EXPERTS, LINEARS, MLP_LINEARS, build_linear_recipe
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.config.stages import Stages
from megafp8.mcore.latent_attention import DownProjection, LatentAttention
from megafp8.mcore.modules import NormedSelfAttention, mlp_spec, mlp_submodules
from megafp8.models.attention import CausalAttention
from megafp8.models.dispatch import DispatchingLayer
from megafp8.models.emulated_layers import (
    AmaxGroups,
    EmulatedColumnParallelLinear,
    EmulatedLinearMixin,
    EmulatedRowParallelLinear,
)
from megafp8.models.experts import Linear, mixture_spec
from megafp8.models.grouped_moe import ExchangedExperts, GroupedExperts, GroupedMoELayer, PeerMoELayer
from megafp8.models.router import Router
from megafp8.quantization.delayed_scaling import AmaxExchange
from megafp8.recipes.base import LinearRecipe

# ---------------------------------------------------------------------------------------------------------------------
# How a layer adds the outputs of attention and MLP to the residual stream, where it is not megatron-core's way
# megatron-core's layer calls an entry of its spec for each addition. `ResidualAdd` takes that place, with a norm of
# the output and a multiplier. The addition computes the same with every implementation of the linears.

# Keys in checkpoints of the norms after attention and MLP.
POST_NORM_KEYS = {
    "self_attn_bda.norm.": "self_attention.post_layernorm.",
    "mlp_bda.norm.": "mlp.post_layernorm.",
}

Add = Callable[[tuple[Tensor, Optional[Tensor]], Tensor, float], Tensor]


class ResidualAdd(torch.nn.Module):
    """residual + dropout(multiplier * norm(output + bias)).

    Args:
        norm: class of the norm; None without one.
        multiplier: of the normalized output.
    """

    def __init__(self, config: TransformerConfig, norm: Optional[type], multiplier: float):
        super().__init__()
        self.multiplier = multiplier
        self.norm = None
        if norm is not None:
            self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, is_fused: bool) -> Add:
        """The addition, as megatron-core's layer asks for it. There is no fused kernel of this addition."""

        def add(output_with_bias: tuple[Tensor, Optional[Tensor]], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            if bias is not None:
                output = output + bias
            if self.norm is not None:
                output = self.norm(output)
            if self.multiplier != 1:
                output = output * self.multiplier
            return residual + F.dropout(output, dropout, training)

        return add


def residual_add(model: ModelConfig, config: TransformerConfig, norm: type) -> Any:
    """The entry of a layer's spec for both additions: megatron-core's, where that is the same."""
    has_norm = model.norm_placement != "pre"
    if not has_norm and model.residual_multiplier == 1:
        return get_bias_dropout_add
    return ModuleSpec(
        ResidualAdd, {"config": config, "norm": norm if has_norm else None, "multiplier": model.residual_multiplier}
    )


class ParallelResidualLayer(TransformerLayer):
    """A layer that adds attention and MLP of the same input: x + attention(norm(x)) + MLP(other norm(x))."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Optional[Tensor]]:
        """megatron-core's forward pass, with the input of the layer as that of the MLP."""
        options.pop("dynamic_inference_decode_only", None)
        with_attention, context = self._forward_attention(hidden_states, *args, **options)
        output = self.mlp(self._forward_pre_mlp_layernorm(hidden_states))
        with self.bias_dropout_add_exec_handler():
            add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
            return add(output, with_attention, self.hidden_dropout), context


# ---- RMSNorm of queries or keys over the channels of all heads (OLMo et al. 2024, OLMo 2) ---------------------------


class AcrossHeadsNorm(torch.nn.Module):
    """RMSNorm over all heads, which tensor-parallel ranks share.

    Shapes: input and output (S, B, heads, channels) with the heads of this rank; weight (heads * channels,).
    Numerics: in FP32; the result has the dtype of the input.

    Args:
        num_heads: over all tensor-parallel ranks.
        hidden_size: channels of one head, which is what megatron-core's attention passes.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, num_heads: int, eps: float = 1e-5):
        super().__init__()
        self.eps, self.width = eps, num_heads * hidden_size
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.group = parallel_state.get_tensor_model_parallel_group()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        local_width = self.width // self.group.size()
        self.weight = torch.nn.Parameter(torch.empty(local_width, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the channels of all heads together."""
        values = x.float()
        total = values.square().sum(dim=(-2, -1), keepdim=True)
        if self.group.size() > 1:
            # The sum is reduced in the forward pass, and its gradient in the backward pass: every rank uses the sum.
            total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(total))
        weight = self.weight.float() + 1 if self.is_zero_centered else self.weight.float()
        normalized = values * torch.rsqrt(total / self.width + self.eps)
        return (normalized * weight.view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weight, split over the heads."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=self.group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


# ---- Spec of multi-latent attention with emulated or plain linears (`mcore.latent_attention`) -----------------------


class EmulatedDownProjection(EmulatedLinearMixin, DownProjection):
    """y = x w^T with the complete weight on every tensor-parallel rank, for the rank's part of the sequence.

    Shapes: weight [N, K], input [T/P, K], grad_output [T/P, N]. Arguments are those of both base classes.
    """

    splits_grad_output = True

    def amax_groups(self, sequence_parallel: bool) -> AmaxGroups:
        """With the reduction of Transformer Engine, which has no groups for such a linear, a rank uses its own amax."""
        if self.amax_reduction == "te":
            return AmaxGroups()
        group = self._activation_group(split_over_tensor=True)
        return AmaxGroups(input=group, grad_output=group)


DOWN = (DownProjection, EmulatedDownProjection)
"""The plain and the emulated class of a down projection."""


def latent_attention_spec(
    model: ModelConfig, linear: Callable[[str], Linear], norm: type, core_attention: ModuleSpec
) -> ModuleSpec:
    """Build the spec of multi-latent attention of one layer.

    Args:
        linear: returns the linear of a name.
        norm: of the compressed queries, and of the compressed keys and values.
    """
    names = latent_attention.linear_names(model)
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            **{name: linear(name) for name in names},
            core_attention=core_attention,
            q_layernorm=norm if model.q_lora_rank is not None else IdentityOp,
            kv_layernorm=norm,
        ),
    )


# ---- Layers with rotary frequencies of their own, as those with a sliding window in Gemma 3 -------------------------


class LocalRotaryLayer(TransformerLayer):
    """megatron-core's layer with another base of the rotary embedding than the model, and no scaled frequencies.

    Args:
        rotary_base: of this layer.
        rotary_percent: rotated fraction of a head's channels.
    """

    def __init__(self, *args: Any, rotary_base: int, rotary_percent: float, **options: Any):
        super().__init__(*args, **options)
        self.local_rotary = RotaryEmbedding(
            kv_channels=self.config.kv_channels,
            rotary_percent=rotary_percent,
            rotary_interleaved=self.config.rotary_interleaved,
            rotary_base=rotary_base,
            use_cpu_initialization=self.config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **options: Any) -> tuple[Tensor, Optional[Tensor]]:
        """megatron-core's forward pass with the rotary embedding of this layer, for as many positions."""
        length = rotary_pos_emb.shape[0] * self.pg_collection.cp.size()
        return super().forward(*args, rotary_pos_emb=self.local_rotary(length), **options)


# ---- An RMSNorm on a CPU that saves its input, as kernels on GPUs do ------------------------------------------------


class InputSavingRMSNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, with torch's bits in the forward pass.

    torch's own on a CPU is several operations, which save the input and the normalized input in FP32. This one saves
    the input as it is, the weight, and the reciprocal standard deviations in FP32. Gradients are computed in FP32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (..., hidden_size), weight (hidden_size,)."""
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of input and weight."""
        x, weight, rstd = ctx.saved_tensors
        grad = grads[0].float()
        normalized, scaled = x.float() * rstd, grad * weight.float()
        dx = rstd * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * normalized).flatten(0, -2).sum(0).to(weight.dtype), None


# ----------------------------------------------------------------------------------------------------------------------

# The norm before a linear has the key of Transformer Engine's fused norm and linear.
# Before experts there is no such linear.
ATTENTION_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", **POST_NORM_KEYS}
LATENT_ATTENTION_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
MLP_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_COLUMN, _ROW = (ColumnParallelLinear, EmulatedColumnParallelLinear), (RowParallelLinear, EmulatedRowParallelLinear)
LINEAR_CLASSES: Mapping[str, tuple[type, type]] = MappingProxyType(
    dict(zip(LINEARS, (_COLUMN, _ROW) * 2, strict=True))
    | dict.fromkeys(latent_attention.PROJECTIONS, _COLUMN)
    | dict.fromkeys(latent_attention.DOWN_PROJECTIONS, DOWN)
)
"""The plain and the emulated class of each linear."""


def te_layer_spec(plan: ModelPlan, has_experts: bool) -> ModuleSpec:
    """Build the spec of one layer on Transformer Engine."""
    from megafp8.te import layers as te_layers  # needs Transformer Engine

    layer = te_layers.layer_spec(plan, has_experts)
    if plan.model.attention_logit_softcapping is not None:  # Transformer Engine's attention has none
        layer.submodules.self_attention.submodules.core_attention = torch_attention(plan.model, plan.precision)
    if has_experts:
        submodules = mlp_submodules(layer.submodules.mlp)
        submodules.router = Router
        if plan.experts.supports_one_launch:
            layer.submodules.mlp = grouped_mixture_spec(submodules, plan)
    return layer


def chunk_layers(stages: Stages, transformer_config: TransformerConfig, vp_stage: Optional[int]) -> range:
    """Global indices of the layers that megatron-core builds in a chunk of this rank.

    Raises:
        RuntimeError: they are not those that the settings give, on which rules and planner rely.
    """
    start = get_transformer_layer_offset(transformer_config, vp_stage)
    layers = range(start, start + get_num_layers_to_build(transformer_config, vp_stage))
    expected = stages[parallel_state.get_pipeline_model_parallel_rank()][vp_stage or 0]
    if layers != expected:
        raise RuntimeError(f"megatron-core builds {layers} of the layers on this stage, not {expected}")
    return layers


def grouped_mixture_spec(submodules: MoESubmodules, plan: ModelPlan) -> ModuleSpec:
    """Spec of a layer's experts that run in one launch per GEMM. Its `experts` replace those of `submodules`."""
    (choice,) = expert_choices(plan.model, plan.precision)
    # One exchange for all layers that are built from the spec: on Transformer Engine those of a model chunk.
    arguments = {"recipe": build_linear_recipe(plan.precision, choice), "exchange": AmaxExchange()}
    experts = plan.experts
    if experts.dispatcher != PEER and experts.num_ranks > 1:
        submodules.experts = ModuleSpec(ExchangedExperts, arguments)
        return ModuleSpec(DispatchingLayer, {"sends_codes": experts.sends_codes}, submodules)
    submodules.experts = ModuleSpec(GroupedExperts, arguments)
    return ModuleSpec(PeerMoELayer if experts.dispatcher == PEER else GroupedMoELayer, {}, submodules)


def torch_attention(model: ModelConfig, precision: PrecisionConfig) -> ModuleSpec:
    """Spec of attention without Transformer Engine."""
    options = {
        "logit_softcapping": model.attention_logit_softcapping,
        "is_unfused": precision.attention_backend == "unfused",
    }
    return ModuleSpec(CausalAttention, options)


def linear_recipes(model: ModelConfig, precision: PrecisionConfig) -> dict[str, Optional[LinearRecipe]]:
    """The recipe of every linear of the model, by name; None in high precision."""
    choices = precision_map.resolve(model, precision)
    return {name: build_linear_recipe(precision, choice) for name, choice in choices.items()}


def layer_spec(
    plan: ModelPlan,
    transformer_config: TransformerConfig,
    layer: int,
    recipes: Mapping[str, Optional[LinearRecipe]],
    exchange: AmaxExchange,
    may_stack_experts: bool = False,
) -> ModuleSpec:
    """Build the spec of one layer: emulated linears where there is a recipe, else megatron-core's linears.

    Args:
        layer: its index in the model.
        recipes: of the layer's linears, by the names of `precision_map.layer_linears`.
        exchange: updates the scales of delayed scaling.
        may_stack_experts: with `--moe-expert-kernels triton`, experts on a GPU run in one launch per GEMM.
    """

    def linear(name: str) -> Linear:
        recipe = recipes.get(name)
        plain, emulated = LINEAR_CLASSES[name.rpartition(".")[2]]
        if recipe is None:
            return plain
        return ModuleSpec(emulated, linear_params(plan.precision, recipe, exchange, noise_name))

    model, experts = plan.model, plan.experts
    noise_name = f"{plan.seed}|layer {layer}"
    has_experts = EXPERTS + MLP_LINEARS[0] in recipes
    if has_experts:
        mlp: Any = mixture_spec(linear, derived.gemm_alignment(plan.precision), noise_name, experts.sends_codes)
        on_cuda = not transformer_config.use_cpu_initialization
        if may_stack_experts and experts.requests_one_launch and on_cuda:
            mlp = grouped_mixture_spec(mlp.submodules, plan)
    else:
        mlp = mlp_spec(MLP, MLPSubmodules(linear_fc1=linear("linear_fc1"), linear_fc2=linear("linear_fc2")))
    input_norm = IdentityOp if model.norm_placement == "post" else Norm
    add = residual_add(model, transformer_config, Norm)
    module, params = layer_module(model, layer)
    return ModuleSpec(
        module=module,
        params=params,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=attention_spec(model, plan.precision, linear),
            self_attn_bda=add,
            pre_mlp_layernorm=input_norm,
            mlp=mlp,
            mlp_bda=add,
            sharded_state_dict_keys_map=checkpoint_keys(model, has_experts),
        ),
    )


def linear_params(
    precision: PrecisionConfig, recipe: Optional[LinearRecipe], exchange: AmaxExchange, noise_name: str
) -> dict[str, Any]:
    """Further arguments of the constructor of an emulated linear."""
    params: dict[str, Any] = {"recipe": recipe, "amax_reduction": precision.fp8_amax_reduction}
    if recipe is not None and recipe.delayed is not None:
        params["amax_exchange"] = exchange
    if recipe is not None and recipe.is_stochastic:
        params["noise_name"] = noise_name
    return params


def checkpoint_keys(model: ModelConfig, has_experts: bool) -> dict[str, str]:
    """The map from the keys of a layer's norms to those of Transformer Engine's layer."""
    keys = LATENT_ATTENTION_KEYS if latent_attention.is_latent(model) else ATTENTION_KEYS
    return dict(keys if has_experts else keys | MLP_KEYS)


def attention_spec(model: ModelConfig, precision: PrecisionConfig, linear: Callable[[str], Linear]) -> ModuleSpec:
    """Build the spec of the attention of one layer.

    Args:
        linear: returns the linear of a name.
    """
    norm = L2Norm if model.qk_l2_norm else Norm if model.qk_layernorm else IdentityOp
    if latent_attention.is_latent(model):
        return latent_attention_spec(model, linear, norm, torch_attention(model, precision))
    across_heads = across_heads_norms(model)
    query_norm, key_norm = across_heads or (norm, norm)
    return ModuleSpec(
        module=NormedSelfAttention if across_heads else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear("linear_qkv"),
            core_attention=torch_attention(model, precision),
            linear_proj=linear("linear_proj"),
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )


def layer_module(model: ModelConfig, layer: int) -> tuple[type[TransformerLayer], dict[str, Any]]:
    """The class of a layer, and further arguments of its constructor."""
    if model.parallel_residual:
        return ParallelResidualLayer, {}
    if model.rotary_base_local is not None and attention_layers.windowed_layers(model)[layer]:
        return LocalRotaryLayer, {"rotary_base": model.rotary_base_local, "rotary_percent": model.rotary_percent}
    return TransformerLayer, {}


def across_heads_norms(model: ModelConfig) -> Optional[tuple[ModuleSpec, ModuleSpec]]:
    """The norms of queries and of keys over all heads; None if each head has its own."""
    if not model.qk_layernorm_across_heads:
        return None
    query, key = (
        ModuleSpec(AcrossHeadsNorm, {"num_heads": num_heads})
        for num_heads in (model.num_attention_heads, dimensions.num_query_groups(model))
    )
    return query, key


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, selected by `config.normalization`.

    Shapes: input and output (..., hidden_size); weight (and bias of LayerNorm) (hidden_size,).
    Numerics: torch's kernels, with FP32 statistics. `layernorm_zero_centered_gamma` stores weight - 1.

    Under sequence parallelism each tensor-parallel rank normalizes another part of the sequence. megatron-core sums the
    gradients of parameters marked `sequence_parallel` over these ranks; without the mark the weights would diverge.
    megatron-core's `WrappedTorchNorm` does not support sequence parallelism.

    Attributes:
        saves_input: save the input for the backward pass, and nothing larger, on a CPU too.
    """

    saves_input = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.is_rms = config.normalization == "RMSNorm"
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = self.build_parameter(device, config)
        self.bias = None if self.is_rms else self.build_parameter(device, config)

    def build_parameter(self, device: torch.device, config: TransformerConfig) -> torch.nn.Parameter:
        """An uninitialized vector, marked `sequence_parallel` if its gradient needs the reduction."""
        parameter = torch.nn.Parameter(torch.empty(self.shape, dtype=config.params_dtype, device=device))
        parameter.sequence_parallel = config.sequence_parallel
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        weight = self.weight + 1 if self.is_zero_centered else self.weight
        if self.is_rms and self.saves_input and not x.is_cuda:
            normalized: Tensor = InputSavingRMSNorm.apply(x, weight, self.eps)
            return normalized
        if self.is_rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
