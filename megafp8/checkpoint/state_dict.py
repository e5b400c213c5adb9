"""What a checkpoint holds, as megatron-core's sharded state dictionary.

Model and optimizer are sharded by global name, so another layout can load them. Random state belongs to a rank's place
and to a kind of device, and is left out when either changes. Progress and the configuration are plain values.

Rows of the vocabulary that only the layout asks for.

An embedding is padded to a multiple of the tensor-parallel size, so that a layout may need rows that a checkpoint does
not have. megatron-core reads them and their moments as zeros, and their tokens take part in the softmax: with a model
whose logits are far below zero, as GPT-2's, they would take all of the probability.

The weights in a checkpoint of a run that keeps FP8 codes: those that it would have without.

Master weights are the truth, and a checkpoint has to serve runs with and without FP8 weights, also without its
optimizer state. So it holds what the master weights are rounded to before they are quantized, in the weights' own type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.checkpoint import optimizer_state as optimizer_parts
from megafp8.checkpoint.progress import Trainee
from megafp8.mcore.process_groups import gather_weights
from megafp8.quantization.fp8_parameter import QuantizedParameter

# Settings of a group of parameters that come from flags, and those of them that belong to the schedule.
GROUP_SETTINGS = ("betas", "eps", "momentum")
GROUP_RATES = ("max_lr", "min_lr")


def content_metadata() -> dict[str, Any]:
    """How the optimizer state is laid out: the one way that every layout can load."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def sharding_metadata() -> dict[str, Any]:
    """The same with the group that holds copies, as megatron-core's modules want it."""
    return content_metadata() | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def model_state(chunks: list[Any]) -> dict[str, Any]:
    """The weights of this rank's chunks: `model`, or `model0`, `model1`... with the interleaved schedule."""
    metadata = sharding_metadata()
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    states = [unwrap_model(chunk).sharded_state_dict(metadata=metadata) for chunk in chunks]
    return dict(zip(names, states, strict=True))


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers behind megatron-core's chain of them."""
    return list(getattr(optimizer, "chained_optimizers", (optimizer,)))


