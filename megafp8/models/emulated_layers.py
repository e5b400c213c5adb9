"""Column- and row-parallel linears of megatron-core with emulated low-precision GEMMs.

Only the GEMMs are replaced. Parameters, names, tensor-parallel attributes and `sharded_state_dict` are megatron-core's,
so checkpoints are interchangeable with those of megatron-core's linears. A stateful recipe adds a submodule,
`quantizer_state`. Its buffers are replicated tensors in the checkpoint, with keys per layer, since some layers may have
no such state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megafp8.mcore import patches
from megafp8.mcore.process_groups import amax_reduction_group
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.quantization import smoothing
from megafp8.quantization.counters import LinearCounts
from megafp8.quantization.delayed_scaling import AmaxExchange, DelayedState
from megafp8.quantization.fp8_parameter import QuantizedParameter, WeightCodes, quantize_shards
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import AmaxGroups, LinearPlan, Observer, QuantizedWeight, quantize_weight
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.prequantized import PrequantizedScale, dequantized
from megafp8.recipes.base import UNQUANTIZED, DelayedOptions, Gemm, LinearRecipe, Operand, OperandRule, ScaleRule

AMAX_REDUCTIONS = ("te", "all")
QUANTIZER_STATE = "quantizer_state"


class EmulatedLinearMixin:
    """Mixin for a parallel linear that quantizes its GEMMs by a recipe. A recipe of None leaves the layer unchanged.

    Args (keywords of `__init__`, besides those of the linear):
        recipe: what is quantized and how.
        amax_reduction: "te" reduces amaxes over the tensor-parallel ranks where Transformer Engine does, which is where
            shards of one tensor are gathered. "all" reduces them wherever an operand is a shard, so that scales and
            loss do not depend on the layout. Delayed scaling always reduces all amaxes, when it updates the scales.
        amax_exchange: updates the scales of delayed scaling for several layers at once; by default for this layer only.
        noise_name: seeds the random numbers of stochastic rounding; unique to the layer and the run's seed.

    Attributes:
        gradient_accumulation_fusion: add wgrad to `main_grad` inside the layer. Set it after construction, because the
            constructor of megatron-core's linear would require Apex.
        is_quantizing: if False, all GEMMs are in high precision and the state of the recipe does not change.
        is_fallback: the same for the rest of the run, see `move_to_high_precision`.
        input_scales: [K], powers of two by which the input is divided already; None is 1.
        is_smoothed: the input has a scale per channel, see `smooth_input`.
        counts: of non-finite and saturated values; None counts nothing.
        prequantized: the scale of the next input, which arrived as codes (`quantization/prequantized.py`); None: it did
            not.
    """

    # Attributes of megatron-core's linear.
    config: ModelParallelConfig
    tp_group: dist.ProcessGroup
    weight: Any
    is_expert: bool
    sequence_parallel: bool

    splits_grad_output: bool
    is_output = False
    quantizer_state: Any  # RoundingNoise or DelayedState; missing without either

    def __init__(
        self,
        *args: Any,
        recipe: Optional[LinearRecipe] = None,
        amax_reduction: str = "te",
        amax_exchange: Optional[AmaxExchange] = None,
        noise_name: str = "",
        **kwargs: Any,
    ):
        if amax_reduction not in AMAX_REDUCTIONS:
            raise ValueError(f"amax_reduction is {amax_reduction!r}; it must be one of {', '.join(AMAX_REDUCTIONS)}")
        super().__init__(*args, **kwargs)
        self.recipe = recipe
        self.is_quantizing = True
        self.is_fallback = False
        self.is_smoothed = False
        self.input_scales: Optional[Tensor] = None
        self.counts: Optional[LinearCounts] = None
        self.prequantized: Optional[PrequantizedScale] = None
        self.amax_reduction = amax_reduction
        self.observer: Optional[Observer] = None
        self.caches_weight_codes = False
        self._weight_codes: Optional[QuantizedWeight] = None
        self.amax_exchange: Optional[AmaxExchange] = None
        if recipe is not None and recipe.is_stochastic:
            linear = kwargs.get("tp_comm_buffer_name") or type(self).__name__  # qkv, proj, fc1, fc2
            self.quantizer_state = RoundingNoise(f"{noise_name}|{linear}|{self._grad_output_shard()}")
        if recipe is not None and recipe.delayed is not None:
            self._init_delayed_scaling(recipe, recipe.delayed, amax_exchange or AmaxExchange())

    def _init_delayed_scaling(self, recipe: LinearRecipe, options: DelayedOptions, exchange: AmaxExchange) -> None:
        """Create amax history and scales, and join the exchange that updates them."""
        on_cpu = self.config.use_cpu_initialization
        state = DelayedState(recipe).to(torch.device("cpu") if on_cpu else torch.cuda.current_device())
        if recipe.is_stochastic:
            state.noise = self.quantizer_state
        self.quantizer_state = state
        self.amax_exchange = exchange
        exchange.join(self.quantizer_state, amax_reduction_group(options))

    @property
    def noise(self) -> Optional[RoundingNoise]:
        """The random numbers of stochastic rounding; None if the recipe of the run rounds to nearest. Phases of
        `--fp8-schedule` change the recipe, and not the state."""
        state = getattr(self, "quantizer_state", None)
        return getattr(state, "noise", None) if isinstance(state, DelayedState) else state

    def amax_groups(self, sequence_parallel: bool) -> AmaxGroups:
        """The process groups over which the amax of each operand is reduced."""
        raise NotImplementedError

    def _grad_output_shard(self) -> str:
        """Identifies this rank's shard of grad_output. Every shard is rounded with different random numbers."""
        samples = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return f"{samples}|{self.tp_group.rank()}" if self.splits_grad_output else f"{samples}"

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict[str, Any]] = None
    ) -> dict[str, Any]:
        """megatron-core's, but with the layer number in the keys of `quantizer_state` in place of a layer dimension."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]  # of the linear
        layer = "".join(f"{number}." for _, number, _ in sharded_offsets)
        for name in [name for name in state if name.startswith(f"{prefix}{QUANTIZER_STATE}.")]:
            assert metadata is not None
            key = name.replace(f"{QUANTIZER_STATE}.", f"{QUANTIZER_STATE}.{layer}")
            state[name] = make_sharded_tensor_for_checkpoint(
                state[name].data, key, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
            )
        return state

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        *,
        gradient_accumulation_fusion: bool = False,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        grad_output_buffer: Optional[list[Tensor]] = None,
        **plain_options: Any,
    ) -> Tensor:
        if self.recipe is None:
            plain_forward = super()._forward_impl  # type: ignore[misc]  # of the linear
            return plain_forward(
                input=input, weight=weight, bias=bias, gradient_accumulation_fusion=gradient_accumulation_fusion,
                allreduce_dgrad=allreduce_dgrad, sequence_parallel=sequence_parallel,
                grad_output_buffer=grad_output_buffer, **plain_options,
            )  # fmt: skip
        assert grad_output_buffer is None, "deferred wgrad of the output layer is not supported"
        recipe = self.recipe if self.is_quantizing and not self.is_fallback else UNQUANTIZED
        if self.prequantized is not None and recipe is UNQUANTIZED:
            input = dequantized(input, self.prequantized)
        plan = LinearPlan(
            recipe=recipe,
            tensor_group=self.tp_group,
            gather_input=sequence_parallel,
            allreduce_dgrad=allreduce_dgrad,
            amax_groups=self.amax_groups(sequence_parallel),
            fuse_wgrad=gradient_accumulation_fusion,
            noise=self.noise if recipe.is_stochastic else None,
            observer=self.observer,
            counts=self.counts,
            channel_scales=self.input_scales,
            prequantized=None if recipe is UNQUANTIZED else self.prequantized,
        )
        if recipe.delayed is not None:
            return self._delayed_forward(input, weight, bias, plan)
        if self.is_smoothed and recipe is not UNQUANTIZED:
            input, plan = smoothing.smooth(input, plan)
            return emulated_linear(input, weight, bias, plan)  # each microbatch has its own scales of the weight
        return emulated_linear(input, weight, bias, plan, self._cached_weight_codes(weight, plan))

    def _delayed_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor], plan: LinearPlan) -> Tensor:
        """Forward pass with delayed scaling. The exchange updates the scales when all of its layers have run."""
        state, exchange = self.quantizer_state, self.amax_exchange
        assert exchange is not None
        scales, is_first_run = state.scales_for_forward()
        after_backward = functools.partial(exchange.backward_ran, state)
        plan = dataclasses.replace(plan, delayed=scales, after_backward=after_backward)
        output = emulated_linear(input, weight, bias, plan, self._cached_weight_codes(weight, plan))
        if is_first_run:
            exchange.forward_ran(state)
        return output

    def _cached_weight_codes(self, weight: Tensor, plan: LinearPlan) -> Optional[QuantizedWeight]:
        if not self.caches_weight_codes:
            return None
        if self._weight_codes is None:
            self._weight_codes = quantize_weight(weight, plan)
        return self._weight_codes

    @property
    def has_cached_codes(self) -> bool:
        """Whether the weight is quantized already, and may not be again before the update."""
        return self._weight_codes is not None

    def cache_weight_codes(self, is_cached: bool) -> None:
        """Start or stop caching the codes of the weight between forward passes, and drop the cached ones."""
        self.caches_weight_codes = is_cached
        self._weight_codes = None
        if is_cached and self.noise is not None:
            self.noise.start_step()
        if self.amax_exchange is not None:  # an error may have interrupted the last step
            self.amax_exchange.start_step()
            self.quantizer_state.stored_scales.clear()

    def set_recipe(self, recipe: Optional[LinearRecipe]) -> None:
        """Quantize by another recipe from now on, or nothing if it is None. Not within a step.

        Args:
            recipe: one without a state of its own, beyond that of the recipe that the linear was built with.
        """
        self.is_quantizing = recipe is not None
        if recipe is not None:
            self.recipe = recipe
        if self.amax_exchange is not None:
            self.amax_exchange.set_updated(self.quantizer_state, recipe is not None and recipe.delayed is not None)

    def move_to_high_precision(self) -> None:
        """Quantize no GEMM from now on. The state of the recipe stays in checkpoints, unchanged. Not within a step."""
        if self.amax_exchange is not None and not self.is_fallback:
            self.amax_exchange.leave(self.quantizer_state)
        self.is_fallback = True

    def smooth_input(self) -> None:
        """Give the input a scale per channel from now on (`quantization/smoothing.py`). Not within a step."""
        assert self.recipe is not None and self.recipe.delayed is None, "no scale for weights of one microbatch"
        self.is_smoothed = True

    def weight_code_options(self) -> tuple[OperandRule, Optional[dist.ProcessGroup], Optional[DelayedState]]:
        """The arguments of `WeightCodes` after the values."""
        assert self.recipe is not None
        rule = self.recipe.rule(Operand.WEIGHT, Gemm.FPROP)
        dgrad_rule = self.recipe.rule(Operand.WEIGHT, Gemm.DGRAD)
        assert rule is not None and rule == dgrad_rule, "fprop and dgrad must use the same codes"
        delayed = self.quantizer_state if rule.scale_rule is ScaleRule.DELAYED else None
        return rule, self.amax_groups(self.sequence_parallel).weight, delayed

    def quantize_parameter(self) -> None:
        """Replace the weight by a `QuantizedParameter`."""
        weight = self.weight
        parameter = nn.Parameter(QuantizedParameter(WeightCodes(weight.detach(), *self.weight_code_options())))
        vars(parameter).update(vars(weight))  # attributes that megatron-core sets
        self.weight = parameter

    def _activation_group(self, *, split_over_tensor: bool) -> Optional[dist.ProcessGroup]:
        """The context-parallel ranks, and the tensor-parallel ranks if the activation is split over them."""
        if self.is_expert or parallel_state.get_context_parallel_world_size() == 1:
            return self.tp_group if split_over_tensor else None
        if split_over_tensor:
            return parallel_state.get_tensor_and_context_parallel_group()
        return parallel_state.get_context_parallel_group()


class EmulatedColumnParallelLinear(EmulatedLinearMixin, ColumnParallelLinear):
    """y = x w^T with w split along its output features. Arguments are those of both base classes.

    Shapes: weight [N/P, K], grad_output [T, N/P], input [T, K] or, with sequence parallelism, [T/P, K], whose codes are
    gathered.
    """

    splits_grad_output = True

    def amax_groups(self, sequence_parallel: bool) -> AmaxGroups:
        if self.amax_reduction == "te":
            return AmaxGroups(input=self.tp_group if sequence_parallel else None)
        return AmaxGroups(
            input=self._activation_group(split_over_tensor=sequence_parallel),
            weight=self.tp_group,
            grad_output=self._activation_group(split_over_tensor=True),
        )


class EmulatedOutputLayer(EmulatedColumnParallelLinear):
    """Output layer with logits [..., vocabulary / P]. `forward` gets the weight, which may be the embedding's."""

    is_output = True
    gemm_weight: tuple[Tensor, ...] = ()  # own or shared weight; in a tuple, so that it is not registered twice

    @classmethod
    def from_plain(
        cls, plain: ColumnParallelLinear, weight: Tensor, recipe: LinearRecipe, **params: Any
    ) -> EmulatedOutputLayer:
        """Build a layer with the weight of megatron-core's output layer, which `GPTModel` always creates.

        Args:
            weight: of the embedding, used if `plain` has no weight.
        """
        layer = cls(
            plain.input_size, plain.output_size, config=plain.config, init_method=plain.config.init_method, bias=False,
            gather_output=plain.gather_output, skip_weight_param_allocation=True, tp_group=plain.tp_group,
            recipe=recipe, **params,
        )  # fmt: skip
        layer.weight = plain.weight
        layer.gemm_weight = (weight if plain.weight is None else plain.weight,)
        return layer


