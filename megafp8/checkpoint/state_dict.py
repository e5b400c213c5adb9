"""Contents of a checkpoint as a megatron-core sharded state dictionary.

Model and optimizer state are sharded by global name, so any parallel layout can load them. RNG state belongs to a rank
and a device type, and is not loaded when either changes. Progress and configuration are plain values.

Vocabulary padding: an embedding is padded to a multiple of the tensor-parallel size, so another layout may need rows
that the checkpoint does not have. megatron-core loads those rows and their moments as zeros. Their logits would be 0,
which dominates the softmax of a model whose logits are far below zero, such as GPT-2. `fill_new_vocab_rows` sets them
to the mean row instead.

FP8 weights (`--fp8-param-gather`): the checkpoint stores the master weights rounded to the parameter type, before
quantization. It then serves runs with and without FP8 weights, also without the optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.checkpoint import optimizer_exchange
from megafp8.checkpoint import optimizer_state as optimizer_parts
from megafp8.checkpoint.progress import TrainingState
from megafp8.config.optimizers import IS_MATRIX
from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.mcore.patches import groups_matched_without_rates, rows_found_by_identity
from megafp8.mcore.process_groups import gather_weights
from megafp8.optimizer.build import has_state_by_weight
from megafp8.optimizer.data_parallel import runtime_of
from megafp8.optimizer.layer_wise import LayerWiseOptimizer
from megafp8.quantization.fp8_parameter import QuantizedParameter

# Settings of a parameter group that flags set; GROUP_RATES belong to the learning-rate schedule.
GROUP_SETTINGS = ("betas", "eps", "momentum", IS_MATRIX)
GROUP_RATES = ("max_lr", "min_lr")
GROUP_IDENTITY = (("wd_mult", 1.0), ("lr_mult", 1.0), ("is_decoupled_lr", False), (IS_MATRIX, False))
EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def content_metadata() -> dict[str, Any]:
    """Return the layout of the optimizer state: the one that every parallel layout can load."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def sharding_metadata(chunks: list[Any]) -> dict[str, Any]:
    """Return `content_metadata` with the group that shares rows of weights, as megatron-core's modules expect it."""
    return content_metadata() | {"dp_cp_group": runtime_of(chunks[0]).sharding_group(chunks[0])}


def model_state(chunks: list[Any]) -> dict[str, Any]:
    """Return the sharded weights of this rank's chunks: `model`, or `model0`, `model1`... if interleaved."""
    metadata = sharding_metadata(chunks)
    # Each chunk has its own key, but names of weights inside are global, so that another pipeline layout finds them.
    return {
        "model" if len(chunks) == 1 else f"model{index}": runtime_of(chunk).place_rows(
            chunk, unwrap_model(chunk).sharded_state_dict(metadata=metadata)
        )
        for index, chunk in enumerate(chunks)
    }


def chained_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers in megatron-core's `ChainedOptimizer`, or the single one."""
    return list(getattr(optimizer, "chained_optimizers", (optimizer,)))


def optimizer_state(training_state: TrainingState, model: dict[str, Any], is_loading: bool) -> dict[Any, Any]:
    """Return sharded master weights and moments by the names of the weights in `model`.

    Before the first step the moments are zero.
    """
    parts = chained_optimizers(training_state.optimizer)
    if has_state_by_weight(parts[0]):
        # With the layer-wise optimizer no other data-parallel rank has a weight's momentum: this rank saves it.
        is_only_owner = isinstance(training_state.optimizer, LayerWiseOptimizer)
        states = [optimizer_parts.sharded_state_by_weight(part, model, is_only_owner) for part in parts]
        return states[0] if len(parts) == 1 else dict(enumerate(states))
    is_distributed = isinstance(parts[0], DistributedOptimizer)
    for part in parts:
        if not (is_distributed and is_loading):  # `sharded_state` initializes a distributed optimizer on load
            initialize_optimizer_state(part)
    if not is_distributed:
        with rows_found_by_identity():
            return training_state.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=sharding_metadata(training_state.chunks)
            )
    # An optimizer without parameters on this rank has not counted its steps.
    if len(parts) > 1:
        training_state.optimizer._synchronize_steps()
    states = [optimizer_parts.sharded_state(part, model, is_loading) for part in parts]
    return states[0] if len(parts) == 1 else dict(enumerate(states))


