"""What layers without Transformer Engine, emulated ones and megatron-core's own, do in the model of a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Optional

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as BlockSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megafp8.config import multi_token, precision_map
from megafp8.config.expert_layers import expert_layers
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.model_plan import ModelPlan
from megafp8.config.precision_map import OUTPUT_LAYER, build_linear_recipe
from megafp8.config.schema import ModelConfig, OptimizerConfig, PrecisionConfig
from megafp8.mcore import patches
from megafp8.mcore.layer_runtime import CodesByLinear, LayerRuntime, Model, MultiTokenSpec
from megafp8.mcore.modules import named_linears
from megafp8.mcore.multi_token import local_spec
from megafp8.models.emulated_layers import (
    EmulatedColumnParallelLinear,
    EmulatedLinearMixin,
    EmulatedOutputLayer,
    cached_weight_codes,
    convert_to_quantized_parameters,
    emulated_linears,
)
from megafp8.models.layer_specs import Norm, layer_spec, linear_params, linear_recipes, te_layer_spec
from megafp8.optimizer.emulated_state import emulate_low_precision_state
from megafp8.quantization.delayed_scaling import AmaxExchange
from megafp8.quantization.fp8_parameter import GatheredCodes
from megafp8.quantization.scaled_gemm import accumulate
from megafp8.recipes.base import Gemm


def layer_runtime(backend: LayerBackend) -> LayerRuntime:
    """The mechanisms of the layers of a run."""
    if not backend.needs_transformer_engine:
        return EmulatedRuntime(backend)
    from megafp8.te.runtime import TransformerEngineRuntime  # needs Transformer Engine

    return TransformerEngineRuntime(te_layer_spec)


class EmulatedRuntime(LayerRuntime):
    """The mechanisms of emulated layers. megatron-core's own are those of which no linear has a recipe."""

    def __init__(self, backend: LayerBackend):
        self.backend = backend

    def block_spec(self, plan: ModelPlan, core: TransformerConfig, indices: Sequence[int]) -> BlockSpec:
        has_experts = expert_layers(plan.model)
        recipes = linear_recipes(plan.model, plan.precision) if self.backend.quantizes else {}
        exchange = AmaxExchange()  # shared by all layers of the chunk
        specs = []
        for layer in indices:
            names = precision_map.layer_linears(plan.model, has_experts[layer])
            chosen = {name: recipes.get(f"layers.{layer}.{name}") for name in names}
            specs.append(layer_spec(plan, core, layer, chosen, exchange, self.backend.stacks_experts))
        return BlockSpec(specs, Norm)

    def multi_token_spec(self, plan: ModelPlan, core: TransformerConfig, vp_stage: Optional[int]) -> MultiTokenSpec:
        model, precision = plan.model, plan.precision
        last = len(expert_layers(model)) - 1
        recipe = None
        if self.backend.quantizes:
            recipe = build_linear_recipe(precision, precision_map.multi_token_choice(precision))
        names = precision_map.layer_linears(model, expert_layers(model)[last])
        exchange = AmaxExchange()
        layer = layer_spec(plan, core, last, dict.fromkeys(names, recipe), exchange)
        params = linear_params(precision, recipe, exchange, f"{plan.seed}|{multi_token.PROJECTION}")
        projection = ColumnParallelLinear if recipe is None else ModuleSpec(EmulatedColumnParallelLinear, params)
        return local_spec(core, layer, projection, Norm, vp_stage)

    def finish_chunk(self, plan: ModelPlan, chunk: GPTModel) -> None:
        recipe = linear_recipes(plan.model, plan.precision)[OUTPUT_LAYER] if self.backend.quantizes else None
        if chunk.post_process and recipe is not None:
            chunk.output_layer = EmulatedOutputLayer.from_plain(
                chunk.output_layer, chunk.shared_embedding_or_output_weight(), recipe,
                amax_reduction=plan.precision.fp8_amax_reduction,
                noise_name=f"{plan.seed}|{OUTPUT_LAYER}",
            )  # fmt: skip

    def fuse_wgrad_accumulation(self, chunks: Sequence[nn.Module]) -> None:
        patches.provide_wgrad_gemm(patches.with_overwrite(accumulate_wgrad))
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.gradient_accumulation_fusion = True

    def convert_weights(self, chunks: Sequence[nn.Module]) -> None:
        if self.backend.quantizes:
            convert_to_quantized_parameters(chunks)

    def codes_to_gather(self, model: ModelConfig, precision: PrecisionConfig, chunk: Any) -> CodesByLinear:
        linears = [
            linear
            for linear in emulated_linears([chunk])
            if not linear.is_output and linear.recipe is not None and linear.recipe.is_quantized(Gemm.FPROP)
        ]
        codes = {linear: partial(gathered_codes, linear) for linear in linears}
        return codes, lambda: any(linear.has_cached_codes for linear in linears)

    def set_optimizer_state(self, settings: OptimizerConfig, optimizers: Iterable[Any]) -> None:
        emulate_low_precision_state(settings, optimizers)

    def change_linears(self, model: Model, in_high_precision: Collection[str], smoothed: Collection[str]) -> None:
        for name, linear in emulated_linears_by_name(model):
            if name in smoothed:
                linear.smooth_input()
            if name in in_high_precision:
                linear.move_to_high_precision()

    def set_precision(self, model: ModelConfig, precision: PrecisionConfig, chunks: Model) -> None:
        recipes = linear_recipes(model, precision)
        for name, linear in emulated_linears_by_name(chunks):
            linear.set_recipe(recipes[precision_map.name_of_all_experts(name)])

    def cached_weights(self, chunks: Sequence[Any]) -> AbstractContextManager[None]:
        # Each weight is quantized once for all microbatches of a step.
        return cached_weight_codes(chunks)


def accumulate_wgrad(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad [N, K] += grad_output^T [N, T] . input [T, K], summed in FP32, in place."""
    accumulate(main_grad, grad_output.t(), input)


def gathered_codes(linear: Any, rows: Tensor, shape: torch.Size) -> GatheredCodes:
    """The codes of an emulated linear's weight, which ranks gather."""
    return GatheredCodes(rows, shape, *linear.weight_code_options())


def emulated_linears_by_name(chunks: Sequence[Any]) -> Iterator[tuple[str, EmulatedLinearMixin]]:
    """The emulated linears of this rank that have a recipe."""
    for chunk in unwrap_model(list(chunks)):
        for name, module in named_linears(chunk):
            if isinstance(module, EmulatedLinearMixin) and module.recipe is not None:
                yield name, module
