"""Values derived from the settings: pure functions of a `RunConfig` or of its sections.

What depends on the number of ranks is in `topology` and `iterations`, and the model's dimensions are in `dimensions`.
The functions follow Megatron-LM's `validate_args`. The settings that they read must have passed the rules in
`config/rules`.
"""

from __future__ import annotations

import re
from typing import Optional

from megafp8.config import precision_map
from megafp8.config.schema import (
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from megafp8.recipes import registry
from megafp8.recipes.base import Recipe

DEFAULT_SPLIT = "969,30,1"
ELEMENTS_PER_THREAD = 2**16

# ---- data ---------------------------------------------------------------------------------------------------------


def tokenizer_type(data: DataConfig) -> Optional[str]:
    """The tokenizer. Megatron-LM's GPT scripts give the files of GPT-2's tokenizer without its type."""
    if data.tokenizer_type is None and (data.vocab_file is not None or data.merge_file is not None):
        return "GPT2BPETokenizer"
    return data.tokenizer_type


def split(data: DataConfig) -> Optional[str]:
    """Fractions for training, validation and test, for example `969,30,1`; None if each has its own shards."""
    if data.train_data_path or data.valid_data_path or data.test_data_path or (data.data_phases and not data.data_path):
        return None
    return data.split if data.split is not None else DEFAULT_SPLIT


def split_shares(text: str) -> tuple[float, ...]:
    """Parse a split. Quotes around it are dropped, because Megatron-LM's Llama script passes them on.

    Raises:
        ValueError: not one to three numbers without exponents, which megatron-core does not parse, or their sum is 0.
    """
    parts = [part.strip() for part in text.strip("'\"").split(",")]
    shares = tuple(float(part) for part in parts if re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", part))
    if len(shares) < len(parts) or len(shares) > 3 or not sum(shares):
        raise ValueError(text)
    return shares


def num_training_documents(data: DataConfig, count: int) -> int:
    """Documents of a shard that `--split` gives to training, of `count`: rounded as by megatron-core.

    Raises:
        ValueError: the split cannot be parsed.
    """
    text = split(data)
    shares = (1.0,) if text is None else split_shares(text)
    return round(shares[0] / sum(shares) * count)


# ---- recipes ------------------------------------------------------------------------------------------------------


def used_recipes(precision: PrecisionConfig) -> tuple[Recipe, ...]:
    """The recipes of a run, each once."""
    return tuple(registry.get(name) for name in precision_map.used_recipes(precision))


def quantization_recipe(precision: PrecisionConfig) -> Optional[str]:
    """Name of the recipe of the linears of layers without a precision map; None in high precision."""
    return precision_map.base_choice(precision).fprop.recipe


def recipe_flag(precision: PrecisionConfig) -> str:
    """The flag of `quantization_recipe`, for example `--fp8-recipe mxfp8`. For runs that have a recipe."""
    return f"--{'fp4' if precision.fp8_format is None else 'fp8'}-recipe {quantization_recipe(precision)}"


def gemm_alignment(precision: PrecisionConfig) -> int:
    """Every dimension of a quantized GEMM must be a multiple of this; 1 in high precision."""
    return max((recipe.gemm_alignment for recipe in used_recipes(precision)), default=1)


def is_stateful(precision: PrecisionConfig) -> bool:
    """Whether any recipe of the run keeps an amax history (delayed scaling)."""
    return any(recipe.is_stateful for recipe in used_recipes(precision))


def measures_attention_logits(config: RunConfig) -> bool:
    """Whether the largest attention logits are measured."""
    return config.logging.log_max_attention_logit or config.optimizer.qk_clip


def logits_flag(config: RunConfig) -> str:
    """The flag for which they are."""
    return "--qk-clip" if config.optimizer.qk_clip else "--log-max-attention-logit"


def ema_bytes(optimizer: OptimizerConfig) -> int:
    """Bytes for each parameter of the moving average of the weights; 0 without one."""
    return 0 if optimizer.ema_decay is None else {"fp32": 4, "bf16": 2}[optimizer.ema_dtype]


# ---- training and logging -----------------------------------------------------------------------------------------


def moves_linears(training: TrainingConfig) -> Optional[str]:
    """The flag with which a run may move linears to high precision; None without one."""
    if training.on_nonfinite_activation == "bf16":
        return "--on-nonfinite-activation bf16"
    return "--fp8-guard bf16-layer" if training.fp8_guard == "bf16-layer" else None


def log_layer_patterns(logging: LoggingConfig) -> tuple[str, ...]:
    """Patterns of the linears with quantization statistics (--fp8-log-layers)."""
    return tuple(part.strip() for part in logging.fp8_log_layers.split(",") if part.strip())


def what_if_recipes(logging: LoggingConfig) -> tuple[str, ...]:
    """Recipes for which quantization statistics are simulated (--fp8-what-if)."""
    return tuple(part.strip() for part in (logging.fp8_what_if or "").split(",") if part.strip())


# ---- number formats -----------------------------------------------------------------------------------------------


def params_dtype(precision: PrecisionConfig) -> str:
    """Dtype of the model weights before quantization: `fp32`, `bf16` or `fp16`."""
    if precision.bf16:
        return "bf16"
    return "fp16" if precision.fp16 else "fp32"


def grad_dtype(precision: PrecisionConfig) -> str:
    """Dtype of the gradient buffers and of their reduction: `fp32`, `bf16` or `fp16`.

    As in Megatron-LM: FP32 for BF16 weights unless --grad-reduce-in-bf16, and FP16 for FP16 weights unless
    --accumulate-allreduce-grads-in-fp32.
    """
    dtype = params_dtype(precision)
    if dtype == "bf16" and precision.grad_reduce_in_bf16:
        return "bf16"
    if dtype == "fp16" and not precision.accumulate_allreduce_grads_in_fp32:
        return "fp16"
    return "fp32"


def softmax_in_fp32(model: ModelConfig) -> bool:
    """Whether the attention softmax runs in FP32, which --apply-query-key-layer-scaling implies."""
    return model.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling


# ---- execution ----------------------------------------------------------------------------------------------------


def uses_cuda_graph(config: RunConfig) -> bool:
    """Whether the forward-backward of a step is launched as a CUDA graph; false while that is automatic."""
    return config.training.cuda_graph_impl == "local"


def has_dropout(model: ModelConfig) -> bool:
    """Whether training steps draw random numbers for dropout."""
    return model.attention_dropout > 0 or model.hidden_dropout > 0


def recompute_granularity(training: TrainingConfig) -> Optional[str]:
    """`full`, `selective` or None; --recompute-activations and --moe-layer-recompute are short for selective."""
    is_short = training.recompute_activations or training.moe_layer_recompute
    return training.recompute_granularity or ("selective" if is_short else None)


def recompute_modules(training: TrainingConfig) -> tuple[str, ...]:
    """The modules of selective recompute; empty without it."""
    if recompute_granularity(training) != "selective":
        return ()
    chosen = training.recompute_modules or ("core_attn",)
    return (*chosen, *(("moe",) if training.moe_layer_recompute and "moe" not in chosen else ()))


def useful_threads(config: RunConfig) -> int:
    """The largest useful number of CPU threads per rank: one per 2^16 elements of an activation [T, H].

    torch splits an elementwise operation into chunks of at least 2^15 elements. With fewer than two chunks per thread,
    an additional thread saves no time but uses as much CPU time, because it waits by spinning.
    """
    parallel = config.parallel
    length = config.data.seq_length or config.model.max_position_embeddings or 1  # a converted model has no batch
    num_tokens = (config.training.micro_batch_size or 1) * length // parallel.context_parallel_size
    assert config.model.hidden_size is not None
    num_elements = num_tokens * config.model.hidden_size // parallel.tensor_model_parallel_size
    return max(1, num_elements // ELEMENTS_PER_THREAD)