def load_optimizer_state(
    training_state: TrainingState,
    state: dict[Any, Any],
    known_rows: dict[torch.Tensor, int],
    is_exchanged: bool = False,
) -> None:
    """Load what was read into `optimizer_state`. Parameter-group settings from flags are kept.

    With --use-checkpoint-opt_param-scheduler the learning rates of the schedule are the checkpoint's. For the
    distributed optimizer `load_converted_state` loads the rest.

    Args:
        known_rows: from `known_vocab_rows`. Master weights of further rows are copied from the weights.
        is_exchanged: only the checkpoint or only this run has the distributed optimizer.
    """
    parts = chained_optimizers(training_state.optimizer)
    step = optimizer_exchange.recorded_step(saved_parts(state)[0]) if is_exchanged else 0
    preserved = [preserved_group_settings(part, training_state.schedule) for part in parts]
    state = states_of_parts(parts, state)
    states = [state] if len(parts) == 1 else list(state.values())
    if is_exchanged:
        for part, part_state in zip(parts, states, strict=True):
            optimizer_exchange.convert(part, part_state, step)
    for part, part_state in zip(parts, states, strict=True):
        part_state.pop("param_state", None)  # is in place already
        # A run with a fixed loss scale saves no scaler state. A dynamic loss scale then starts from its initial value.
        if "grad_scaler" in part_state and not part_state["grad_scaler"]:
            part_state["grad_scaler"] = part.grad_scaler.state_dict()
        if not isinstance(part, DistributedOptimizer) and not has_state_by_weight(part):
            runtime_of(training_state.chunks[0]).set_optimizer_rows(part, part_state)
    if has_state_by_weight(parts[0]):
        for part, part_state in zip(parts, states, strict=True):
            optimizer_parts.load_state_by_weight(part, part_state)
    else:
        with groups_matched_without_rates():
            training_state.optimizer.load_state_dict(state)
    if not isinstance(parts[0], DistributedOptimizer):
        for parameter, num_known in known_rows.items():
            if (master := getattr(parameter, "main_param", None)) is not None:
                # Rows that the checkpoint does not have were set in the weights; the masters follow them.
                master[num_known:] = parameter[num_known:]
    # megatron-core's load has replaced the groups' settings by the saved ones.
    for part, settings in zip(parts, preserved, strict=True):
        for group, values in zip(part.optimizer.param_groups, settings, strict=True):
            group.update(values)


def load_converted_state(
    training_state: TrainingState,
    requested: dict[Any, Any],
    known_rows: dict[torch.Tensor, int],
    read: Callable[[Sequence[ShardedTensor]], None],
) -> None:
    """Load what a distributed optimizer stores in another form than the checkpoint; all ranks call it.

    Args:
        requested: `optimizer_state` to load, and otherwise already loaded.
        known_rows: from `known_vocab_rows`.
        read: fills the data of sharded tensors from the checkpoint, without collectives.
    """
    parts = chained_optimizers(training_state.optimizer)
    if not isinstance(parts[0], DistributedOptimizer):
        return
    states = [requested] if len(parts) == 1 else list(requested.values())

    def load() -> None:
        for part, state in zip(parts, states, strict=True):
            optimizer_parts.load_converted(part, state, known_rows, read)

    # Each rank reads other boxes: an error on one of them must stop all, or the gather below would wait forever.
    call_on_all_ranks(load)
    if parts[0].config.use_precision_aware_optimizer:
        # With BF16 remainders, the saved weight and the one rounded from its master weight may differ on ties.
        gather_weights(training_state.chunks)


