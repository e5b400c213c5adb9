"""The config.json of released models, without fields that no model here reads (dtype, ids of tokens, versions)."""

from __future__ import annotations

from typing import Any

LLAMA3_SCALING = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "pretraining_tp": 1,
}  # fmt: skip
LLAMA32 = LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "intermediate_size": 8192,
    "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500_000.0, "tie_word_embeddings": True, "vocab_size": 128_256,
}  # fmt: skip
QWEN25 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02,
    "attention_dropout": 0.0, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14_336, "max_position_embeddings": 32_768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
    },
}  # fmt: skip
GEMMA = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
}  # fmt: skip
GEMMA2 = GEMMA | {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
    "max_position_embeddings": 8192, "rope_theta": 10_000.0, "sliding_window": 4096, "vocab_size": 256_000,
}  # fmt: skip
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "max_position_embeddings": 32_768, "num_attention_heads": 4,
    "num_key_value_heads": 1, "rope_local_base_freq": 10_000, "rope_scaling": None, "rope_theta": 1_000_000,
    "sliding_window": 512, "vocab_size": 262_144,
}  # fmt: skip
GRANITE3 = {
    "model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_bias": False, "mlp_bias": False,
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 131_072, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": True,
}  # fmt: skip

HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-7b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11_008, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "tie_word_embeddings": False, "vocab_size": 32_000,
    },
    "Llama-3.2-1B": LLAMA32 | {
        "head_dim": 64, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 16
    },
    "Llama-3.2-3B": LLAMA32 | {
        "head_dim": 128, "hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 28
    },
    "SmolLM2-135M": LLAMA | {
        "attention_bias": False, "mlp_bias": False, "hidden_size": 576, "intermediate_size": 1536,
        "initializer_range": 0.041666666666666664, "is_llama_config": True, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_interleaved": False,
        "rope_theta": 100_000, "tie_word_embeddings": True, "vocab_size": 49_152,
    },
    "Qwen2.5-0.5B": QWEN25 | {
        "hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32_768, "tie_word_embeddings": True,
        "vocab_size": 151_936,
    },
    "Qwen2.5-7B-Instruct with YaRN": QWEN25 | {
        "hidden_size": 3584, "intermediate_size": 18_944, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131_072, "tie_word_embeddings": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32_768, "type": "yarn"},
        "vocab_size": 152_064,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40_960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1_000_000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151_936,
    },
    "Mistral-7B-v0.1": MISTRAL_7B | {"rope_theta": 10_000.0, "sliding_window": 4096, "vocab_size": 32_000},
    "Mistral-7B-v0.3": MISTRAL_7B | {"rope_theta": 1_000_000.0, "sliding_window": None, "vocab_size": 32_768},
    "Phi-3-mini-4k": PHI3 | {
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "rope_scaling": None, "rope_theta": 10_000.0, "sliding_window": 2047, "tie_word_embeddings": False,
        "vocab_size": 32_064,
    },
    "Phi-4": PHI3 | {
        "auto_map": {}, "hidden_size": 5120, "intermediate_size": 17_920, "max_position_embeddings": 16_384,
        "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
        "original_max_position_embeddings": 16_384, "rope_scaling": None, "rope_theta": 250_000,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 100_352,
    },
    "Gemma 2 2B": GEMMA2 | {
        "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4,
    },
    "Gemma 2 27B": GEMMA2 | {
        "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36_864, "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
        "sliding_window_size": 4096,
    },
    "Gemma 3 1B": GEMMA3 | {
        "cache_implementation": "hybrid", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "sliding_window_pattern": 6,
    },
    "Gemma 3 270M": GEMMA3 | {
        "_sliding_window_pattern": 6, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "use_bidirectional_attention": False,
    },
    "OLMo-2-7B": {
        "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11_008, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 500_000, "tie_word_embeddings": False, "vocab_size": 100_352,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 11_008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65_536,
        "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5_000_000.0, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 128_256,
    },
    "Granite 3.1 2B": GRANITE3 | {
        "attention_dropout": 0.1, "attention_multiplier": 0.015625, "hidden_size": 2048, "intermediate_size": 8192,
        "logits_scaling": 8.0, "rope_theta": 5_000_000.0, "vocab_size": 49_152,
    },
    "Granite 3.3 8B": GRANITE3 | {
        "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "hidden_size": 4096,
        "intermediate_size": 12_800, "logits_scaling": 16.0, "rope_theta": 10_000_000.0, "vocab_size": 49_159,
    },
    "StarCoder2-3B": {
        "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
        "embedding_dropout": 0.1, "residual_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072,
        "initializer_range": 0.018042, "intermediate_size": 12_288, "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 16_384, "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm",
        "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
        "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True, "vocab_size": 49_152,
    },
    "Pythia-70M": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 512,
        "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10_000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50_304,
    },
    "GPT-NeoX-20B": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0,
        "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144, "initializer_range": 0.02,
        "intermediate_size": 24_576, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10_000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "vocab_size": 50_432,
    },
    "GPT-2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50_257,
    },
}  # fmt: skip
# Parameters of the released models in millions. The published numbers of Gemma and Phi are rounded.
MILLIONS = {
    "Llama-2-7b": 6738, "Llama-3.2-1B": 1236, "Llama-3.2-3B": 3213, "SmolLM2-135M": 135, "Qwen2.5-0.5B": 494,
    "Qwen2.5-7B-Instruct with YaRN": 7616, "Qwen3-0.6B": 596, "Mistral-7B-v0.1": 7242, "Mistral-7B-v0.3": 7248,
    "Phi-3-mini-4k": 3821, "Phi-4": 14_660, "Gemma 2 2B": 2614, "Gemma 2 27B": 27_227, "Gemma 3 1B": 1000,
    "Gemma 3 270M": 268, "OLMo-2-7B": 7299, "SmolLM3-3B": 3075, "Granite 3.1 2B": 2534, "Granite 3.3 8B": 8171,
    "StarCoder2-3B": 3030, "Pythia-70M": 70, "GPT-NeoX-20B": 20_555, "GPT-2": 124,
}  # fmt: skip
