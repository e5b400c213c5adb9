"""Replaces the reductions of a run by those in FP8: which parameters, in which buckets, over which ranks."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megafp8.config.schema import PrecisionConfig
from megafp8.config.schema.precision import EXCLUDED_BY_DEFAULT, NO_PATTERN
from megafp8.device.platform import local_world_size
from megafp8.errors import ConfigError
from megafp8.mcore.grad_reduction import Reduction, Work, reduction_group, replace_reduction
from megafp8.mcore.process_groups import bucket_groups
from megafp8.optimizer.data_parallel import runtime_of
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes, PipelinedReduction
from megafp8.optimizer.gradient_slices import parameter_ranges, split_bucket
from megafp8.optimizer.node_reduction import NodeReduction, Nodes, build_node_groups
from megafp8.optimizer.reduction_works import BucketWorks
from megafp8.recipes.formats import E4M3, E5M2

EMBEDDING = "embedding.word_embeddings.weight"


def build_fp8_reduction(
    precision: PrecisionConfig, chunks: Sequence[Any], device: torch.device
) -> Optional[Fp8Reduction]:
    """Reduce the gradients of all chunks in FP8; None without the flag, or where no other rank has gradients of these
    weights.

    All ranks call it, before hooks are added to the reductions.

    Raises:
        ConfigError: on all ranks: a pattern of `--grad-reduce-fp8-exclude` matches no parameter. On ranks whose nodes
            do not fit `--grad-reduce-fp8-intra-node`: see `node_reduction`.
    """
    num_ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if not precision.grad_reduce_in_fp8 or num_ranks == 1:
        return None
    patterns = () if precision.grad_reduce_fp8_exclude == (NO_PATTERN,) else precision.grad_reduce_fp8_exclude
    settings = GradientCodes(
        format={each.name: each for each in (E4M3, E5M2)}[precision.grad_reduce_fp8_format],
        is_blockwise=precision.grad_reduce_fp8_scaling == "block",
        has_feedback=precision.grad_reduce_fp8_error_feedback,
    )
    step, matched = Fp8Reduction(device), set()
    node_groups = build_node_groups(precision.grad_reduce_fp8_intra_node, local_world_size())
    for chunk in chunks:
        # The last stage has a copy of a tied embedding under the name of the output layer.
        names = {
            parameter: EMBEDDING if getattr(parameter, "shared_embedding", False) else name.removeprefix("module.")
            for name, parameter in chunk.module.named_parameters()
        }
        matched |= {pattern for pattern in patterns if fnmatch.filter(names.values(), pattern)}
        unquantized = {
            parameter
            for parameter, name in names.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
        runtime_of(chunk).send_codes(chunk, unquantized.__contains__, settings, step, node_groups)
        for group in bucket_groups(chunk):
            ranks = reduction_group(group)
            if ranks is not None:
                nodes = None if node_groups is None else node_groups.of(ranks)
                reductions = [
                    bucket_reduction(bucket, unquantized, ranks, settings, step, nodes) for bucket in group.buckets
                ]
                replace_reduction(group, partial(start_all, reductions))
    check_patterns(patterns, matched)
    return step


def bucket_reduction(
    bucket: Any,
    unquantized: Container[Any],
    ranks: dist.ProcessGroup,
    settings: GradientCodes,
    step: Fp8Reduction,
    nodes: Optional[Nodes] = None,
) -> PipelinedReduction | NodeReduction:
    """The reduction of one of megatron-core's buckets.

    Args:
        unquantized: the parameters that are not quantized.
        nodes: None where all ranks exchange codes.
    """
    is_unquantized = [parameter in unquantized for parameter in bucket.params_list]
    shards = split_bucket(parameter_ranges(bucket), is_unquantized, bucket.grad_data.numel(), ranks.size())
    if nodes is not None:
        return NodeReduction(bucket.grad_data, shards, len(is_unquantized), nodes, settings, step)
    return PipelinedReduction(bucket.grad_data, shards, len(is_unquantized), ranks, settings, step)


def start_all(reductions: Sequence[PipelinedReduction | NodeReduction], requested: Sequence[Reduction]) -> Work:
    """Start the reductions of the buckets of a group."""
    return BucketWorks([each.start(request) for each, request in zip(reductions, requested, strict=True)])


def check_patterns(patterns: Sequence[str], matched: set[str]) -> None:
    """Check that each given pattern matches a parameter of some rank; those of the default may match none.

    Raises:
        ConfigError: on all ranks: one does not.
    """
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, matched)
    unused = [each for each in patterns if each not in {*EXCLUDED_BY_DEFAULT, *set().union(*everywhere)}]
    if unused:
        raise ConfigError(
            f"--grad-reduce-fp8-exclude {' '.join(unused)} matches the name of no parameter: give a part of a name "
            "with stars, such as *linear_fc2* or decoder.layers.0.*, or none"
        )
