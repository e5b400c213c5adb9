"""What follows from the settings: pure functions from a RunConfig (and a world size) to a number or a name.

Meaning and arithmetic are Megatron-LM's (`validate_args`, `get_optimizer_param_scheduler`) wherever it has them.
Functions assume that the settings they read are there and fit each other; `rules.py` makes sure of that first.
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
    """Ranks that hold one copy of the model and share one batch: tensor x pipeline x context."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Copies of the model that read different data: world / (tensor x pipeline x context).

    Raises:
        ConfigError: the world size is not a multiple.
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
    """Model chunks per pipeline rank of the interleaved schedule; None without it (also for one chunk)."""
    parallel = config.parallel
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        chunks = layers_per_pipeline_rank(config) // parallel.num_layers_per_virtual_pipeline_stage
    return chunks if chunks is not None and chunks > 1 else None


def layers_per_pipeline_rank(config: RunConfig) -> int:
    """Transformer layers on one pipeline rank, all its chunks together."""
    assert config.model.num_layers is not None
    return config.model.num_layers // config.parallel.pipeline_model_parallel_size


# ---- batch and length ---------------------------------------------------------------------------------------------


def global_batch_size(config: RunConfig, world_size: int) -> int:
    """Sequences in one optimizer step; without the flag, one micro batch on each data-parallel rank."""
    if config.training.global_batch_size is not None:
        return config.training.global_batch_size
    assert config.training.micro_batch_size is not None
    return config.training.micro_batch_size * data_parallel_size(config, world_size)


