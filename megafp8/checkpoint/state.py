"""What a checkpoint holds, as megatron-core's sharded state dictionary.

Model and optimizer are sharded by global name, so another layout can load them. Random state belongs to a rank's place
and to a kind of device, and is left out when either changes. Progress and the configuration are plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from megafp8.checkpoint import optimizer_parts
from megafp8.checkpoint.skipped import History
from megafp8.parallel.gather import gather_weights

# Settings of a group of parameters that come from flags, and those of them that belong to the schedule.
GROUP_SETTINGS = ("betas", "eps", "momentum")
GROUP_RATES = ("max_lr", "min_lr")


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done, also those whose update was left out.
        consumed_samples: training sequences read or passed over; the whole state of the data loader.
        history: of bad numbers.
    """

    step: int = 0
    consumed_samples: int = 0
    history: History = History()


@dataclass(frozen=True)
class Trainee:
    """What training changes: the parts that a checkpoint saves and restores.

    Attributes:
        being_copied: how to wait for copies of weights and moments that are still being made.
    """

    chunks: list[Any]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    being_copied: list[Callable[[], None]] = field(default_factory=list)

    def wait_for_copies(self) -> None:
        """Return when weights and moments may change; whoever changes them calls it first."""
        while self.being_copied:
            self.being_copied.pop()()


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
