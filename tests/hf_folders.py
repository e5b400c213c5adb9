"""Folders of small models in transformers' format, written without the library, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.checkpoint.convert.families import family_of_hf_config
from megafp8.checkpoint.convert.safetensors_files import SINGLE_FILE, write_json
from megafp8.checkpoint.convert.tensor_mapping import HFConfig
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values

LLAMA = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
TIED_LLAMA = LLAMA | {
    "vocab_size": 128, "head_dim": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "attention_bias": True,
    "mlp_bias": True, "rope_theta": 500_000.0, "attention_dropout": 0.1,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 48}
MODELS = {"llama": LLAMA, "tied": TIED_LLAMA, "gpt2": GPT2}


def settings_of(fields: dict[str, Any]) -> RunConfig:
    """The run's settings that a config.json represents."""
    theirs = HFConfig(fields)
    values = family_of_hf_config(fields).from_hf_config(theirs)
    assert theirs.problems == []
    return with_values(RunConfig(), values | {"model.vocab_size": fields["vocab_size"]})


def random_weights(fields: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of a model by name. All elements differ, so that a permutation is detected."""
    config, generator = settings_of(fields), torch.Generator().manual_seed(1)
    rows = family_of_hf_config(fields).tensor_table(config.model, fields["vocab_size"], fields["vocab_size"])
    shapes = {name: shape for row in rows for name, shape in row.hf_shapes().items()}
    return {
        name: ((0.5 if len(shape) == 1 else 0.1) * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def write_hf_folder(folder: Path, fields: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """A folder with config.json and one file of weights."""
    folder.mkdir()
    write_json(folder / "config.json", fields)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / SINGLE_FILE, {"format": "pt"})
    return folder


def weights_in(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, from any number of files."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Equal names, types and bits."""
    return some.keys() == others.keys() and all(
        weight.dtype == others[name].dtype and weight.shape == others[name].shape
        and torch.equal(weight.view(torch.uint8), others[name].view(torch.uint8))
        for name, weight in some.items()
    )  # fmt: skip
