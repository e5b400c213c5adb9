"""megatron-core's column- and row-parallel linears with emulated low-precision GEMMs.

Only the GEMM is replaced: parameters, initialization, names, tensor-parallel attributes and `sharded_state_dict` are
megatron-core's, so that a checkpoint of plain layers loads into these and the other way round. A recipe with a memory
adds it as a submodule, `quantizer_state`, whose buffers are checkpointed as plain tensors that all ranks have alike,
each layer's under a key of its own, so that layers without may be among them.
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
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megafp8.mcore import patches
from megafp8.quantization.delayed_scaling import AmaxExchange, DelayedState
from megafp8.quantization.fp8_parameter import QuantizedParameter, WeightCodes, quantize_parts
from megafp8.quantization.linear import (
    AmaxGroups,
    LinearPlan,
    Observer,
    QuantizedWeight,
    emulated_linear,
    quantize_weight,
)
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.recipes.base import UNQUANTIZED, Gemm, LinearRecipe, Operand, ScaleRule

AMAX_REDUCTIONS = ("te", "all")
STATE = "quantizer_state"


class _EmulatedGemm:
    """Mixed into a parallel linear: the same layer, its GEMMs by recipe. A recipe of None leaves the layer as it was.

    Args (keywords of `__init__`, next to the layer's own):
        recipe: what is quantized and how.
        amax_reduction: "te": amaxes are reduced over the tensor-parallel ranks where Transformer Engine does it, which
            is where shards of one tensor are gathered; "all": wherever an operand is a shard, so that the scales, and
            with them the loss, do not depend on the layout. Delayed scaling reduces all amaxes anyhow, later.
        amax_exchange: with delayed scaling, what updates the scales of this layer together with others'; default a
            layer for itself.
        noise_name: with stochastic rounding, what tells this layer's random numbers from other layers' and other runs'.

    With the attribute `gradient_accumulation_fusion` weight gradients are added to `main_grad` inside the layer. That
    needs no extension module here, unlike in the plain layers, which refuse to be built so: set it afterwards.

    While the attribute `is_quantizing` is False all GEMMs are in high precision, and the recipe's memory is left alone.
    """

    splits_grad_output: bool
    is_output = False

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
        self.amax_reduction = amax_reduction
        self.observer: Optional[Observer] = None
        self.reuses_weight_codes = False
        self._weight_codes: Optional[QuantizedWeight] = None
        self.amax_exchange: Optional[AmaxExchange] = None
        if recipe is not None and recipe.is_stochastic:
            linear = kwargs.get("tp_comm_buffer_name") or type(self).__name__  # qkv, proj, fc1, fc2
            self.quantizer_state = RoundingNoise(f"{noise_name}|{linear}|{self._shard_of_grad_output()}")
        if recipe is not None and recipe.delayed is not None:
            self._delay_scaling(recipe, amax_exchange or AmaxExchange())

    def _delay_scaling(self, recipe: LinearRecipe, exchange: AmaxExchange) -> None:
        """Set up the scales that outlive a step."""
        on_cpu = self.config.use_cpu_initialization
        state = DelayedState(recipe).to(torch.device("cpu") if on_cpu else torch.cuda.current_device())
        if recipe.is_stochastic:
            state.noise = self.quantizer_state
        self.quantizer_state = state
        self.amax_exchange = exchange
        is_tensor_only = not recipe.delayed.is_reduced_over_data
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=is_tensor_only)
        exchange.join(self.quantizer_state, group)

    def amax_groups(self, sequence_parallel: bool) -> AmaxGroups:
        """The ranks that share the scale of each operand."""
        raise NotImplementedError

    def _shard_of_grad_output(self) -> str:
        """Which part of grad_output this rank has: other parts are to be rounded by other random numbers."""
        samples = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return f"{samples}|{self.tp_group.rank()}" if self.splits_grad_output else f"{samples}"

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict[str, Any]] = None
    ) -> dict[str, Any]:
        """megatron-core's, with the layer's number in the keys of `quantizer_state` instead of a stacked dimension."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        layer = "".join(f"{number}." for _, number, _ in sharded_offsets)
        for name in [name for name in state if name.startswith(f"{prefix}{STATE}.")]:
            state[name] = make_sharded_tensor_for_checkpoint(
                state[name].data, name.replace(f"{STATE}.", f"{STATE}.{layer}"), tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )  # fmt: skip
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
            return super()._forward_impl(
                input=input,
                weight=weight,
                bias=bias,
                gradient_accumulation_fusion=gradient_accumulation_fusion,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                grad_output_buffer=grad_output_buffer,
                **plain_options,
            )
        assert grad_output_buffer is None, "weight gradients of the output layer are not deferred"
        recipe = self.recipe if self.is_quantizing else UNQUANTIZED
        plan = LinearPlan(
            recipe=recipe,
            tensor_group=self.tp_group,
            gather_input=sequence_parallel,
            allreduce_dgrad=allreduce_dgrad,
            amax_groups=self.amax_groups(sequence_parallel),
            fuse_wgrad=gradient_accumulation_fusion,
            noise=self.noise if recipe.is_stochastic else None,
            observer=self.observer,
        )
        if recipe.delayed is not None:
            return self._delayed_forward(input, weight, bias, plan)
        return emulated_linear(input, weight, bias, plan, self._known_weight_codes(weight, plan))

    def _delayed_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor], plan: LinearPlan) -> Tensor:
        """The same with scales from before, and their updates when all layers of the exchange have run."""
        state, exchange = self.quantizer_state, self.amax_exchange
        scales, is_first_run = state.scales_for_forward()
        after_backward = functools.partial(exchange.backward_ran, state)
        plan = dataclasses.replace(plan, delayed=scales, after_backward=after_backward)
        output = emulated_linear(input, weight, bias, plan, self._known_weight_codes(weight, plan))
        if is_first_run:
            exchange.forward_ran(state)
        return output

    @property
    def noise(self) -> RoundingNoise:
        """The random numbers of stochastic rounding."""
        return self.quantizer_state if self.recipe.delayed is None else self.quantizer_state.noise

    def _known_weight_codes(self, weight: Tensor, plan: LinearPlan) -> Optional[QuantizedWeight]:
        if not self.reuses_weight_codes:
            return None
        if self._weight_codes is None:
            self._weight_codes = quantize_weight(weight, plan)
        return self._weight_codes

    def reuse_weight_codes(self, reuse: bool) -> None:
        """Start or stop keeping the weight's codes from one forward pass to the next; either way drop those kept."""
        self.reuses_weight_codes = reuse
        self._weight_codes = None
        if self.amax_exchange is not None:  # an error may have ended the last step midway
            self.amax_exchange.start_step()
            self.quantizer_state.kept_scales.clear()

    def keep_weight_as_codes(self) -> None:
        """Replace the weight by a parameter that holds its codes, once they are settled, and nothing else."""
        assert self.recipe is not None
        plain, rule = self.weight, self.recipe.rule(Operand.WEIGHT, Gemm.FPROP)
        assert rule is not None and rule == self.recipe.rule(Operand.WEIGHT, Gemm.DGRAD), "two copies of one weight"
        delayed = self.quantizer_state if rule.scale_rule is ScaleRule.DELAYED else None
        group = self.amax_groups(self.sequence_parallel).weight
        parameter = nn.Parameter(QuantizedParameter(WeightCodes(plain.detach(), rule, group, delayed)))
        vars(parameter).update(vars(plain))  # megatron-core's marks
        self.weight = parameter

    def _activation_group(self, *, split_over_tensor: bool) -> Optional[dist.ProcessGroup]:
        """Ranks that hold parts of one activation: context-parallel ones, and tensor-parallel ones if it is split."""
        if self.is_expert or parallel_state.get_context_parallel_world_size() == 1:
            return self.tp_group if split_over_tensor else None
        if split_over_tensor:
            return parallel_state.get_tensor_and_context_parallel_group()
        return parallel_state.get_context_parallel_group()


