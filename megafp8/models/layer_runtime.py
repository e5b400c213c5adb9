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
from megafp8.config.precision_map import OUTPUT_LAYER, build_linear_recipe
from megafp8.config.schema import RunConfig
from megafp8.mcore import patches
from megafp8.mcore.layer_runtime import CodesByLinear, LayerRuntime, LinearCounters, Model, MultiTokenSpec
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
from megafp8.quantization.counters import QuantizerCounters
from megafp8.quantization.delayed_scaling import OPERANDS, AmaxExchange, DelayedState, keeps_amaxes
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

    def block_spec(self, config: RunConfig, core: TransformerConfig, indices: Sequence[int]) -> BlockSpec:
        has_experts = expert_layers(config.model)
        recipes = linear_recipes(config) if self.backend.quantizes else {}
        exchange = AmaxExchange()  # shared by all layers of the chunk
        specs = []
        for layer in indices:
            names = precision_map.layer_linears(config.model, has_experts[layer])
            chosen = {name: recipes.get(f"layers.{layer}.{name}") for name in names}
            specs.append(layer_spec(config, core, layer, chosen, exchange, self.backend.stacks_experts))
        return BlockSpec(specs, Norm)

    def multi_token_spec(self, config: RunConfig, core: TransformerConfig, vp_stage: Optional[int]) -> MultiTokenSpec:
        model, precision = config.model, config.precision
        last = len(expert_layers(model)) - 1
        recipe = None
        if self.backend.quantizes:
            recipe = build_linear_recipe(precision, precision_map.multi_token_choice(precision))
        names = precision_map.layer_linears(model, expert_layers(model)[last])
        exchange = AmaxExchange()
        layer = layer_spec(config, core, last, dict.fromkeys(names, recipe), exchange)
        params = linear_params(config, recipe, exchange, f"{config.training.seed}|{multi_token.PROJECTION}")
        projection = ColumnParallelLinear if recipe is None else ModuleSpec(EmulatedColumnParallelLinear, params)
        return local_spec(core, layer, projection, Norm, vp_stage)

    def finish_chunk(self, config: RunConfig, chunk: GPTModel) -> None:
        recipe = linear_recipes(config)[OUTPUT_LAYER] if self.backend.quantizes else None
        if chunk.post_process and recipe is not None:
            chunk.output_layer = EmulatedOutputLayer.from_plain(
                chunk.output_layer, chunk.shared_embedding_or_output_weight(), recipe,
                amax_reduction=config.precision.fp8_amax_reduction,
                noise_name=f"{config.training.seed}|{OUTPUT_LAYER}",
            )  # fmt: skip

    def fuse_wgrad_accumulation(self, chunks: Sequence[nn.Module]) -> None:
        patches.provide_wgrad_gemm(patches.with_overwrite(accumulate_wgrad))
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.gradient_accumulation_fusion = True

    def convert_weights(self, config: RunConfig, chunks: Sequence[nn.Module]) -> None:
        if config.precision.fp8_param_gather and self.backend.quantizes and not config.parallel.shards_weights:
            convert_to_quantized_parameters(chunks)

    def codes_to_gather(self, config: RunConfig, chunk: Any) -> CodesByLinear:
        linears = [
            linear
            for linear in emulated_linears([chunk])
            if not linear.is_output and linear.recipe is not None and linear.recipe.is_quantized(Gemm.FPROP)
        ]
        codes = {linear: partial(gathered_codes, linear) for linear in linears}
        return codes, lambda: any(linear.has_cached_codes for linear in linears)

    def set_optimizer_state(self, config: RunConfig, optimizers: Iterable[Any]) -> None:
        emulate_low_precision_state(config.optimizer, optimizers)

    def counters(self, config: RunConfig, linears: Sequence[str], model: Model, device: torch.device) -> LinearCounters:
        return EmulatedCounters(linears, model, device)

    def change_linears(self, model: Model, in_high_precision: Collection[str], smoothed: Collection[str]) -> None:
        for name, linear in emulated_linears_by_name(model):
            if name in smoothed:
                linear.smooth_input()
            if name in in_high_precision:
                linear.move_to_high_precision()

    def set_precision(self, config: RunConfig, model: Model) -> None:
        recipes = linear_recipes(config)
        for name, linear in emulated_linears_by_name(model):
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


class EmulatedCounters:
    """`LinearCounters` of emulated linears.

    Args:
        linears: names of all quantized linears of the model, the same on all ranks.
        chunks: the model.
    """

    def __init__(self, linears: Sequence[str], chunks: Sequence[Any], device: torch.device):
        self.values = QuantizerCounters(linears, device)
        self.linears = self.values.linears
        self.windows: dict[str, DelayedState] = {}
        for name, linear in emulated_linears_by_name(chunks):
            if name not in self.linears:
                continue
            linear.counts = self.values.of_linear(name)
            state = getattr(linear, "quantizer_state", None)
            if isinstance(state, DelayedState) and keeps_amaxes(state.options):
                self.windows[name] = state

    def reset(self) -> None:
        """Clear the counts before a step."""
        self.values.reset()

    def totals(self) -> Tensor:
        """As in `LinearCounters`."""
        totals = self.values.totals()
        histories = [state.infinite_amaxes.any() for state in self.windows.values()]
        num_infinite = torch.stack(histories).sum() if histories else torch.zeros_like(totals[0])
        return torch.cat([totals, num_infinite[None]])

    def table(self) -> Tensor:
        """As in `LinearCounters`."""
        return self.values.table.clone()

    def clear_infinite_amaxes(self) -> list[str]:
        """As in `LinearCounters`."""
        names = []
        for name, state in self.windows.items():
            is_infinite = state.infinite_amaxes.tolist()
            names += [f"{name}.{operand.value}" for operand, bad in zip(OPERANDS, is_infinite, strict=True) if bad]
            state.clear_infinite_amaxes()
        return names


def emulated_linears_by_name(chunks: Sequence[Any]) -> Iterator[tuple[str, EmulatedLinearMixin]]:
    """The emulated linears of this rank that have a recipe."""
    for chunk in unwrap_model(list(chunks)):
        for name, module in named_linears(chunk):
            if isinstance(module, EmulatedLinearMixin) and module.recipe is not None:
                yield name, module
