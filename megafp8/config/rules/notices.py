"""Settings that change nothing in this run, though another run would heed them: accepted, and said.

Megatron-LM's own example scripts give each of them; refusing would stop a command line that means what it says.
"""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of

DYNAMIC_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


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
    if data.split is not None and data.mock_data:
        yield f"--split {data.split}: made-up data is divided evenly"
    if not config.precision.fp16:
        for name in DYNAMIC_LOSS_SCALE:
            setting = settings_by_name()[f"optimizer.{name}"]
            value = value_of(config, setting.name)
            if value != setting.default:
                yield f"{setting.flags[0]} {value:g}: only --fp16 scales the loss"
    if parallel.cp_comm_type != "p2p" and implementation != "transformer_engine" and parallel.context_parallel_size > 1:
        yield f"--cp-comm-type {parallel.cp_comm_type}: the {implementation} layers gather keys and values (allgather)"