class EmulatedColumnParallelLinear(_EmulatedGemm, ColumnParallelLinear):
    """y = x w^T, w split along its outputs: weight [N/P, K], grad_output [T, N/P]; the input is whole or, with sequence
    parallelism, a shard whose codes are gathered. Arguments as megatron-core's, and those of `_EmulatedGemm`."""

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
    """The same for logits, y [..., vocabulary / P]; the weight may be the embedding's, and is given with the input."""

    is_output = True
    known_weight: tuple[Tensor, ...] = ()  # also one that is the embedding's; not a parameter of this layer

    @classmethod
    def in_place_of(
        cls, plain: ColumnParallelLinear, weight: Tensor, recipe: LinearRecipe, **params: Any
    ) -> EmulatedOutputLayer:
        """A layer with the weight of megatron-core's own, which `GPTModel` makes without asking.

        Args:
            weight: the embedding's, for a layer that has none of its own.
        """
        layer = cls(
            plain.input_size, plain.output_size, config=plain.config, init_method=plain.config.init_method, bias=False,
            gather_output=plain.gather_output, skip_weight_param_allocation=True, tp_group=plain.tp_group,
            recipe=recipe, **params,
        )  # fmt: skip
        layer.weight = plain.weight
        layer.known_weight = (weight if plain.weight is None else plain.weight,)
        return layer


class EmulatedRowParallelLinear(_EmulatedGemm, RowParallelLinear):
    """y = x w^T, w split along its inputs: weight [N, K/P], input [T, K/P]; grad_output is whole, since megatron-core
    gathers it before it gets here, so that with sequence parallelism its amax is that of all shards without a
    collective. Arguments as megatron-core's, and those of `_EmulatedGemm`."""

    splits_grad_output = False

    def amax_groups(self, sequence_parallel: bool) -> AmaxGroups:
        if self.amax_reduction == "te":
            return AmaxGroups()
        return AmaxGroups(
            input=self._activation_group(split_over_tensor=True),
            weight=self.tp_group,
            grad_output=self._activation_group(split_over_tensor=False),
        )


def keep_weights_as_codes(chunks: Iterable[nn.Module]) -> None:
    """Make the weight of every emulated linear a `QuantizedParameter`, which also holds what it was until `settle`.

    For before megatron-core makes buffers of the parameters. Weights that both their GEMMs read in high precision stay
    as they are, and so does that of the output layer.
    """
    patches.enter(QuantizedParameter, quantize_parts)
    for layer in emulated_linears(chunks):
        if not layer.is_output and layer.recipe is not None and layer.recipe.is_quantized(Gemm.FPROP):
            layer.keep_weight_as_codes()


def emulated_linears(chunks: Iterable[nn.Module]) -> list[_EmulatedGemm]:
    """All of them in some chunks of the model."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, _EmulatedGemm)]


@contextlib.contextmanager
def weights_unchanged(model_chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Promise that no weight changes inside the block: each is quantized at its first use there, once.

    Meant around the forward and backward passes of one optimizer step, whose microbatches then share the codes.
    The promise is explicit because a tensor does not tell: the distributed optimizer writes weights through a flat
    buffer, and mixed-precision optimizers through `.data`, neither of which moves a parameter's version counter.
    """
    layers = emulated_linears(model_chunks)
    for layer in layers:
        layer.reuse_weight_codes(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.reuse_weight_codes(False)