class EmulatedRowParallelLinear(EmulatedLinearMixin, RowParallelLinear):
    """y = x w^T with w split along its input features. Arguments are those of both base classes.

    Shapes: weight [N, K/P], input [T, K/P], grad_output [T, N]. megatron-core gathers grad_output before the GEMMs, so
    its amax needs no reduction with sequence parallelism.
    """

    splits_grad_output = False

    def amax_groups(self, sequence_parallel: bool) -> AmaxGroups:
        if self.amax_reduction == "te":
            return AmaxGroups()
        return AmaxGroups(
            input=self._activation_group(split_over_tensor=True),
            weight=self.tp_group,
            grad_output=self._activation_group(split_over_tensor=False),
        )


def convert_to_quantized_parameters(chunks: Iterable[nn.Module]) -> None:
    """Make the weight of every emulated linear a `QuantizedParameter`.

    It keeps the original values until `quantize_assigned_weights`. Call this before megatron-core creates the parameter
    buffers. The weight of the output layer stays, as do weights that fprop and dgrad read in high precision.
    """
    patches.register_fp8_parameter(QuantizedParameter, quantize_shards)
    for layer in emulated_linears(chunks):
        if not layer.is_output and layer.recipe is not None and layer.recipe.is_quantized(Gemm.FPROP):
            layer.quantize_parameter()


def emulated_linears(chunks: Iterable[nn.Module]) -> list[EmulatedLinearMixin]:
    """The emulated linears of some model chunks."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, EmulatedLinearMixin)]


@contextlib.contextmanager
def cached_weight_codes(model_chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which each weight is quantized once, at its first use. No weight may change inside it.

    It wraps the forward-backward of one optimizer step, whose microbatches share the codes. Changes of weights cannot
    be detected: the distributed optimizer writes weights through a flat buffer, and mixed-precision optimizers through
    `.data`, and neither increments the version counter of the parameter.
    """
    layers = emulated_linears(model_chunks)
    for module in (module for chunk in model_chunks for module in chunk.modules()):
        if isinstance(module, GroupedExperts):  # megatron-core tells those in models of Transformer Engine's layers
            module.is_first_microbatch = True
    for layer in layers:
        layer.cache_weight_codes(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.cache_weight_codes(False)
