"""A mixture-of-experts layer whose experts on a GPU run in one launch per GEMM (`grouped_experts.py`).

The weights of all experts of a layer are two tensors with a dimension of experts. In a checkpoint they have the keys
and shapes of megatron-core's other experts. On one rank tokens stay where they are: there is no dispatcher, and no
number of tokens is read by the host, so that a step is one CUDA graph.

With expert-parallel ranks whose GPUs reach each other's memory tokens are written to their experts (`PeerMoELayer`),
and a step is a CUDA graph, too. Otherwise megatron-core's dispatcher exchanges them (`ExchangedExperts`). Its
all-to-all takes its sizes from the host, which waits for them once a layer; the GEMMs take theirs from the device.

Under delayed scaling the experts of a layer have a history and a scale for each expert's input, weight and output
gradient, in one state for each of the two linears. They are reduced and updated as those of emulated linears, and have
the same keys in checkpoints. Under current scaling the casts set a flag for each of these where an amax is infinite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megafp8.config.precision_map import EXPERTS
from megafp8.kernels.expert_scales import CurrentScale, CurrentScales
from megafp8.kernels.routed_rows import ALIGNMENT, Room, route
from megafp8.mcore.process_groups import amax_reduction_group
from megafp8.models.peer_exchange import Exchange, exchange_of, from_experts, to_experts
from megafp8.quantization.delayed_scaling import AmaxExchange, DelayedScale, DelayedScales, DelayedState
from megafp8.quantization.prequantized import PrequantizedScale
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, OperandRule

LINEARS = ("linear_fc1", "linear_fc2")
Routing = tuple[Tensor, Tensor]
"""Scores FP32 and map bool, both [T, E]."""


class GroupedExperts(MegatronModule):
    """Two stacked linears with SwiGLU between them.

    Args:
        num_local_experts: E.
        recipe: quantizes all operands by the same rule, or rowwise, or blockwise, output gradients perhaps in a format
            of their own; None computes in BF16.
        exchange: updates the scales of delayed scaling for all layers of a model chunk; None: of this layer only.
        name: megatron-core 0.19 passes one; not used.

    Attributes:
        linear_fc1: [E, 2 F, H].
        linear_fc2: [E, H, F].
        quantizer_state: of delayed scaling, by the names of the linears; empty without it.
        infinities: flags [3, E] of infinite inputs, weights and output gradients under current scaling, by the names of
            the linears; empty records nothing.
        is_first_microbatch: of a step; megatron-core sets it, and the weights are then cast.
        is_quantizing: if False, everything is in BF16.
        load: collects the numbers of rows; None collects nothing.
    """

    load: Optional[Any] = None
    is_quantizing = True

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None,
        recipe: Optional[LinearRecipe] = None, exchange: Optional[AmaxExchange] = None, name: Optional[str] = None,
    ):  # fmt: skip
        super().__init__(config)
        ffn, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = stacked_weight(config, num_local_experts, 2 * ffn, hidden)
        self.linear_fc2 = stacked_weight(config, num_local_experts, hidden, ffn)
        # `expt_dp` ranks have copies of these weights, `ep` ranks have other experts of the layer.
        self.data_group, self.expert_group = pg_collection.expt_dp, pg_collection.ep
        self.rule = None if recipe is None else recipe.rule(Operand.INPUT, Gemm.FPROP)
        self.gradient_rule = None if recipe is None else recipe.rule(Operand.GRAD_OUTPUT, Gemm.DGRAD)
        # The rows of an expert are complete blocks, where these have scales.
        block = None if self.rule is None else self.rule.block
        self.row_alignment = block[1] if block is not None and block[1] is not None else ALIGNMENT
        self.quantizer_state = torch.nn.ModuleDict()
        self.infinities: dict[str, Tensor] = {}
        self.exchange = exchange or AmaxExchange()
        if recipe is not None and recipe.delayed is not None:
            for linear in LINEARS:
                # One state for all experts: scales and histories have a dimension of experts.
                self.quantizer_state[linear] = DelayedState(recipe, num_local_experts).to(self.linear_fc1.device)
                self.exchange.join(self.quantizer_state[linear], amax_reduction_group(recipe.delayed))
        # Not saved: the first microbatch of a step casts them.
        self.codes: Any = None
        self.is_first_microbatch = True

    def forward(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        """Weighted sum of the outputs of each token's experts; hidden_states and result [S, B, H]."""
        probs, routing_map = routing
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.compute(tokens, probs, routing_map, self.config.moe_router_topk).view_as(hidden_states)

    def compute(
        self,
        tokens: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        topk: int,
        prequantized: Optional[PrequantizedScale] = None,
        room: Optional[Room] = None,
    ) -> Tensor:
        """The same of tokens [T, H]; `prequantized` is as for `grouped_experts.experts`, `room` as for `route`."""
        from megafp8.models.grouped_experts import ExpertScales, experts  # needs Triton

        # Assigned once, for all kernels of both passes.
        rows = route(routing_map, topk, room, self.row_alignment)
        # Only passes with gradients count: evaluation is left out.
        if self.load is not None and torch.is_grad_enabled():
            self.load.add_rows(rows.ends[-1])
        (fc1, fc2), is_first_run = self._scales()
        codes = self._weight_codes(fc1.weight, fc2.weight)
        scales = ExpertScales(fc1.input, fc2.input, fc1.grad_output, fc2.grad_output, self._backward_ran)
        weights = self.linear_fc1, self.linear_fc2
        output = experts(tokens, probs.float(), *weights, routing_map, rows, codes, prequantized, scales)
        # In evaluation, and in the second run of a recomputed pass, no amax of the forward pass was recorded.
        if is_first_run:
            for state in self.quantizer_state.values():
                self.exchange.forward_ran(state)
        return output

    def _scales(self) -> tuple[Sequence[Union[DelayedScales, CurrentScales]], bool]:
        """The scales of both linears, and whether this is the first run of a forward pass under delayed scaling."""
        # Current scaling, or BF16: no scale is known before the cast.
        if self.rule is None or not self.is_quantizing or not self.quantizer_state:
            # The flags are [3, E]: those of input, weight and output gradient, in the order of `CurrentScales`.
            return [CurrentScales(*map(CurrentScale, self.infinities.get(linear, ()))) for linear in LINEARS], False
        if self.is_first_microbatch:  # an error may have interrupted the last step
            for state in self.quantizer_state.values():
                self.exchange.start_step_of(state)
        # Both states are asked, because a recomputed pass stores or takes the scales of each.
        found = [state.scales_for_forward() for state in self.quantizer_state.values()]
        return [scales for scales, _ in found], found[0][1]

    def _backward_ran(self) -> None:
        for state in self.quantizer_state.values():
            self.exchange.backward_ran(state)

    def _weight_codes(self, *scales: Union[DelayedScale, CurrentScale]) -> Any:
        """The codes of the weights, cast in the first microbatch of a step; None in BF16."""
        if self.rule is None or self.gradient_rule is None or not self.is_quantizing:
            return None
        from megafp8.kernels.rounding import format_spec
        from megafp8.models.grouped_experts import cast_weights, casts_of

        # Weights change between steps only. Evaluation casts in every call.
        if self.codes is None or self.is_first_microbatch or not self.training:
            spec, gradient_spec = format_spec(self.rule.format), format_spec(self.gradient_rule.format)
            # Autograd sees the BF16 weights; the casts are not differentiated.
            fc1, fc2 = self.linear_fc1.detach(), self.linear_fc2.detach()
            self.codes = cast_weights(fc1, fc2, spec, *scales, gradient_spec=gradient_spec, casts=casts_of(self.rule))
            self.is_first_microbatch = not self.training  # weights may change between evaluation and the next step
        return self.codes

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Optional[Mapping[str, Any]] = None
    ) -> dict[str, Any]:
        """Keys and shapes of `SequentialMLP`: `experts.linear_fc1.weight` with a dimension of experts."""
        # Data-parallel ranks of the experts have copies, of which the first one is saved.
        replica_id = (0, 0, self.data_group.rank())
        # Experts are numbered over all expert-parallel ranks, so that any layout finds them.
        first = self.expert_group.rank() * len(self.linear_fc1)
        num_experts = self.expert_group.size() * len(self.linear_fc1)
        state: dict[str, Any] = {
            f"{prefix}{name}": expert_factory(
                f"{prefix}experts.{name}.weight", weight, replica_id, tuple(sharded_offsets), halves, first, num_experts
            )
            for name, weight, halves in zip(LINEARS, (self.linear_fc1, self.linear_fc2), (2, 1), strict=True)
        }
        # Layers are an offset of the weights. These tensors have no dimension for it: the number becomes a part of the
        # key.
        layer = "".join(f"{number}." for _, number, _ in sharded_offsets)
        for name, delayed in self.quantizer_state.items():
            for part, values in delayed.linear_states().items():
                kind, _, index = part.rpartition(".")
                # The expert's index on this rank becomes its number over all ranks.
                key = f"{prefix}experts.{name}.quantizer_state.{layer}{first + int(index)}.{kind}"
                state_key = f"{prefix}quantizer_state.{name}.{part}"
                state[state_key] = ShardedTensor.from_rank_offsets(key, values, replica_id=replica_id)
        return state


