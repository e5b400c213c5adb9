"""Folders of small models in transformers' format, written without the library, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.checkpoint.convert.families import family_of_hf_config
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.safetensors_files import SINGLE_FILE, write_json
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
SMALL = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
# A model of each other family.
FAMILY_MODELS: dict[str, dict[str, Any]] = {
    "qwen2": SMALL | {"tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": SMALL | {"head_dim": 32} | {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    },
    "mistral": SMALL | {"sliding_window": 9, "rms_norm_eps": 1e-5},
    "phi3": SMALL | {"partial_rotary_factor": 0.75, "pad_token_id": None, "sliding_window": 7},
    "smollm3": SMALL | {"pad_token_id": None},
    "olmo2": SMALL,
    "granite": SMALL | {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "starcoder2": SMALL | {"sliding_window": 9, "rope_theta": 999999.4420358813},
    "gpt_neox": SMALL,
    "gemma2": SMALL | {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 9},
    "mixtral": SMALL | {"num_local_experts": 4, "sliding_window": 9, "num_hidden_layers": 2},
    "qwen3_moe": SMALL | {
        "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True,
        "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 6,
    },
    "olmoe": SMALL | {"num_experts": 4, "num_experts_per_tok": 3, "num_hidden_layers": 2, "pad_token_id": None},
    "deepseek_v2": SMALL | {
        "num_key_value_heads": 4, "q_lora_rank": None, **LATENT, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
    "deepseek_v3": SMALL | {
        "num_key_value_heads": 4, "q_lora_rank": 24, **LATENT, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "n_group": 4, "topk_group": 2,
        "rope_scaling": {
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    },
    "gemma3_text": SMALL | {
        "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 9,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}  # fmt: skip
FAMILY_MODELS = {name: {"model_type": name} | fields for name, fields in FAMILY_MODELS.items()}


def settings_of(fields: dict[str, Any]) -> RunConfig:
    """The run's settings that a config.json represents."""
    theirs = HFConfig(fields)
    values = family_of_hf_config(fields).from_hf_config(theirs)
    assert theirs.problems == []
    return with_values(RunConfig(), values | {"model.vocab_size": fields["vocab_size"]})


def random_weights(fields: dict[str, Any], dtype: torch.dtype, is_stacked: bool = False) -> dict[str, Tensor]:
    """Weights of a model by name. All elements differ, so that a permutation is detected.

    Args:
        is_stacked: with one tensor for all experts, as in the modules of transformers 5.
    """
    config, generator = settings_of(fields), torch.Generator().manual_seed(1)
    rows = family_of_hf_config(fields).tensor_table(
        config.model, fields["vocab_size"], fields["vocab_size"], is_stacked
    )
    shapes = {name: shape for row in rows for name, shape in row.hf_shapes().items()}
    dtypes = {name: row.dtype or dtype for row in rows for name in row.hf_names}
    return {
        name: ((0.5 if len(shape) == 1 else 0.1) * torch.randn(shape, generator=generator)).to(dtypes[name])
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
