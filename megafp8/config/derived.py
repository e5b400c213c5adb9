"""Values derived from the settings: pure functions of a `RunConfig` and a world size.

They follow Megatron-LM's `validate_args` and `get_optimizer_param_scheduler`. The settings that they read must have
passed the rules in `config/rules`.
"""

from __future__ import annotations

import math
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
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.recipes.base import Recipe

DEFAULT_SPLIT = "969,30,1"
ELEMENTS_PER_THREAD = 2**16

# ---- layout -------------------------------------------------------------------------------------------------------


def model_parallel_size(config: RunConfig) -> int:
    """Ranks per model replica: tensor x pipeline x context."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Model replicas: world size / (tensor x pipeline x context).

    Raises:
        ConfigError: the world size is not a multiple of the ranks per replica.
    """
    ranks = model_parallel_size(config)
    if world_size < 1 or ranks < 1 or world_size % ranks:
        raise ConfigError(
            f"world size {world_size} is not a multiple of tensor x pipeline x context parallel size "
            f"= {config.parallel.tensor_model_parallel_size} x {config.parallel.pipeline_model_parallel_size} x "
            f"{config.parallel.context_parallel_size} = {ranks}"
        )
    return world_size // ranks


def virtual_pipeline_size(config: RunConfig) -> Optional[int]:
    """Model chunks per pipeline rank of the interleaved schedule; None without it and for one chunk."""
    parallel = config.parallel
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        chunks = layers_per_pipeline_rank(config) // parallel.num_layers_per_virtual_pipeline_stage
    return chunks if chunks is not None and chunks > 1 else None


def layers_per_pipeline_rank(config: RunConfig) -> int:
    """Transformer layers on one pipeline rank, over all its chunks."""
    assert config.model.num_layers is not None
    return config.model.num_layers // config.parallel.pipeline_model_parallel_size


# ---- batch and length ---------------------------------------------------------------------------------------------


def global_batch_size(config: RunConfig, world_size: int) -> int:
    """Sequences per optimizer step; without the flag, one micro-batch on each data-parallel rank."""
    if config.training.global_batch_size is not None:
        return config.training.global_batch_size
    assert config.training.micro_batch_size is not None
    return config.training.micro_batch_size * data_parallel_size(config, world_size)


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


def num_microbatches(config: RunConfig, world_size: int) -> int:
    """Microbatches of one data-parallel rank per optimizer step.

    Raises:
        ConfigError: the global batch is not a multiple of micro batch x data-parallel size.
    """
    micro, ranks = config.training.micro_batch_size, data_parallel_size(config, world_size)
    assert micro is not None
    batch = global_batch_size(config, world_size)
    if batch % (micro * ranks):
        raise ConfigError(
            f"global batch {batch} is not a multiple of micro batch x data-parallel size = {micro} x {ranks} "
            f"= {micro * ranks}"
        )
    return batch // (micro * ranks)


def tokens_per_step(config: RunConfig, world_size: int) -> int:
    """Tokens per optimizer step over all ranks."""
    assert config.data.seq_length is not None
    return global_batch_size(config, world_size) * config.data.seq_length