class ExchangedExperts(GroupedExperts):
    """The experts of one rank, for tokens that a dispatcher has brought there. Each token is of one expert.

    Attributes:
        prequantized: the scales [experts] of the next tokens, which arrived as codes; None: they did not.
    """

    prequantized: Optional[PrequantizedScale] = None

    def input_rule(self) -> Optional[OperandRule]:
        """The rule by which the experts quantize their tokens; None in BF16."""
        return self.rule if self.is_quantizing else None

    def input_scales(self) -> Optional[Tensor]:
        """The scales of the tokens under delayed scaling, FP32 [experts]; None without it."""
        if not self.is_quantizing or not self.quantizer_state:
            return None
        return self.quantizer_state[LINEARS[0]].next_input_scale()

    def forward(  # type: ignore[override]
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """The outputs of the experts times the scores, and no bias.

        Args:
            permuted_local_hidden_states: [T, H], ordered by experts.
            tokens_per_expert: [experts of this rank].
            permuted_probs: [T].
        """
        tokens, probs, device = permuted_local_hidden_states, permuted_probs, permuted_probs.device
        experts = torch.arange(len(self.linear_fc1), device=device)
        num_tokens = len(tokens)
        # Without `output_size`, `repeat_interleave` would wait for the device.
        expert_of_token = experts.repeat_interleave(tokens_per_expert.to(device), output_size=num_tokens)
        if not num_tokens:  # one that no expert has: the backward pass of the weights runs all the same
            tokens, probs = (torch.cat([each, each.new_zeros(1, *each.shape[1:])]) for each in (tokens, probs))
            expert_of_token = experts.new_full((1,), -1)
        # -1 equals no expert, so that the added token gets no row.
        routing_map = expert_of_token[:, None] == experts
        scores = torch.where(routing_map, probs[:, None], 0.0)
        outputs = self.compute(tokens, scores, routing_map, topk=1, prequantized=self.prequantized)
        # Without the added token.
        return outputs[:num_tokens], None


def named_mixtures(chunk: torch.nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """The layers of a model chunk whose experts run in one launch, with the prefix of their linears' names. Those of
    multi-token prediction, whose linears have no names, are left out."""
    layers = ((name, module) for name, module in chunk.named_modules() if isinstance(module, TransformerLayer))
    for mixture, number in ((layer.mlp, layer.layer_number) for name, layer in layers if not name.startswith("mtp.")):
        if isinstance(mixture, MoELayer) and isinstance(mixture.experts, GroupedExperts):
            yield f"layers.{number - 1}.{EXPERTS}", mixture


def set_precision(chunk: torch.nn.Module, quantized: Collection[str]) -> None:
    """Quantize the experts of some layers from now on, and those of others not. Not within a step.

    Args:
        quantized: linears, such as `layers.3.experts.linear_fc1`. `grouped_expert_problems` has excluded that only some
            linears of an expert are among them.
    """
    for prefix, mixture in named_mixtures(chunk):
        experts = mixture.experts
        experts.is_quantizing, experts.codes = f"{prefix}{LINEARS[0]}" in quantized, None
        for state in experts.quantizer_state.values():
            experts.exchange.set_updated(state, experts.is_quantizing)


def grouped_weights(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The weights of all grouped experts. They support `main_grad.is_overwritten`."""
    experts = [each for chunk in chunks for each in chunk.modules() if isinstance(each, GroupedExperts)]
    return [weight for each in experts for weight in (each.linear_fc1, each.linear_fc2)]


def stacked_weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """An uninitialized weight, with the attribute by which megatron-core finds its data-parallel group."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    # megatron-core reduces weights whose `allreduce` is False over the data-parallel group of the experts.
    weight.allreduce = config.expert_model_parallel_size == 1
    return weight


def expert_factory(
    key: str, weight: Tensor, replica_id: ReplicaId, offsets: tuple[Any, ...], halves: int, first: int, num_experts: int
) -> ShardedTensorFactory:
    """The parts of stacked weights [E, N, W] in a checkpoint: each expert's halves (gate and up), or complete.

    Args:
        offsets: dimensions before that of the experts.
        halves: parts in which N is saved.
        first: number of the first of these experts.
        num_experts: of all ranks.
    """

    @torch.no_grad()
    def build(key: str, weight: Tensor, replica_id: ReplicaId, flattened_range: Optional[slice]) -> list[ShardedTensor]:
        # Flat ranges, of the distributed optimizer, are cut in `checkpoint/optimizer_state.py`.
        assert flattened_range is None, "only complete tensors are saved"
        # The dimension of experts follows those of `offsets`. A part has neither, hence `prepend_axis_num`.
        axis = len(offsets)
        return [
            ShardedTensor.from_rank_offsets(
                key, part, *offsets, (axis, expert, num_experts), (axis + 1, half, halves),
                replica_id=replica_id, prepend_axis_num=axis + 1,
            )
            for expert, values in enumerate(weight, first)
            for half, part in enumerate(values.chunk(halves))
        ]  # fmt: skip

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        # The order of `build`: the halves of an expert, then the next expert.
        return torch.stack([torch.cat(parts[start : start + halves]) for start in range(0, len(parts), halves)])

    return ShardedTensorFactory(key, weight, build, merge, replica_id)


class GroupedMoELayer(MoELayer):
    """megatron-core's layer without a dispatcher: the router's result goes to the experts as it is."""

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Routing]:
        """Keep the tokens in their order."""
        return hidden_states, (probs, routing_map)

    def dispatch(self, hidden_states: Tensor, probs: Routing) -> tuple[Tensor, Routing]:
        """Send no token."""
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Routing) -> tuple[Tensor, None]:
        """The output of the experts [S, B, H], and no bias."""
        return self.experts(hidden_states, probs), None

    def combine(self, output: Tensor) -> Tensor:
        """The tokens are in their order."""
        return output

    def postprocess(self, output: Tensor, shared_expert_output: Optional[Tensor]) -> Tensor:
        """Add the output of the shared experts."""
        return output if shared_expert_output is None else output + shared_expert_output


class PeerMoELayer(GroupedMoELayer):
    """The same with expert-parallel ranks, which write tokens into each other's memory (`peer_exchange.py`)."""

    def routed_experts_compute(self, hidden_states: Tensor, probs: Routing) -> tuple[Tensor, None]:
        """The output of the experts of all ranks [S, B, H], and no bias."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        arrived = to_experts(self.exchange, tokens, *probs)
        if self.experts.load is not None and torch.is_grad_enabled():
            row_bytes = tokens.shape[1] * tokens.itemsize
            self.experts.load.add_dispatched(arrived.num_from_others(self.exchange) * row_bytes)
        top_k = min(self.config.moe_router_topk, self.num_local_experts)
        sums = self.experts.compute(arrived.rows, arrived.probs, arrived.routing_map, top_k, room=self.exchange.room)
        return from_experts(self.exchange, sums, arrived).view_as(hidden_states), None

    @property
    def exchange(self) -> Exchange:
        """That of all layers."""
        return exchange_of(self.ep_group, self.num_local_experts)


def close_exchanges(chunks: Sequence[torch.nn.Module]) -> None:
    """Free the memory in which the ranks of a run send tokens to each other."""
    layers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, PeerMoELayer))
    for exchange in {layer.exchange for layer in layers}:
        exchange.close()
