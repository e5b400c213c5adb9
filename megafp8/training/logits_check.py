"""Compares the logits of a checkpoint with those of transformers, for `megafp8 convert --check-logits`."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from megafp8.checkpoint.load import load_weights
from megafp8.checkpoint.metadata import embedding_rows, read_config
from megafp8.config.settings import with_values
from megafp8.device import capability
from megafp8.device.platform import detect_platform
from megafp8.errors import CapabilityError, CheckpointError
from megafp8.training.generation_precision import without_quantization
from megafp8.training.language_model import build_module, single_device_config

NUM_SEQUENCES, MAX_LENGTH = 2, 64
# Of FP32 logits, relative to the largest: both compute the same products in another order of sums.
TOLERANCE = 1e-5


def check_logits(checkpoint: Path, hf_folder: Path, num_tokens: int) -> float:
    """Compare the FP32 logits of both models for random tokens.

    Args:
        checkpoint: one checkpoint, not the folder of its run.
        hf_folder: the model that transformers loads. No code of the folder is run.
        num_tokens: of the vocabulary, without padding.

    Returns:
        The largest difference over the largest logit.

    Raises:
        CapabilityError: transformers is not installed.
        CheckpointError: transformers cannot load the model, or the logits differ by more than `TOLERANCE`.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise CapabilityError("--check-logits needs a library: pip install transformers") from error
    config = with_values(
        without_quantization(read_config(checkpoint)), {"precision.bf16": False, "precision.fp16": False}
    )
    config, implementation = single_device_config(config, capability.detect_target())
    platform = detect_platform()
    module = build_module(config, implementation, embedding_rows(checkpoint), platform)
    load_weights(checkpoint, [module])
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            hf_folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {hf_folder}: {error}") from error
    length = min(MAX_LENGTH, config.model.max_position_embeddings or MAX_LENGTH)
    tokens = torch.randint(0, num_tokens, (NUM_SEQUENCES, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model.eval()(tokens).logits
        positions = torch.arange(length, device=platform.device).expand_as(tokens)
        ours = module(tokens.to(platform.device), positions, None).cpu()[..., : theirs.shape[-1]]
    difference = float((theirs - ours).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"the logits of {checkpoint} and {hf_folder} differ by {difference:.2g} of the largest logit, more than "
            f"{TOLERANCE:g}: --dtype may have rounded the weights, or one of the two is not the same model"
        )
    return difference