def train_iters(config: RunConfig, world_size: int) -> int:
    """Optimizer steps of the run; with --train-samples, the number of full global batches."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None
    return config.training.train_samples // global_batch_size(config, world_size)


def train_samples(config: RunConfig, world_size: int) -> int:
    """Sequences of the run; with --train-samples that number, even if the last batch is not full."""
    if config.training.train_iters is None and config.training.train_samples is not None:
        return config.training.train_samples
    return train_iters(config, world_size) * global_batch_size(config, world_size)


def dataset_samples(config: RunConfig, world_size: int) -> tuple[int, int, int]:
    """Sequences that the run reads for (training, validation, test).

    Every validation reads the same samples, so that losses are comparable within a run and between runs.
    """
    held_out = config.training.eval_iters * global_batch_size(config, world_size)
    return train_samples(config, world_size), held_out, held_out


def split(config: RunConfig) -> Optional[str]:
    """Fractions for training, validation and test, for example `969,30,1`; None if each has its own shards."""
    data = config.data
    if data.train_data_path or data.valid_data_path or data.test_data_path:
        return None
    return data.split if data.split is not None else DEFAULT_SPLIT


def split_shares(text: str) -> tuple[float, ...]:
    """Parse a split. Quotes around it are dropped, because Megatron-LM's Llama script passes them on.

    Raises:
        ValueError: not one to three numbers without exponents, which megatron-core does not parse, or their sum is 0.
    """
    parts = [part.strip() for part in text.strip("'\"").split(",")]
    shares = tuple(float(part) for part in parts if re.fullmatch(r"\d+(\.\d*)?|\.\d+", part))
    if len(shares) < len(parts) or len(shares) > 3 or not sum(shares):
        raise ValueError(text)
    return shares


# ---- learning-rate schedule, in samples ---------------------------------------------------------------------------


def lr_decay_samples(config: RunConfig, world_size: int) -> int:
    """Samples at which the schedule ends; by default the end of the run."""
    optimizer = config.optimizer
    if config.training.train_iters is None:
        return optimizer.lr_decay_samples or train_samples(config, world_size)
    steps = optimizer.lr_decay_iters if optimizer.lr_decay_iters is not None else config.training.train_iters
    return steps * global_batch_size(config, world_size)


def lr_warmup_samples(config: RunConfig, world_size: int) -> float:
    """Samples of linear warm-up. With --lr-warmup-fraction it may be fractional, as in Megatron-LM."""
    optimizer = config.optimizer
    if optimizer.lr_warmup_fraction is not None:
        return optimizer.lr_warmup_fraction * lr_decay_samples(config, world_size)
    if config.training.train_iters is None:
        return optimizer.lr_warmup_samples
    return optimizer.lr_warmup_iters * global_batch_size(config, world_size)


def lr_wsd_decay_samples(config: RunConfig, world_size: int) -> Optional[int]:
    """Samples of the final decay of WSD; None if not given."""
    if config.training.train_iters is None:
        return config.optimizer.lr_wsd_decay_samples
    steps = config.optimizer.lr_wsd_decay_iters
    return None if steps is None else steps * global_batch_size(config, world_size)


def weight_decay_samples(config: RunConfig, world_size: int) -> int:
    """Samples over which weight decay changes from its start to its end value: those of the run."""
    return train_samples(config, world_size)


def weight_decay_range(optimizer: OptimizerConfig) -> tuple[float, float]:
    """Weight decay at the start and at the end of the run."""
    if optimizer.weight_decay_incr_style == "constant":
        return optimizer.weight_decay, optimizer.weight_decay
    assert optimizer.start_weight_decay is not None and optimizer.end_weight_decay is not None
    return optimizer.start_weight_decay, optimizer.end_weight_decay


# ---- model --------------------------------------------------------------------------------------------------------


def ffn_hidden_size(model: ModelConfig) -> int:
    """Width of the MLP: by default 4 x hidden size; with SwiGLU 2/3 of that, rounded down to a multiple of 64."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    assert model.hidden_size is not None
    if model.swiglu:
        return int((4 * model.hidden_size * 2 / 3) / 64) * 64
    return 4 * model.hidden_size


def kv_channels(model: ModelConfig) -> int:
    """Width of one attention head."""
    if model.kv_channels is not None:
        return model.kv_channels
    assert model.hidden_size is not None and model.num_attention_heads is not None
    return model.hidden_size // model.num_attention_heads


def num_query_groups(model: ModelConfig) -> int:
    """Key/value heads: one per query head without grouped-query attention."""
    assert model.num_attention_heads is not None
    return model.num_query_groups if model.group_query_attention else model.num_attention_heads


def query_projection_size(model: ModelConfig) -> int:
    """Channels of all query heads, which is the width of the output of attention."""
    assert model.num_attention_heads is not None
    return kv_channels(model) * model.num_attention_heads


def kv_projection_size(model: ModelConfig) -> int:
    """Channels of all key heads, which is also that of all value heads."""
    return kv_channels(model) * num_query_groups(model)


def gemm_alignment(precision: PrecisionConfig) -> int:
    """Every dimension of a quantized GEMM must be a multiple of this; 1 in high precision."""
    return max((recipe.gemm_alignment for recipe in used_recipes(precision)), default=1)


def used_recipes(precision: PrecisionConfig) -> tuple[Recipe, ...]:
    """The recipes of a run, each once."""
    return tuple(registry.get(name) for name in precision_map.used_recipes(precision))


def is_stateful(precision: PrecisionConfig) -> bool:
    """Whether any recipe of the run keeps an amax history (delayed scaling)."""
    return any(recipe.is_stateful for recipe in used_recipes(precision))


def quantization_recipe(precision: PrecisionConfig) -> Optional[str]:
    """Name of the recipe of the linears of layers without a precision map; None in high precision."""
    return precision_map.base_choice(precision).fprop.recipe


