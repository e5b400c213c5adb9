"""Conversion of a checkpoint to one that Megatron-LM's training script loads.

Weights and optimizer state have the same names and shapes there. What differs are the plain values, Megatron-LM's
arguments among them, the random states, and objects that Megatron-LM expects for every linear.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megafp8.checkpoint import gradient_residuals, weight_ema
from megafp8.checkpoint.convert.from_megatron import RANDOM_STATES, has_distributed_state
from megafp8.checkpoint.convert.megatron_args import args_of_settings, unexpressed_settings
from megafp8.checkpoint.convert.problems import format_problems
from megafp8.checkpoint.directory import POINTER, checkpoint_path
from megafp8.checkpoint.metadata import OPTIMIZER_PREFIX, check_readable, is_extra_state, load_common_state
from megafp8.checkpoint.resume_point import find_source
from megafp8.checkpoint.standalone import CheckpointParts, CheckpointTensors, write_files
from megafp8.checkpoint.state_dict import EMBEDDING, content_metadata
from megafp8.config.optimizers import updates_matrices
from megafp8.config.settings import from_json
from megafp8.errors import CheckpointError
from megafp8.optimizer.schedules import Schedule
from megafp8.utils.integers import numpy_seed

CHECKPOINT_VERSION = 3.0
# Modules of a layer whose extra state Megatron-LM loads; without FP8 it is None.
MODULES_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention", "mlp.linear_fc1",
    "mlp.linear_fc2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MegatronExport(CheckpointParts):
    """A planned conversion.

    Attributes:
        path: the checkpoint.
        notes: for the user.
    """

    path: Path
    step: int
    notes: list[str]

    def write(self, folder: Path, on_bytes: Callable[[int], Any]) -> None:
        """Write the folder of a run of Megatron-LM.

        Raises:
            CheckpointError: it cannot be written.
        """
        path = checkpoint_path(folder, self.step)
        try:
            path.mkdir(parents=True)
            write_files(path, self.reporting(on_bytes))
            check_readable(path)
            (folder / POINTER).write_text(f"{self.step}\n")
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error}") from error


def plan_megatron_export(source: Path, step: Optional[int], with_optimizer: bool = True) -> MegatronExport:
    """Check everything before anything is written.

    Args:
        source: folder of a run or of a checkpoint.
        step: of the checkpoint; None is the newest.
        with_optimizer: export optimizer state and schedule, too.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or Megatron-LM has no such model.
    """
    path = find_source(source, step).path
    saved = load_common_state(path)
    config, tensors = from_json(saved["config"]), CheckpointTensors(path)
    if problems := unexpressed_settings(config.model):
        raise CheckpointError(f"{path} cannot be expressed as a model of Megatron-LM:\n{format_problems(problems)}")
    with_optimizer = with_optimizer and "optimizer" in saved
    if with_optimizer and updates_matrices(config.optimizer):
        raise CheckpointError(
            f"{path} has the state of --optimizer {config.optimizer.optimizer}, which Megatron-LM saves in parts that "
            "depend on the layout: export the weights only (--no-load-optim)"
        )
    quantizers = [name for name in tensors.locations if is_extra_state(name)]
    sources = {
        name: tensors.lazy(name)
        for name in tensors.locations
        if name not in quantizers
        and not name.startswith((OPTIMIZER_PREFIX + gradient_residuals.KEY, weight_ema.PREFIX))
        and (with_optimizer or not name.startswith(OPTIMIZER_PREFIX))
    }
    notes = ["scales and amax histories are left out: Megatron-LM starts with new ones"] if quantizers else []
    if config.precision.grad_reduce_in_fp8:
        notes.append(
            "Megatron-LM has no FP8 gradients (--grad-reduce-in-fp8): their automatic factor and errors are left out"
        )
    if weight_ema.KEY in saved:
        notes.append("Megatron-LM has no moving average of the weights (--ema-decay): it is left out")
    if config.overrides:
        notes.append(f"Megatron-LM has no --override: set {', '.join(config.overrides)} there in another way")
    layout = tuple(saved["layout"])
    random_objects = random_states(tensors, layout, config.training.seed)
    if layout[2] > 1 and random_objects:
        notes.append("Megatron-LM has one random state for all data-parallel ranks: that of the first is written")
    if config.training.seed >= 2**32:
        notes.append(f"Megatron-LM has no --seed above {2**32 - 1:,}: give its run another one than the checkpoint's")
    ranks = config.parallel.context_parallel_size
    args = args_of_settings(config, job_arguments(saved, tensors, ranks, with_optimizer, bool(random_objects)))
    common = {
        "args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": saved["step"],
        "num_floating_point_operations_so_far": 0, "content_metadata": content_metadata(),
    }  # fmt: skip
    if with_optimizer:
        common["optimizer"] = saved["optimizer"]
        common["opt_param_scheduler"] = {
            name: value for name, value in saved["schedule"].items() if name not in Schedule.EXTRA_KEYS
        }
    objects = random_objects | extra_states(config.model.num_layers or 0)
    return MegatronExport(common=common, sources=sources, objects=objects, path=path, step=saved["step"], notes=notes)


def job_arguments(
    saved: Mapping[str, Any], tensors: CheckpointTensors, context_ranks: int, with_optimizer: bool, with_random: bool
) -> dict[str, Any]:
    """Return the arguments that are no settings of a Megatron-LM run that had saved this checkpoint."""
    num_stages, num_ranks, num_replicas = saved["layout"]
    return {
        "iteration": saved["step"],
        "consumed_train_samples": saved["consumed_samples"],
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "padded_vocab_size": tensors.locations[EMBEDDING].shape[0],
        "world_size": num_stages * num_ranks * num_replicas,
        "data_parallel_size": num_replicas // context_ranks,
        "tensor_model_parallel_size": num_ranks,
        "pipeline_model_parallel_size": num_stages,
        "use_distributed_optimizer": has_distributed_state(saved),
        "no_save_optim": None if with_optimizer else True,
        "no_save_rng": None if with_random else True,
    }


def extra_states(count: int) -> dict[str, None]:
    """Return the empty extra states that Megatron-LM expects, by name.

    Args:
        count: layers.
    """
    return {
        f"decoder.layers.{module}._extra_state/shard_{layer}_{count}": None
        for module, layer in product(MODULES_WITH_EXTRA_STATE, range(count))
    }


def random_states(tensors: CheckpointTensors, layout: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Return the random states of the tensor and pipeline ranks by name; empty if there are none.

    Megatron-LM also saves Python's and numpy's generators, which megafp8 does not use. They are those of a start.
    """
    num_stages, num_ranks, num_replicas = layout
    found = {}
    for stage, rank in product(range(num_stages), range(num_ranks)):
        name = f"random_state/shard_{stage}.{rank}.0_{num_stages}.{num_ranks}.{num_replicas}"
        if name not in tensors.objects:
            return {}
        state, stage_seed = tensors.load_object(name), seed + 100 * stage
        found[f"rng_state/shard_{stage}.{rank}_{num_stages}.{num_ranks}"] = [
            {
                "random_rng_state": random.Random(stage_seed).getstate(),
                "np_rng_state": np.random.RandomState(numpy_seed(stage_seed)).get_state(),
                **{theirs: state[name] for name, theirs in RANDOM_STATES.items()},
            }
        ]
    return found
