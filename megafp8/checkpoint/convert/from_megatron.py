"""Conversion of a sharded checkpoint of Megatron-LM to a run folder that training continues from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Optional

import torch

from megafp8.checkpoint.convert.megatron_args import settings_of_args
from megafp8.checkpoint.convert.megatron_buckets import Layout, bucket_sources, common_optimizer_state
from megafp8.checkpoint.convert.megatron_folder import CONSUMED_SAMPLES, MegatronCheckpoint, open_megatron_checkpoint
from megafp8.checkpoint.convert.model_tensors import Weight, gpt_weights
from megafp8.checkpoint.convert.problems import check_problems, rule_problems, shape_problems
from megafp8.checkpoint.convert.safetensors_files import write_json
from megafp8.checkpoint.metadata import OPTIMIZER_PREFIX, is_extra_state, load_errors
from megafp8.checkpoint.standalone import CheckpointParts, CheckpointTensors, LazyTensor, save_parts
from megafp8.checkpoint.state_dict import EMBEDDING, content_metadata
from megafp8.config.optimizers import updates_matrices
from megafp8.config.schema import ModelConfig, OptimizerConfig, RunConfig
from megafp8.config.settings import changed_settings, to_json, with_values
from megafp8.errors import CheckpointError
from megafp8.optimizer.schedules import Schedule

# Layouts of the distributed optimizer's state that are read: tensors like the weights, and buckets.
TENSORS, BUCKETS = "fully_reshardable", "dp_reshardable"
# Names of a rank's random states here and in Megatron-LM.
RANDOM_STATES = {"cpu": "torch_rng_state", "device": "cuda_rng_state", "tracker": "rng_tracker_states"}
# Names of a gated MLP's two halves where every layer has its own tensors.
GATE, VALUE = "_w", "_v"


@dataclass(frozen=True, kw_only=True)
class MegatronImport(CheckpointParts):
    """A planned conversion.

    Attributes:
        config: settings of the run, without those of saving.
        notes: for the user.
    """

    config: RunConfig
    notes: list[str]

    def write(self, folder: Path, on_bytes: Callable[[int], Any]) -> None:
        """Write a run folder: the checkpoint, and config.json for `--config`.

        Raises:
            CheckpointError: a file is damaged, or the folder cannot be written.
        """
        save_parts(folder, self.reporting(on_bytes))
        write_json(folder / "config.json", changed_settings(self.config))


def plan_megatron_import(folder: Path, step: Optional[int], with_optimizer: bool = True) -> MegatronImport:
    """Check everything before anything is written.

    Args:
        folder: of a run of Megatron-LM, or of one checkpoint.
        step: of the checkpoint; None is the newest.
        with_optimizer: import optimizer state and schedule, too.

    Raises:
        CheckpointError: it is not such a checkpoint, or it cannot be expressed here; with all problems.
    """
    source = open_megatron_checkpoint(folder, step)
    with load_errors(source.path, needs_common=False):  # values may have any type
        return build_import(source, with_optimizer)


def build_import(source: MegatronCheckpoint, with_optimizer: bool) -> MegatronImport:
    """Return the conversion of an open checkpoint, as `plan_megatron_import`."""
    values, problems, left = settings_of_args(source.args)
    check_problems(source.path, problems)
    config = with_values(RunConfig(), values)
    check_problems(source.path, [f"the argument {name} is missing" for name in missing_sizes(config.model)])
    layout, consumed_samples = source.layout, source.consumed_samples
    tensors = CheckpointTensors(source.path)
    if EMBEDDING not in tensors.locations:
        raise CheckpointError(f"{source.path} has no {EMBEDDING}: it is not a checkpoint of a GPT")
    has_fused_norms = source.args.get("transformer_impl", "transformer_engine") != "local"
    num_rows = tensors.locations[EMBEDDING].shape[0]
    weights = gpt_weights(config.model, num_rows, has_fused_norms)
    found = {weight.name: tensor_source(tensors, weight.name) for weight in weights}
    check_problems(source.path, weight_problems(tensors, weights, found))
    check_problems(source.path, rule_problems(model_alone(values, num_rows)))
    sources = {name: each for name, each in found.items() if each is not None}
    common: dict[str, Any] = {}
    notes = [f"not read: {', '.join(left)}"] if left else []
    with_optimizer = with_optimizer and bool(source.common.get("optimizer"))
    if with_optimizer:
        num_layers = config.model.num_layers or 0
        state_sources, common["optimizer"] = optimizer_parts(source, tensors, config.optimizer, weights, num_layers)
        sources |= state_sources
        common["schedule"] = schedule_state(source)
    else:
        notes.append("weights only: the checkpoint is without optimizer state and schedule")
    objects = random_states(source, tensors)
    if not objects:
        notes.append("it has no random state")
    if consumed_samples is None:
        notes.append(
            f"it does not say how many samples its run had read ({CONSUMED_SAMPLES}), which counts as 0: training "
            "starts at the first sample again, and repeats those that the model has seen"
        )
    saved = with_values(config, {
        "checkpoint.no_save_optim": not with_optimizer, "checkpoint.no_save_rng": not objects,
        "parallel.use_distributed_optimizer": has_distributed_state(source.common),
    })  # fmt: skip
    common |= {
        "step": source.step, "consumed_samples": consumed_samples or 0, "samples": None,
        "config": to_json(saved), "layout": list(layout), "content_metadata": content_metadata(),
    }  # fmt: skip
    return MegatronImport(common=common, sources=sources, objects=objects, config=config, notes=notes)


def model_alone(values: Mapping[str, Any], num_rows: int) -> RunConfig:
    """Return the settings that every run of a model has, whatever its layout, batch, data and FP8 recipe."""
    selected = ("precision.bf16", "precision.fp16", "data.seq_length")
    of_model = {name: value for name, value in values.items() if name in selected or name.startswith("model.")}
    return with_values(RunConfig(), {"model.vocab_size": num_rows - 1} | of_model)


def missing_sizes(model: ModelConfig) -> list[str]:
    """Return the arguments without which the model is not known."""
    names = ("num_layers", "hidden_size", "num_attention_heads")
    return [name for name in names if not getattr(model, name)]


def tensor_source(tensors: CheckpointTensors, name: str) -> Optional[LazyTensor]:
    """Return a stored tensor, or the two halves of one, as a lazy tensor; None if it is absent."""
    if name in tensors.locations:
        return tensors.lazy(name)
    halves = [tensors.locations.get(name + suffix) for suffix in (GATE, VALUE)]
    if halves[0] is None or halves[1] is None or halves[0].shape != halves[1].shape:
        return None
    shape = (2 * halves[0].shape[0], *halves[0].shape[1:])
    return LazyTensor(
        shape, halves[0].dtype, lambda: torch.cat([tensors.load(name + suffix) for suffix in (GATE, VALUE)])
    )


def weight_problems(
    tensors: CheckpointTensors, weights: list[Weight], sources: dict[str, Optional[LazyTensor]]
) -> list[str]:
    """Return how the tensors differ from those of the model that the arguments describe."""
    known = set(sources) | {name + suffix for name in sources for suffix in (GATE, VALUE)}
    found = {name: source.shape for name, source in sources.items() if source is not None} | {
        name: location.shape
        for name, location in tensors.locations.items()
        if not (name in known or name.startswith(OPTIMIZER_PREFIX) or is_extra_state(name))
    }
    expected = {weight.name: weight.shape for weight in weights}
    return shape_problems(expected, found, ", and by the arguments", "a dense GPT with these arguments")


def has_distributed_state(common: Mapping[str, Any]) -> bool:
    """Return whether the plain values of a checkpoint have the state of a distributed optimizer."""
    state = common.get("optimizer")
    return isinstance(state, dict) and "param_state_sharding_type" in state


def optimizer_parts(
    source: MegatronCheckpoint, tensors: CheckpointTensors, optimizer: OptimizerConfig, weights: list[Weight],
    num_layers: int,
) -> tuple[dict[str, LazyTensor], Any]:  # fmt: skip
    """Return the optimizer's tensors by name, and its plain values.

    Raises:
        CheckpointError: the layout of the state is not supported.
    """
    if updates_matrices(optimizer):
        raise CheckpointError(
            f"{source.path} has the state of Megatron-LM's --optimizer {optimizer.optimizer}, in parts that "
            "depend on its layout: import the weights only (--no-load-optim)"
        )
    state = source.common["optimizer"]
    kind = state.get("param_state_sharding_type") if isinstance(state, dict) else None
    if kind == BUCKETS:
        num_stages, num_ranks, _ = source.layout
        layout = Layout(num_stages, source.argument("virtual_pipeline_model_parallel_size", 1), num_ranks)
        sources = bucket_sources(source.path, tensors, weights, layout, num_layers)
        return sources, common_optimizer_state(tensors)
    names = state_names(tensors)
    if kind not in (None, TENSORS) or not names:
        raise CheckpointError(
            f"{source.path} has optimizer state in the layout {kind}, which is not read. Load and save it once with "
            "Megatron-LM and --dist-ckpt-optim-fully-reshardable, or import the weights only (--no-load-optim)"
        )
    found = {name: tensor_source(tensors, name) for name in names}
    return {name: each for name, each in found.items() if each is not None}, state


def state_names(tensors: CheckpointTensors) -> list[str]:
    """Return the names of optimizer tensors; the halves of a gated MLP count as one."""
    names = (name for name in tensors.locations if name.startswith(f"{OPTIMIZER_PREFIX}state."))
    return list(dict.fromkeys(name.removesuffix(GATE).removesuffix(VALUE) for name in names))


def schedule_state(source: MegatronCheckpoint) -> dict[str, Any]:
    """Return the schedule's state. What megatron-core does not save follows from the arguments, as in its runs."""
    saved = source.common.get("opt_param_scheduler")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{source.path} has optimizer state without a schedule: import it with --no-load-optim")
    known = {"init_lr": source.args.get("lr_warmup_init"), "lr_wsd_decay_style": source.args.get("lr_wsd_decay_style")}
    return dict(saved) | {name: known[name] for name in Schedule.EXTRA_KEYS if known.get(name) is not None}


def random_states(source: MegatronCheckpoint, tensors: CheckpointTensors) -> dict[str, Any]:
    """Return the random states of all ranks by name; empty if there are none.

    Megatron-LM saves one for each tensor and pipeline rank, which all data-parallel ranks load.
    """
    num_stages, num_ranks, num_replicas = source.layout
    found = {}
    for stage, rank in product(range(num_stages), range(num_ranks)):
        name = f"rng_state/shard_{stage}.{rank}_{num_stages}.{num_ranks}"
        if name not in tensors.objects:
            return {}
        saved = tensors.load_object(name)
        for replica in range(num_replicas):
            each = saved[replica if len(saved) == num_replicas else 0]
            found[f"random_state/shard_{stage}.{rank}.{replica}_{num_stages}.{num_ranks}.{num_replicas}"] = {
                name: each[theirs] for name, theirs in RANDOM_STATES.items()
            }
    return found