def useful_threads(config: RunConfig) -> int:
    """The most CPU threads that make a rank's work faster: one for every 2^16 elements of an activation [T, H].

    torch divides an elementwise operation into pieces of 2^15 elements at least. Below two of them a thread, a second
    thread saves no time and costs as much CPU time as the first, because it waits by spinning (notes/LOG.md).
    """
    parallel = config.parallel
    length = config.data.seq_length or config.model.max_position_embeddings or 1  # an imported model has no settings
    num_tokens = (config.training.micro_batch_size or 1) * length // parallel.context_parallel_size
    num_elements = num_tokens * config.model.hidden_size // parallel.tensor_model_parallel_size
    return max(1, num_elements // ELEMENTS_PER_THREAD)


def num_microbatches(config: RunConfig, world_size: int) -> int:
    """Forward passes of one data-parallel rank in one optimizer step.

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
    """Tokens in one optimizer step over all ranks."""
    assert config.data.seq_length is not None
    return global_batch_size(config, world_size) * config.data.seq_length


def train_iters(config: RunConfig, world_size: int) -> int:
    """Optimizer steps of the whole run; with --train-samples, the full global batches in them."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None
    return config.training.train_samples // global_batch_size(config, world_size)


def train_samples(config: RunConfig, world_size: int) -> int:
    """Sequences of the whole run; with --train-samples exactly those, though the last batch may not fill."""
    if config.training.train_iters is None and config.training.train_samples is not None:
        return config.training.train_samples
    return train_iters(config, world_size) * global_batch_size(config, world_size)


def dataset_samples(config: RunConfig, world_size: int) -> tuple[int, int, int]:
    """Sequences that the run will read for (training, validation, test).

    Every validation reads the same samples, so that their losses compare, within a run and between runs.
    """
    held_out = config.training.eval_iters * global_batch_size(config, world_size)
    return train_samples(config, world_size), held_out, held_out


def split(config: RunConfig) -> Optional[str]:
    """Train, validation and test parts, for example `969,30,1`; None when each has shards of its own."""
    data = config.data
    if data.train_data_path or data.valid_data_path or data.test_data_path:
        return None
    return data.split if data.split is not None else DEFAULT_SPLIT


def split_shares(text: str) -> tuple[float, ...]:
    """The numbers of a split. Quotes around it are dropped: Megatron-LM's own Llama script passes them on.

    Raises:
        ValueError: not one to three plain numbers (megatron-core reads no exponents) with a sum above 0.
    """
    parts = [part.strip() for part in text.strip("'\"").split(",")]
    shares = tuple(float(part) for part in parts if re.fullmatch(r"\d+(\.\d*)?|\.\d+", part))
    if len(shares) < len(parts) or len(shares) > 3 or not sum(shares):
        raise ValueError(text)
    return shares


# ---- learning-rate schedule, counted in samples -------------------------------------------------------------------


def lr_decay_samples(config: RunConfig, world_size: int) -> int:
    """Samples at which the schedule ends; default the whole run."""
    optimizer = config.optimizer
    if config.training.train_iters is None:
        return optimizer.lr_decay_samples or train_samples(config, world_size)
    steps = optimizer.lr_decay_iters if optimizer.lr_decay_iters is not None else config.training.train_iters
    return steps * global_batch_size(config, world_size)


def lr_warmup_samples(config: RunConfig, world_size: int) -> float:
    """Samples of linear warm-up. With --lr-warmup-fraction it may be no whole number, as in Megatron."""
    optimizer = config.optimizer
    if optimizer.lr_warmup_fraction is not None:
        return optimizer.lr_warmup_fraction * lr_decay_samples(config, world_size)
    if config.training.train_iters is None:
        return optimizer.lr_warmup_samples
    return optimizer.lr_warmup_iters * global_batch_size(config, world_size)


def lr_wsd_decay_samples(config: RunConfig, world_size: int) -> Optional[int]:
    """Samples of WSD's final decay; None when not given."""
    if config.training.train_iters is None:
        return config.optimizer.lr_wsd_decay_samples
    steps = config.optimizer.lr_wsd_decay_iters
    return None if steps is None else steps * global_batch_size(config, world_size)


def weight_decay_samples(config: RunConfig, world_size: int) -> int:
    """Samples over which weight decay goes from its start to its end value: the whole run."""
    return train_samples(config, world_size)


def weight_decay_range(optimizer: OptimizerConfig) -> tuple[float, float]:
    """Weight decay at the start and at the end of the run."""
    if optimizer.weight_decay_incr_style == "constant":
        return optimizer.weight_decay, optimizer.weight_decay
    assert optimizer.start_weight_decay is not None and optimizer.end_weight_decay is not None
    return optimizer.start_weight_decay, optimizer.end_weight_decay


# ---- model --------------------------------------------------------------------------------------------------------


def ffn_hidden_size(model: ModelConfig) -> int:
    """Width of the MLP. Default 4 x hidden; with SwiGLU 2/3 of that, rounded down to a multiple of 64."""
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
    """Key/value heads: one per query head unless they are grouped."""
    assert model.num_attention_heads is not None
    return model.num_query_groups if model.group_query_attention else model.num_attention_heads


def query_projection_size(model: ModelConfig) -> int:
    """Channels of all query heads: the width of attention's output."""
    assert model.num_attention_heads is not None
    return kv_channels(model) * model.num_attention_heads


def kv_projection_size(model: ModelConfig) -> int:
    """Channels of all key heads (and as many of all value heads)."""
    return kv_channels(model) * num_query_groups(model)


def gemm_alignment(precision: PrecisionConfig) -> int:
    """What every dimension of a quantized GEMM must be a multiple of; 1 in high precision."""
    return max((registry.get(recipe).gemm_alignment for recipe in precision_map.used_recipes(precision)), default=1)


def used_recipes(precision: PrecisionConfig) -> tuple[Recipe, ...]:
    """The recipes that a run names, each once."""
    return tuple(registry.get(name) for name in precision_map.used_recipes(precision))


def is_stateful(precision: PrecisionConfig) -> bool:
    """Does any of them remember amaxes from step to step?"""
    return any(recipe.is_stateful for recipe in used_recipes(precision))


def quantization_recipe(precision: PrecisionConfig) -> Optional[str]:
    """Name of the FP8 or FP4 recipe of the layers' linears but for a precision map; None in high precision."""
    if precision.fp8_format is not None:
        return precision.fp8_recipe
    return None if precision.fp4_format is None else precision.fp4_recipe


def log_layer_patterns(logging: LoggingConfig) -> tuple[str, ...]:
    """Patterns of the linears whose operands are looked at."""
    return tuple(part.strip() for part in logging.fp8_log_layers.split(",") if part.strip())


def what_if_recipes(logging: LoggingConfig) -> tuple[str, ...]:
    """Recipes that are tried on the operands."""
    return tuple(part.strip() for part in (logging.fp8_what_if or "").split(",") if part.strip())


def recipe_flag(precision: PrecisionConfig) -> str:
    """How the command line chose the recipe: `--fp8-recipe mxfp8`. For a run that has one."""
    return f"--{'fp4' if precision.fp8_format is None else 'fp8'}-recipe {quantization_recipe(precision)}"


def tokenizer_type(data: DataConfig) -> Optional[str]:
    """The tokenizer; GPT-2's files say which one they are for, and Megatron-LM's GPT scripts leave the type out."""
    if data.tokenizer_type is None and (data.vocab_file is not None or data.merge_file is not None):
        return "GPT2BPETokenizer"
    return data.tokenizer_type


def vocabulary_size(config: RunConfig, tokenizer_size: int) -> int:
    """Token ids that the model must know, before padding: `--vocab-size` where given, else the tokenizer's.

    NullTokenizer adds its end-of-document id behind the `--vocab-size` ids, as Megatron's does.

    Raises:
        ConfigError: the tokenizer has ids that the model would not know.
    """
    asked = config.model.vocab_size
    if asked is None or config.data.tokenizer_type == "NullTokenizer":
        return tokenizer_size
    if tokenizer_size > asked:
        raise ConfigError(
            f"--vocab-size {asked} (given, or of the preset) is less than the tokenizer's {tokenizer_size} ids; "
            f"use --vocab-size {tokenizer_size}"
        )
    return asked


def padded_vocab_size(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding and output matrices: `vocab_size` rounded up so that it divides evenly over the ranks.

    Megatron's rule (a multiple of --make-vocab-size-divisible-by x tensor-parallel size), and in FP8 each rank's part
    is a multiple of the recipe's GEMM alignment too, so that the output layer could be quantized.
    """
    multiple = vocab_multiple(config)
    return math.ceil(vocab_size / multiple) * multiple


def vocab_multiple(config: RunConfig) -> int:
    """What the rows of the embedding are padded to a multiple of."""
    per_rank = math.lcm(config.model.make_vocab_size_divisible_by, gemm_alignment(config.precision))
    return per_rank * config.parallel.tensor_model_parallel_size


# ---- number formats -----------------------------------------------------------------------------------------------


def params_dtype(precision: PrecisionConfig) -> str:
    """Format of the weights that the GEMMs read (before FP8): `fp32`, `bf16` or `fp16`."""
    if precision.bf16:
        return "bf16"
    return "fp16" if precision.fp16 else "fp32"


def grad_dtype(precision: PrecisionConfig) -> str:
    """Format of the gradient buffers and of their reduction: `fp32`, `bf16` or `fp16`.

    Megatron turns FP32 on for BF16 weights unless --grad-reduce-in-bf16; FP16 weights reduce in FP16 unless
    --accumulate-allreduce-grads-in-fp32.
    """
    dtype = params_dtype(precision)
    if dtype == "bf16" and precision.grad_reduce_in_bf16:
        return "bf16"
    if dtype == "fp16" and not precision.accumulate_allreduce_grads_in_fp32:
        return "fp16"
    return "fp32"


def softmax_in_fp32(model: ModelConfig) -> bool:
    """Whether attention's softmax runs in FP32; scaling by layer number implies it."""
    return model.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling


# ---- optimizer ----------------------------------------------------------------------------------------------------


def fused_adam_obstacle(config: RunConfig) -> Optional[str]:
    """The setting that keeps a run from the one-pass optimizer; None where none does."""
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
            "--use-precision-aware-optimizer for FP8 weights of delayed scaling, which then have no FP32 masters",
        ),
    )
    return next((text for is_there, text in obstacles if is_there), None)


# ---- graphs -------------------------------------------------------------------------------------------------------


def has_step_graph(config: RunConfig) -> bool:
    """Whether a step's passes are launched as a CUDA graph."""
    return config.training.cuda_graph_impl != "none"


# ---- recomputation ------------------------------------------------------------------------------------------------


def recompute_granularity(training: TrainingConfig) -> Optional[str]:
    """`full`, `selective` or None; --recompute-activations is short for selective."""
    if training.recompute_granularity is None and training.recompute_activations:
        return "selective"
    return training.recompute_granularity


def recompute_modules(training: TrainingConfig) -> tuple[str, ...]:
    """What selective recompute takes; empty when it is off."""
    if recompute_granularity(training) != "selective":
        return ()
    return training.recompute_modules or ("core_attn",)
