"""What Transformer Engine's layers do in the model of a rank.

A run loads the modules of what it uses; `layers` is that of every run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as BlockSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megafp8.config import precision_map
from megafp8.config.expert_layers import expert_layers
from megafp8.config.model_plan import ModelPlan
from megafp8.config.schema import ModelConfig, OptimizerConfig, PrecisionConfig
from megafp8.mcore.layer_runtime import CodesByLinear, LayerRuntime, Model, MultiTokenSpec
from megafp8.mcore.multi_token import transformer_engine_spec
from megafp8.te import layers


class TransformerEngineRuntime(LayerRuntime):
    """The mechanisms of layers on Transformer Engine.

    Args:
        layer_spec: builds the spec of one layer, with or without experts.
    """

    def __init__(self, layer_spec: Callable[[ModelPlan, bool], ModuleSpec]):
        self.layer_spec = layer_spec

    def block_spec(self, plan: ModelPlan, core: TransformerConfig, indices: Sequence[int]) -> BlockSpec:
        has_experts = expert_layers(plan.model)
        kinds = {kind: self.layer_spec(plan, kind) for kind in set(has_experts)}
        return BlockSpec([kinds[has_experts[layer]] for layer in indices], layers.norm())

    def multi_token_spec(self, plan: ModelPlan, core: TransformerConfig, vp_stage: Optional[int]) -> MultiTokenSpec:
        layer = self.layer_spec(plan, expert_layers(plan.model)[-1])
        return transformer_engine_spec(core, layer, layers.norm(), vp_stage)

    def finish_chunk(self, plan: ModelPlan, chunk: GPTModel) -> None:
        if precision_map.with_all_phases(plan.precision).precision_map:
            from megafp8.te.recipes import apply_precision_map

            apply_precision_map(chunk, plan.model, plan.precision)

    def fuse_wgrad_accumulation(self, chunks: Sequence[nn.Module]) -> None:
        for chunk in chunks:
            layers.fuse_wgrad_accumulation(chunk)

    def writable_weights(self, chunks: list[nn.Module]) -> AbstractContextManager[None]:
        """FP8 weights are quantized after their initialization."""
        return layers.high_precision_weights(chunks)

    def codes_to_gather(self, model: ModelConfig, precision: PrecisionConfig, chunk: Any) -> CodesByLinear:
        from megafp8.te.gathered_codes import codes_by_linear

        return codes_by_linear(model, precision, chunk)

    def set_optimizer_state(self, settings: OptimizerConfig, optimizers: Iterable[Any]) -> None:
        from megafp8.te.adam_weights import cast_weights_of_adam

        cast_weights_of_adam(optimizers)

    def change_linears(self, model: Model, in_high_precision: Collection[str], smoothed: Collection[str]) -> None:
        from megafp8.te.high_precision_fallback import move_to_high_precision
        from megafp8.te.smoothing import smooth_inputs

        move_to_high_precision(model, in_high_precision)
        smooth_inputs(model, smoothed)

    def set_precision(self, model: ModelConfig, precision: PrecisionConfig, chunks: Model) -> None:
        from megafp8.te.recipes import set_precision

        set_precision(model, precision, chunks)

    def delayed_state(self, chunk: Any) -> list[Tensor]:
        return layers.delayed_state(chunk)

    def delayed_scales(self, chunk: Any) -> list[Tensor]:
        return layers.delayed_scales(chunk)

    def lacks_scales_of_attention(self, chunks: Sequence[Any]) -> bool:
        return any(layers.lacks_scales_of_attention(chunk) for chunk in chunks)

    def weights_with_fused_gradients(self, chunks: Sequence[Any]) -> list[nn.Parameter]:
        return layers.weights_with_fused_gradients(list(chunks))

    def attention_kernel(self) -> Optional[str]:
        return layers.selected_attention_backend()