def optimizer_state(trainee: Trainee, model: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Master weights and moments, by the names of the weights in `model`; before the first step, zero moments."""
    parts = parts_of(trainee.optimizer)
    is_distributed = isinstance(parts[0], DistributedOptimizer)
    for part in parts:
        if not (is_distributed and is_loading):  # whose load gives it its state
            start_state(part)
    if not is_distributed:
        return trainee.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=sharding_metadata())
    if len(parts) > 1:
        trainee.optimizer._synchronize_steps()
    states = [optimizer_parts.sharded_state(part, model, is_loading) for part in parts]
    return states[0] if len(parts) == 1 else dict(enumerate(states))


def load_optimizer_state(trainee: Trainee, state: dict[str, Any], known_rows: dict[torch.Tensor, int]) -> None:
    """Give the optimizer what was read for its `optimizer_state`; settings of its groups stay those of the flags.

    The rates of the schedule are the saved run's with --use-checkpoint-opt_param-scheduler.

    Args:
        known_rows: from `rows_known`: the master weights of further rows are copies of the weights.
    """
    parts = parts_of(trainee.optimizer)
    own = [group_settings(part, trainee.schedule) for part in parts]
    if isinstance(parts[0], DistributedOptimizer):
        one = len(parts) == 1
        state = optimizer_parts.join_pieces(parts[0], state, known_rows) if one else {
            index: optimizer_parts.join_pieces(parts[index], each, known_rows) for index, each in state.items()
        }  # fmt: skip
    states = [state] if len(parts) == 1 else list(state.values())
    for part, of_part in zip(parts, states, strict=True):
        # A fixed loss scale leaves nothing; a dynamic one that comes after it begins anew.
        if "grad_scaler" in of_part and not of_part["grad_scaler"]:
            of_part["grad_scaler"] = part.grad_scaler.state_dict()
    trainee.optimizer.load_state_dict(state)
    if isinstance(parts[0], DistributedOptimizer):
        for part, of_part in zip(parts, states, strict=True):
            optimizer_parts.store_moments(part, of_part)
    else:
        for parameter, num_known in known_rows.items():
            if (master := getattr(parameter, "main_param", None)) is not None:
                master[num_known:] = parameter[num_known:]
    for part, settings in zip(parts, own, strict=True):
        for group, values in zip(part.optimizer.param_groups, settings, strict=True):
            group.update(values)
    if getattr(parts[0].config, "use_precision_aware_optimizer", False):
        # A weight that is rounded from its master stood half a step off in the checkpoint where that was a tie.
        gather_weights(trainee.chunks)


def group_settings(part: Any, schedule: OptimizerParamScheduler) -> list[dict[str, Any]]:
    """What a load should leave as it is in each group of parameters: megatron-core would take the saved run's."""
    names = GROUP_SETTINGS + (() if schedule.use_checkpoint_opt_param_scheduler else GROUP_RATES)
    return [{name: group[name] for name in names if name in group} for group in part.optimizer.param_groups]


def start_state(part: Any) -> None:
    """Give an optimizer that has not made a step the state that its first step would begin with."""
    if hasattr(part.optimizer, "initialize_state"):
        part.init_state_fn = start_fused_adam
    elif part.init_state_fn is None:
        part.init_state_fn = start_momentum
    part.init_state_fn(part.optimizer, part.config)


def start_fused_adam(optimizer: Any, config: Any) -> None:
    """The same for Transformer Engine's Adam; megatron-core's function leaves out an argument."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                has_remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
                optimizer.initialize_state(parameter, has_remainders)


def start_momentum(optimizer: torch.optim.Optimizer, config: Any) -> None:
    """Give SGD the state that a checkpoint is read into. megatron-core has such a function for Adam only."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def layout() -> tuple[int, int, int]:
    """Sizes that a rank's random state depends on: pipeline, tensor, data x context."""
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def random_state() -> ShardedObject:
    """This rank's generators: torch's, and megatron-core's tracker of tensor-parallel streams."""
    state = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("random_state", state, layout(), place)


def is_of_this_kind_of_device(state: dict[str, Any]) -> bool:
    """Whether `random_state` was taken from generators like this machine's: a CPU's states are longer than CUDA's."""
    return state["device"].numel() == torch.cuda.get_rng_state().numel()


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to a state that `random_state` took on this kind of device."""
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def rows_known(model: dict[str, Any], num_rows: int) -> dict[Tensor, int]:
    """The vocabulary's parameters that are longer than in a checkpoint, and how many of this rank's rows it has.

    Args:
        model: the sharded state that will be loaded; its data are the model's parameters.
        num_rows: that the checkpoint has.
    """
    return {
        leaf.data: min(len(leaf.data), max(0, num_rows - leaf.global_offset[0]))
        for leaf in nested_values(model)
        if isinstance(leaf, ShardedTensor) and leaf.key in (EMBEDDING, OUTPUT_LAYER) and leaf.global_shape[0] > num_rows
    }


@torch.no_grad()
def fill_new_rows(rows: dict[Tensor, int], num_rows: int) -> None:
    """Give rows that a checkpoint did not have the mean of those that it had; all ranks call it.

    A row's logit is then the mean of the others', and its probability, as the exponential is convex, at most
    1 / num_rows of what they have together.

    Args:
        rows: from `rows_known`; loaded by now.
        num_rows: that the checkpoint had.
    """
    for parameter, num_known in rows.items():
        mean = parameter[:num_known].sum(dim=0, dtype=torch.float32) / num_rows
        dist.all_reduce(mean, group=parallel_state.get_tensor_model_parallel_group())
        parameter[num_known:] = mean.to(parameter.dtype)


def put_rounded_masters(model: dict[str, Any], optimizer: MegatronOptimizer) -> None:
    """Replace quantized weights in a sharded model state by their rounded master weights; all ranks call it.

    Only the rank that writes a weight holds it whole, in CPU memory, and for the time of one bucket on the device.
    """
    mine = {
        id(leaf.data.codes): leaf
        for leaf in nested_values(model)
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
        and isinstance(leaf.data, QuantizedParameter)
        and is_main_replica(leaf.replica_id)
    }
    for part in parts_of(optimizer):
        for index, buffer in enumerate(getattr(part, "buffers", ())):
            if not isinstance(buffer.params[0], QuantizedParameter):
                continue
            for number, bucket in enumerate(buffer.buckets):
                rounded = gather_rounded(part, index, number)
                for weight in bucket.params_list:
                    if id(weight.codes) in mine:
                        first, last, _ = buffer.param_index_map[weight]
                        whole = rounded[first - bucket.offset : last - bucket.offset].view(weight.shape)
                        mine[id(weight.codes)].data = whole.cpu()


@torch.no_grad()
def gather_rounded(optimizer: Any, buffer_index: int, bucket_index: int) -> Tensor:
    """A bucket of master weights, rounded to the weights' type, on every data-parallel rank. Shape: (elements,)."""
    buffer, group = optimizer.buffers[buffer_index], optimizer.data_parallel_group
    weight, bucket = buffer.params[0], buffer.buckets[bucket_index]
    whole = torch.zeros(bucket.grad_data.numel(), dtype=weight.dtype, device=weight.device)
    shard = shard_buffer(whole, group.size())[group.rank()]
    (ranges,) = optimizer.gbuf_ranges[buffer_index].values()
    for parameter, places in ranges[bucket_index]["param_map"].items():
        place = places["gbuf_local"]
        shard[place.start : place.end].copy_(parameter.main_param)
    dist.all_gather_into_tensor(whole, shard, group=group)
    return whole
