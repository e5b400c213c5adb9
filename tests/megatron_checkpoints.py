"""Checkpoints as Megatron-LM's training script writes and reads them, from a small run of this package.

Structure and names follow `save_checkpoint` of Megatron-LM: its arguments as a namespace, megatron-core's sharded model
and optimizer, the schedule and the random state. megatron-core itself writes and reads the files.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import unwrap_model

from megafp8.config import dimensions, stages, topology
from megafp8.config.schema import RunConfig
from megafp8.training.run import Run


def arguments(config: RunConfig, iteration: int, **changes: Any) -> argparse.Namespace:
    """Megatron-LM's arguments of a run with these settings, after its `validate_args`."""
    model, parallel, world_size = config.model, config.parallel, dist.get_world_size()
    is_bf16 = config.precision.bf16
    values = {
        "num_layers": model.num_layers, "encoder_num_layers": model.num_layers, "hidden_size": model.hidden_size,
        "ffn_hidden_size": dimensions.ffn_hidden_size(model), "num_attention_heads": model.num_attention_heads,
        "kv_channels": dimensions.kv_channels(model), "group_query_attention": model.group_query_attention,
        "num_query_groups": model.num_query_groups, "max_position_embeddings": config.data.seq_length,
        "position_embedding_type": model.position_embedding_type, "add_position_embedding": True,
        "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False, "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None, "normalization": model.normalization, "norm_epsilon": 1e-5,
        "apply_layernorm_1p": False, "swiglu": model.swiglu, "squared_relu": False, "openai_gelu": False,
        "bias_gelu_fusion": config.precision.bias_gelu_fusion, "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": False,
        "qk_layernorm": model.qk_layernorm, "attention_dropout": model.attention_dropout,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "hidden_dropout": model.hidden_dropout, "init_method_std": 0.02, "multi_latent_attention": False,
        "num_experts": None, "mtp_num_layers": None, "apply_residual_connection_post_layernorm": False,
        "vocab_size": 255, "padded_vocab_size": 256, "make_vocab_size_divisible_by": 16,
        "tokenizer_type": "NullTokenizer", "seq_length": config.data.seq_length, "data_path": None, "mock_data": True,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size, "context_parallel_size": 1,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size, "expert_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": stages.virtual_pipeline_size(config.model, parallel),
        "world_size": world_size,
        "data_parallel_size": world_size // topology.model_parallel_size(config), "sequence_parallel": False,
        "use_distributed_optimizer": bool(parallel.use_distributed_optimizer), "bf16": is_bf16, "fp16": False,
        "params_dtype": torch.bfloat16 if is_bf16 else torch.float32, "attention_backend": AttnBackend.unfused,
        "micro_batch_size": 4, "global_batch_size": 8, "train_iters": 100, "seed": config.training.seed, "lr": 1e-3,
        "min_lr": 0.0, "lr_decay_style": "cosine", "lr_warmup_iters": 2, "weight_decay": 0.1, "adam_beta1": 0.9,
        "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0, "optimizer": "adam", "transformer_impl": "local",
        "iteration": iteration, "consumed_train_samples": iteration * 8, "consumed_valid_samples": 0, "rank": 0,
        "ckpt_format": "torch_dist", "save": "/elsewhere/run", "save_interval": 2, "no_save_optim": None,
    }  # fmt: skip
    return argparse.Namespace(**values | changes)


def random_state() -> ShardedObject:
    """The random state of a rank, as Megatron-LM's `get_rng_state` returns it."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    pipeline, tensor = (
        (parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()),
        (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], (pipeline[0], tensor[0]), (pipeline[1], tensor[1]), replica_id=replica)


def state_of(
    run: Run, args: argparse.Namespace, kind: str, is_loading: bool, is_stacked: bool = True
) -> dict[str, Any]:
    """The state dictionary of Megatron-LM's `generate_state_dict`.

    Args:
        kind: layout of the distributed optimizer's state: `distrib_optim_sharding_type`.
        is_stacked: whether equal layers are one tensor.
    """
    metadata = {
        "distrib_optim_sharding_type": kind,
        "singleton_local_shards": not is_stacked,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    chunks = unwrap_model(run.training_state.chunks)
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": args.iteration}
    for index, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{index}"] = chunk.sharded_state_dict(metadata=metadata)
    state["optimizer"] = run.training_state.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    state["opt_param_scheduler"] = super(type(run.training_state.schedule), run.training_state.schedule).state_dict()
    state["rng_state"] = random_state()
    state["num_floating_point_operations_so_far"] = 12345
    return state


def save_as_megatron(
    run: Run, folder: Path, args: argparse.Namespace, kind: str = "fully_reshardable", is_stacked: bool = True
) -> Path:
    """Write a checkpoint as Megatron-LM does; all ranks call it."""
    path = folder / f"iter_{args.iteration:07d}"
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    state = state_of(run, args, kind, is_loading=False, is_stacked=is_stacked)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    content = {"distrib_optim_sharding_type": kind, "singleton_local_shards": not is_stacked}
    dist_checkpointing.save(state, str(path), strategy, content_metadata=content | {"chained_optim_avoid_prefix": True})
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(args.iteration))
    dist.barrier()
    return path


def load_as_megatron(run: Run, path: Path, args: argparse.Namespace, kind: str = "fully_reshardable") -> dict[str, Any]:
    """Load a checkpoint as Megatron-LM does, into a run; all ranks call it. Returns the complete state."""
    state = dist_checkpointing.load(state_of(run, args, kind, is_loading=True), str(path))
    chunks = unwrap_model(run.training_state.chunks)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model" if len(chunks) == 1 else f"model{index}"])
    run.training_state.optimizer.load_state_dict(state["optimizer"])
    super(type(run.training_state.schedule), run.training_state.schedule).load_state_dict(state["opt_param_scheduler"])
    (random_states,) = (state["rng_state"],)
    random.setstate(random_states[0]["random_rng_state"])
    np.random.set_state(random_states[0]["np_rng_state"])
    torch.set_rng_state(random_states[0]["torch_rng_state"])
    torch.cuda.set_rng_state(random_states[0]["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(random_states[0]["rng_tracker_states"])
    return state
