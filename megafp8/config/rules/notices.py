"""Settings that change nothing in this run, though another run would heed them: accepted, and said.

Megatron-LM's own example scripts give each of them; refusing would stop a command line that means what it says.
"""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.schema import RunConfig


def notices(config: RunConfig, implementation: str) -> list[str]:
    """What the user should know about settings without effect.

    Args:
        implementation: the layers: `transformer_engine`, `emulated` or `local`.
    """
    return list(_idle_settings(config, implementation))


def _idle_settings(config: RunConfig, implementation: str) -> Iterator[str]:
    parallel, data = config.parallel, config.data
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has nothing to split: --tensor-model-parallel-size is 1"
    if data.tiktoken_pattern is not None and data.tokenizer_type != "TikTokenizer":
        yield f"--tiktoken-pattern {data.tiktoken_pattern} is for TikTokenizer: {data.tokenizer_type} has its own"
    if parallel.cp_comm_type != "p2p" and implementation != "transformer_engine" and parallel.context_parallel_size > 1:
        yield f"--cp-comm-type {parallel.cp_comm_type}: the {implementation} layers gather keys and values (allgather)"
