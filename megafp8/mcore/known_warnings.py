"""Warnings of megatron-core, Transformer Engine and torch that every run gives and that users cannot act on."""

from __future__ import annotations

import logging
import warnings

KNOWN_WARNINGS = (
    (UserWarning, r".*Apex (is|are) not installed.*", r"megatron\.core\..*"),
    (UserWarning, r"Transformer Engine.* not installed.*", r"megatron\.core\..*"),
    # Experts on one tensor-parallel rank each, which keep whole sequences; the other layers do not change.
    (UserWarning, r"`sequence_parallel` is set to `True`, but", r"megatron\.core\.tensor_parallel\.layers"),
    (UserWarning, r"full scope is deprecated", r"megatron\.core\.transformer\.transformer_config"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\..*"),
    (UserWarning, r"mxfp8 without using reuse_grad_buf", r"megatron\.core\.optimizer\..*"),
    # Nothing changes a model's output, the losses, in place.
    (
        UserWarning,
        r"FSDP2-wrapped module \(FSDP(GPTModel|Float16Module)\) returned a view",
        r"torch\.distributed\.fsdp",
    ),
    (UserWarning, r"MimoModelConfig is experimental", r"megatron\.core\.models\.mimo\..*"),
    (RuntimeWarning, r"Detected a Jax installation", r"transformer_engine"),
    (FutureWarning, r"`torch\.distributed\..*` is deprecated", r"torch\.distributed\.c10d_logger"),
    (FutureWarning, r"Please use DTensor instead", r"torch\.distributed\.checkpoint\..*"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\..*"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megafp8\.checkpoint\.serialization"),
    (FutureWarning, r"The 'is_cg_capturable' parameter is deprecated", r"transformer_engine\.pytorch\.cross_entropy"),
)
KNOWN_LOG_MESSAGES = (
    # Synthetic data needs no cached index.
    ("megatron.core.datasets.gpt_dataset", "path_to_cache is None", ""),
    # One for each layer whose MLP is a class of ours: it takes the process's tensor-parallel group, which is the one
    # that megatron-core passes to its own classes.
    ("megatron.core.transformer.transformer_layer", "Unknown MLP type", "<0.19"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED", ">=0.19"),
    # It then computes the layout itself, as 0.16 does.
    ("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided", ">=0.19"),
    # The checkpoints have a file common.pt, as those of 0.16.
    ("megatron.core.dist_checkpointing.strategies.common", "load_common is deprecated", ">=0.19"),
    # A CUDA build of torch on a machine with the CUDA toolkit and without a GPU.
    ("torch.utils.cpp_extension", "No CUDA runtime is found", ""),
)
"""Logger and text of warnings that are logged, by the same criteria as `KNOWN_WARNINGS`, and megatron-core's versions
that log them."""


def silence_known_warnings() -> None:
    """Filter out all of them."""
    for category, message, module in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", category=category, message=message, module=module)
    for logger, text, _ in KNOWN_LOG_MESSAGES:
        silence_log_message(logger, text)


def silence_log_message(logger: str, text: str) -> None:
    """Filter out the records of a logger that contain a text."""
    logging.getLogger(logger).addFilter(lambda record: text not in str(record.msg))