def log_layer_patterns(logging: LoggingConfig) -> tuple[str, ...]:
    """Patterns of the linears with quantization statistics (--fp8-log-layers)."""
    return tuple(part.strip() for part in logging.fp8_log_layers.split(",") if part.strip())


def what_if_recipes(logging: LoggingConfig) -> tuple[str, ...]:
    """Recipes for which quantization statistics are simulated (--fp8-what-if)."""
    return tuple(part.strip() for part in (logging.fp8_what_if or "").split(",") if part.strip())


def recipe_flag(precision: PrecisionConfig) -> str:
    """The flag of `quantization_recipe`, for example `--fp8-recipe mxfp8`. For runs that have a recipe."""
    return f"--{'fp4' if precision.fp8_format is None else 'fp8'}-recipe {quantization_recipe(precision)}"


def tokenizer_type(data: DataConfig) -> Optional[str]:
    """The tokenizer. Megatron-LM's GPT scripts give the files of GPT-2's tokenizer without its type."""
    if data.tokenizer_type is None and (data.vocab_file is not None or data.merge_file is not None):
        return "GPT2BPETokenizer"
    return data.tokenizer_type


def vocabulary_size(config: RunConfig, tokenizer_size: int) -> int:
    """Size of the vocabulary before padding: `--vocab-size` if given, otherwise the tokenizer's.

    NullTokenizer adds its end-of-document id after the `--vocab-size` ids, as Megatron-LM's does.

    Raises:
        ConfigError: the tokenizer has more ids than `--vocab-size`.
    """
    requested = config.model.vocab_size
    if requested is None or config.data.tokenizer_type == "NullTokenizer":
        return tokenizer_size
    if tokenizer_size > requested:
        raise ConfigError(
            f"--vocab-size {requested} (from the flag or the preset) is less than the tokenizer's {tokenizer_size} "
            f"ids; use --vocab-size {tokenizer_size}"
        )
    return requested


def padded_vocab_size(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding and of the output layer: `vocab_size` rounded up to `vocab_multiple`."""
    return round_up(vocab_size, vocab_multiple(config))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def vocab_multiple(config: RunConfig) -> int:
    """The vocabulary is padded to a multiple of this.

    As in Megatron-LM it is a multiple of --make-vocab-size-divisible-by x tensor-parallel size. In addition, the rows
    of each rank are a multiple of the recipe's GEMM alignment, so that the output layer can be quantized.
    """
    per_rank = math.lcm(config.model.make_vocab_size_divisible_by, gemm_alignment(config.precision))
    return per_rank * config.parallel.tensor_model_parallel_size


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


# ---- optimizer ----------------------------------------------------------------------------------------------------


def fused_adam_obstacle(config: RunConfig) -> Optional[str]:
    """The setting that prevents the one-pass optimizer; None if it can be used."""
    settings, precision = config.optimizer, config.precision
    obstacles = (
        (not settings.one_pass_optimizer, "--no-one-pass-optimizer"),
        (settings.optimizer != "adam", f"--optimizer {settings.optimizer}"),
        (not config.parallel.use_distributed_optimizer, "no --use-distributed-optimizer"),
        (precision.fp16, "--fp16"),
        (settings.loss_scale is not None, f"--loss-scale {settings.loss_scale}"),
        (settings.main_params_dtype != "fp32", f"--main-params-dtype {settings.main_params_dtype}"),
        (
            settings.use_precision_aware_optimizer
            and precision.fp8_param_gather
            and registry.get(precision.fp8_recipe).is_stateful,
            "--use-precision-aware-optimizer with --fp8-param-gather under delayed scaling, which keeps no FP32 "
            "master weights",
        ),
    )
    return next((text for is_there, text in obstacles if is_there), None)


# ---- CUDA graphs --------------------------------------------------------------------------------------------------


def uses_cuda_graph(config: RunConfig) -> bool:
    """Whether the forward-backward of a step is launched as a CUDA graph; false while that is automatic."""
    return config.training.cuda_graph_impl == "local"


# ---- recomputation ------------------------------------------------------------------------------------------------


def recompute_granularity(training: TrainingConfig) -> Optional[str]:
    """`full`, `selective` or None; --recompute-activations is short for selective."""
    if training.recompute_granularity is None and training.recompute_activations:
        return "selective"
    return training.recompute_granularity


def recompute_modules(training: TrainingConfig) -> tuple[str, ...]:
    """The modules of selective recompute; empty without it."""
    if recompute_granularity(training) != "selective":
        return ()
    return training.recompute_modules or ("core_attn",)