def states_of_parts(parts: list[Any], loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Return the loaded state with what is not sharded for each part of the optimizer, by the part's number.

    Weights of experts are a part of their own where other ranks hold them than hold the other weights. Sharded tensors
    are found by name, but parameter groups and loss scale are saved in the parts of the layout that saved them.
    """
    saved = saved_parts(loaded)
    groups = [group for each in saved for group in each.get("optimizer", each)["param_groups"]]
    own = {0: loaded} if len(parts) == 1 else {index: loaded[index] for index in range(len(parts))}
    for index, part in enumerate(parts):
        current = part.optimizer.state_dict()["param_groups"]
        matched = [match_group(group, groups) for group in current]
        if not isinstance(part, DistributedOptimizer):  # that numbers its parameters itself
            matched = [
                group | {"params": own_group["params"]} for group, own_group in zip(matched, current, strict=True)
            ]
        # `saved[0]` has what is common to all parts, such as the loss scale; this part's own values win.
        state = saved[0] | own[index]
        if "optimizer" in state:  # in FP32 without the distributed optimizer it is the state itself
            state["optimizer"] = own[index].get("optimizer", {}) | {"param_groups": matched}
        else:
            state["param_groups"] = matched
        own[index] = state
    return own[0] if len(parts) == 1 else own


def saved_parts(loaded: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the states of the optimizers that the saving layout had."""
    return [loaded] if has_groups(loaded) else [each for each in loaded.values() if has_groups(each)]


def has_groups(state: Any) -> bool:
    """Return whether a loaded value has the complete parameter groups of a part, as one layout saved them."""
    groups = state.get("optimizer", state).get("param_groups", ()) if isinstance(state, dict) else ()
    return bool(groups) and all("lr" in group for group in groups)


def match_group(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the saved settings of a parameter group, of experts or of other weights if only one of them was saved."""
    same = [
        each for each in saved
        if all(each.get(name, default) == group.get(name, default) for name, default in GROUP_IDENTITY)
    ]  # fmt: skip
    # The same group of experts first, then any group with these settings, then the first one.
    exact = [each for each in same if each.get("is_expert_parallel") == group.get("is_expert_parallel")]
    found = next(iter(exact or same or saved))
    return found | ({"is_expert_parallel": group["is_expert_parallel"]} if "is_expert_parallel" in found else {})


def preserved_group_settings(part: Any, schedule: OptimizerParamScheduler) -> list[dict[str, Any]]:
    """Return the settings of each parameter group that megatron-core's load would overwrite."""
    names = GROUP_SETTINGS + (() if schedule.use_checkpoint_opt_param_scheduler else GROUP_RATES)
    return [{name: group[name] for name in names if name in group} for group in part.optimizer.param_groups]


def initialize_optimizer_state(part: Any) -> None:
    """Give an optimizer that has not made a step its initial state."""
    if hasattr(part.optimizer, "initialize_state"):
        part.init_state_fn = initialize_fused_adam
    elif part.init_state_fn is None:
        part.init_state_fn = initialize_momentum
    part.init_state_fn(part.optimizer, part.config)


def initialize_fused_adam(optimizer: Any, config: Any) -> None:
    """Initialize Transformer Engine's FusedAdam. megatron-core's function omits `store_param_remainders`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                has_remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
                optimizer.initialize_state(parameter, has_remainders)


def initialize_momentum(optimizer: torch.optim.Optimizer, config: Any) -> None:
    """Initialize SGD's momentum buffers. megatron-core initializes Adam only."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def parallel_layout() -> tuple[int, int, int]:
    """Return the sizes that RNG state depends on: pipeline, tensor, data x context."""
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def rng_state() -> dict[str, Any]:
    """Return this rank's RNG states: torch's, and megatron-core's tracker of tensor-parallel streams."""
    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {
            # Graph-safe states are generators: they are saved as tensors, which any run can load.
            name: tensor_parallel.convert_cuda_rng_state(each, to_graphable=False)
            for name, each in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }


def sharded_rng_state() -> ShardedObject:
    """Return `rng_state` at this rank's coordinates, so that each rank reads its own state back."""
    coordinates = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("random_state", rng_state(), parallel_layout(), coordinates)


def is_rng_state_of_this_device(state: dict[str, Any]) -> bool:
    """Return whether `rng_state` was saved on this device type. CPU and CUDA states differ in length."""
    return state["device"].numel() == torch.cuda.get_rng_state().numel()


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore RNG states that `rng_state` returned on this device type."""
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker):
        for name, generator in tracker.get_states().items():  # a CUDA graph advances these very generators
            generator.set_state(state["tracker"][name])
    else:
        tracker.set_states(state["tracker"])


def known_vocab_rows(model: dict[str, Any], num_rows: int) -> dict[Tensor, int]:
    """Map vocabulary parameters with more rows than the checkpoint to the number of local rows that it has.

    Args:
        model: sharded state to be loaded; its data are the parameters.
        num_rows: embedding rows in the checkpoint.
    """
    return {
        # The offset is in global rows. A shard may have all rows, some, or none of those that were saved.
        leaf.data: min(len(leaf.data), max(0, num_rows - leaf.global_offset[0]))
        for leaf in nested_values(model)
        if isinstance(leaf, ShardedTensor) and leaf.key in (EMBEDDING, OUTPUT_LAYER) and leaf.global_shape[0] > num_rows
    }


@torch.no_grad()
def fill_new_vocab_rows(rows: dict[Tensor, int], num_rows: int) -> None:
    """Set the rows that a checkpoint does not have to the mean of its rows; all ranks call it.

    The logit of such a row is the mean logit. As exp is convex, its probability is at most 1 / num_rows of the total.

    Args:
        rows: from `known_vocab_rows`; already loaded.
        num_rows: embedding rows in the checkpoint.
    """
    for parameter, num_known in rows.items():
        # Each tensor-parallel rank adds its own rows; a rank with none adds 0.
        mean = parameter[:num_known].sum(dim=0, dtype=torch.float32) / num_rows
        dist.all_reduce(mean, group=parallel_state.get_tensor_model_parallel_group())
        parameter[num_known:] = mean.to(parameter.dtype)


def use_rounded_master_weights(model: dict[str, Any], optimizer: MegatronOptimizer) -> None:
    """Replace quantized weights in a sharded model state by rounded master weights; all ranks call it.

    Only the rank that writes a weight keeps a copy, in CPU memory. The device holds one gathered bucket at a time.
    """
    if isinstance(optimizer, LayerWiseOptimizer):
        let_owners_save(model, optimizer)
        return
    # Found by the codes, which a parameter and its leaf share.
    main_replicas = {
        id(leaf.data.codes): leaf
        for leaf in nested_values(model)
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
        and isinstance(leaf.data, QuantizedParameter)
        and is_main_replica(leaf.replica_id)
    }
    # All ranks take part in each gather, also those that keep nothing of it.
    for part in chained_optimizers(optimizer):
        for index, buffer in enumerate(getattr(part, "buffers", ())):
            if not isinstance(buffer.params[0], QuantizedParameter):
                continue
            for number, bucket in enumerate(buffer.buckets):
                rounded = gather_rounded_master_weights(part, index, number)
                for weight in bucket.params_list:
                    if leaf := main_replicas.get(id(weight.codes)):
                        first, last, _ = buffer.param_index_map[weight]
                        # On the CPU at once: the next bucket needs the memory.
                        leaf.data = rounded[first - bucket.offset : last - bucket.offset].view(weight.shape).cpu()


@torch.no_grad()
def let_owners_save(model: dict[str, Any], optimizer: LayerWiseOptimizer) -> None:
    """Replace quantized weights by rounded master weights, and let the ranks save them that have these."""
    leaves = optimizer_parts.leaf_by_weight(model)
    for weight in (each for ownership in optimizer.ownerships for owned in ownership.owned for each in owned):
        if is_float8tensor(weight):
            leaf, master = leaves[weight], weight.main_param
            # The last entry numbers copies, of which 0 is saved.
            leaf.replica_id = (*leaf.replica_id[:2], int(master is None))
            if master is not None:
                leaf.data = master.to(weight.dtype).cpu()


@torch.no_grad()
def gather_rounded_master_weights(optimizer: Any, buffer_index: int, bucket_index: int) -> Tensor:
    """Gather a bucket of master weights, rounded to the parameter type, on all ranks. Shape: (elements,)."""
    buffer, group = optimizer.buffers[buffer_index], optimizer.data_parallel_group
    weight, bucket = buffer.params[0], buffer.buckets[bucket_index]
    rounded = torch.zeros(bucket.grad_data.numel(), dtype=weight.dtype, device=weight.device)
    shard = shard_buffer(rounded, group.size())[group.rank()]
    # A buffer has parameters and gradients of one pair of dtypes.
    (ranges,) = optimizer.gbuf_ranges[buffer_index].values()
    for parameter, param_ranges in ranges[bucket_index]["param_map"].items():
        local = param_ranges["gbuf_local"]
        # Only this rank's shard is filled; the gather fills the others.
        shard[local.start : local.end].copy_(parameter.main_param)
    dist.all_gather_into_tensor(rounded, shard, group=group)
    return rounded
