"""Settings of the model and of parallelism."""

from dataclasses import dataclass
from typing import ClassVar, Optional

from megafp8.config.schema.moe import MAX_WIDTH, MixtureModelConfig, MixtureParallelConfig
from megafp8.config.schema.setting import (
    AT_LEAST_1,
    COEFFICIENT,
    COMMON,
    DEPRECATED,
    FRACTION_ABOVE_0,
    FRACTION_BELOW_1,
    MODEL,
    OWN,
    POSITIVE_LIMIT,
    Range,
    Role,
    setting,
)

# A table: default and help of each setting, then what else is known about it.
# fmt: off

# ---- Settings of multi-token prediction: a base class of the section `model`, as those of mixtures are --------------

MAX_DEPTHS = 64


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig:
    """Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2)."""

    GROUP: ClassVar[str] = "multi-token prediction"

    mtp_num_layers: Optional[int] = setting(
        None, "layers after the model, of which each predicts one token further",
        maximum=MAX_DEPTHS, range=AT_LEAST_1, unset="none", unit="layers",
    )
    mtp_loss_scaling_factor: float = setting(
        0.1, "factor of the mean of the layers' losses, which is added to the loss",
        range=COEFFICIENT, requires="--mtp-num-layers", role=Role.LEARNING | Role.MEMORY,
    )


# ---- Settings of multi-latent attention: a base class of the section `model`, as those of mixtures are --------------

MAX_CHANNELS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-latent attention (DeepSeek-AI 2024, DeepSeek-V2)."""

    GROUP: ClassVar[str] = "latent attention"

    multi_latent_attention: bool = setting(
        False, "use multi-latent attention: queries, keys and values from low-rank projections of the hidden states"
    )
    q_lora_rank: Optional[int] = setting(
        None, "width of the compressed queries",
        maximum=MAX_CHANNELS, range=AT_LEAST_1, requires="--multi-latent-attention", unset="not compressed",
    )
    kv_lora_rank: int = setting(
        32, "width of the compressed keys and values",
        maximum=MAX_CHANNELS, range=AT_LEAST_1, requires="--multi-latent-attention",
    )
    qk_head_dim: int = setting(
        128, "channels without rotary embedding of a query or key head",
        maximum=MAX_CHANNELS, range=AT_LEAST_1, requires="--multi-latent-attention",
    )
    qk_pos_emb_head_dim: int = setting(
        64, "channels with rotary embedding of a query or key head",
        maximum=MAX_CHANNELS, range=AT_LEAST_1, requires="--multi-latent-attention",
    )
    v_head_dim: int = setting(
        128, "channels of a value head",
        maximum=MAX_CHANNELS, range=AT_LEAST_1, requires="--multi-latent-attention",
    )
    rope_type: Optional[str] = setting(
        None, "rotary embedding of multi-latent attention", choices=("rope", "yarn"), unset="yarn"
    )


# ---- Settings of the maximal update parametrization: a base class of the section `model`, as those of mixtures are --


@dataclass(frozen=True, kw_only=True)
class MupConfig:
    """Maximal update parametrization (Yang et al. 2022, Tensor Programs V). `config/mup.py` has what follows."""

    GROUP: ClassVar[str] = "mup"

    use_mup: bool = setting(
        False, "scale initial weights, learning rates, attention and logits with the width, so that the settings of a "
        "narrow model fit a wide one"
    )
    mup_base_hidden_size: Optional[int] = setting(
        None, "hidden size of the model whose settings are used",
        maximum=MAX_WIDTH, range=AT_LEAST_1, needs="--use-mup", unset="--hidden-size",
    )
    mup_embedding_mult: float = setting(
        1.0, "multiply the output of the embedding by this", range=POSITIVE_LIMIT, needs="--use-mup"
    )
    mup_output_mult: float = setting(
        1.0, "multiply the logits by this; 1 stands for base hidden size / hidden size",
        range=POSITIVE_LIMIT, needs="--use-mup",
    )
    mup_base_head_dim: Optional[float] = setting(
        None, "multiply Q*K by the square root of this; the channels per head of the model whose settings are used",
        range=POSITIVE_LIMIT, needs="--use-mup", unset="1",
    )
    mup_attn_scale_power: float = setting(
        1.0, "divide Q*K by the channels per head to this power; 0.5 is the usual attention",
        range=Range(0, 10), needs="--use-mup",
    )


# ----------------------------------------------------------------------------------------------------------------------

# Far above any real model. Below these limits a table of the layers fits in memory and tensor sizes fit an int64.
MAX_HEADS = 1 << 16
INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig(MultiTokenConfig, LatentAttentionConfig, MupConfig, MixtureModelConfig):
    """The shape of the GPT."""

    ROLE: ClassVar[Role] = MODEL

    model_preset: Optional[str] = setting(
        None, "named model shape (see --list-presets); other flags override its values",
        role=Role.MEMORY, metavar="NAME", audience=COMMON, megatron=OWN,
    )
    num_layers: Optional[int] = setting(
        None, "number of transformer layers", maximum=10_000, range=AT_LEAST_1, unit="layers", audience=COMMON
    )
    hidden_size: Optional[int] = setting(
        None, "hidden size; the width of the residual stream", maximum=MAX_WIDTH, range=AT_LEAST_1, audience=COMMON
    )
    ffn_hidden_size: Optional[int] = setting(
        None, "hidden size of the MLP",
        maximum=MAX_WIDTH, range=AT_LEAST_1,
        unset="4 x hidden size, with --swiglu 8/3 x hidden size rounded to a multiple of 64",
    )
    num_attention_heads: Optional[int] = setting(
        None, "number of attention (query) heads", maximum=MAX_HEADS, range=AT_LEAST_1, audience=COMMON
    )
    kv_channels: Optional[int] = setting(
        None, "channels per attention head", maximum=MAX_WIDTH, range=AT_LEAST_1, unset="hidden size / number of heads"
    )
    group_query_attention: bool = setting(
        False, "use grouped-query attention (see --num-query-groups)", role=Role.LEARNING | Role.MEMORY
    )
    num_query_groups: int = setting(
        1, "number of key-value heads with --group-query-attention", maximum=MAX_HEADS, range=AT_LEAST_1
    )
    max_position_embeddings: Optional[int] = setting(
        None, "maximum sequence length of the position embeddings; must be at least --seq-length",
        maximum=INT32_MAX, range=AT_LEAST_1, unit="tokens",
    )
    position_embedding_type: str = setting(
        "learned_absolute", "position embeddings", choices=("learned_absolute", "rope", "yarn", "none")
    )
    add_position_embedding: bool = setting(
        True, "add learned position embeddings; only with other or no position embeddings",
        off=("--no-position-embedding",), role=Role.FUNCTION | Role.LEARNING | Role.MEMORY,
    )
    rotary_base: float = setting(
        10000, "base of the rotary embedding's frequencies",
        needs="--position-embedding-type rope", range=Range(1, 1e12), group="rotary embedding",
    )
    rotary_base_local: Optional[int] = setting(
        None, "base of the rotary embedding in layers with a sliding window, as in Gemma 3",
        range=AT_LEAST_1, unset="--rotary-base", megatron=OWN, group="rotary embedding",
    )
    rotary_percent: float = setting(
        1.0, "fraction of each head's channels with rotary embedding",
        needs="--position-embedding-type rope", range=FRACTION_ABOVE_0, group="rotary embedding",
    )
    rotary_interleaved: bool = setting(
        False, "rotate pairs of adjacent channels instead of pairs from the two halves of a head",
        needs="--position-embedding-type rope", group="rotary embedding",
    )
    rotary_seq_len_interpolation_factor: Optional[int] = setting(
        None, "linear interpolation factor for rotary positions",
        needs="--position-embedding-type rope", range=AT_LEAST_1, group="rotary embedding",
    )
    use_rope_scaling: bool = setting(
        False, "scale rotary frequencies as in Llama 3.1", requires="--position-embedding-type rope",
        group="rotary embedding",
    )
    rope_scaling_factor: float = setting(
        8.0, "scaling factor for --use-rope-scaling", range=POSITIVE_LIMIT, requires="--use-rope-scaling",
        group="rotary embedding",
    )
    rotary_scaling_factor: float = setting(
        1.0, "YaRN: factor by which the context is extended", range=Range(1, 1e12), group="rotary embedding"
    )
    mscale: float = setting(
        1.0, "YaRN: coefficient of the scaling of attention, in its numerator", range=COEFFICIENT,
        group="rotary embedding",
    )
    mscale_all_dim: float = setting(
        0.0, "YaRN: coefficient of the scaling of attention, in its denominator", range=COEFFICIENT,
        group="rotary embedding",
    )
    yarn_original_max_position_embeddings: Optional[int] = setting(
        None, "YaRN: context length before the extension", maximum=INT32_MAX, range=AT_LEAST_1, unit="tokens",
        group="rotary embedding",
    )
    yarn_beta_fast: float = setting(
        32.0, "YaRN: rotations above which frequencies are kept", range=POSITIVE_LIMIT, group="rotary embedding"
    )
    yarn_beta_slow: float = setting(
        1.0, "YaRN: rotations below which frequencies are interpolated", range=POSITIVE_LIMIT, group="rotary embedding"
    )
    yarn_correction_range_round_to_int: bool = setting(
        True, "round the channels between both to integers (YaRN)",
        flags=("--yarn-correction-range-round-to-int",), off=("--no-yarn-correction-range-round-to-int",),
        group="rotary embedding",
    )
    no_rope_freq: Optional[str] = setting(
        None, "layers without rotary embedding: N for every N-th layer, or a list with 1 for these, like ([0]*3+[1])*4",
        metavar="PATTERN", group="rotary embedding",
    )
    normalization: str = setting("LayerNorm", "normalization layer", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(1e-5, "epsilon of the normalization", range=FRACTION_ABOVE_0)
    apply_layernorm_1p: bool = setting(False, "store norm weights as weight - 1 (initialized to 0 instead of 1)")
    swiglu: bool = setting(False, "use SwiGLU instead of GELU in the MLP")
    geglu: bool = setting(False, "use a gated GELU (tanh approximation) in the MLP", megatron=OWN)
    squared_relu: bool = setting(False, "use squared ReLU instead of GELU in the MLP")
    openai_gelu: bool = setting(False, "use the tanh approximation of GELU, as GPT-2")
    quick_geglu: bool = setting(False, "use a gated unit with x sigmoid(1.702 x) instead of GELU in the MLP (gpt-oss)")
    activation_func_clamp_value: Optional[float] = setting(
        None, "limit of the inputs of --quick-geglu or --swiglu: the gate's from above, the other half's on both sides",
        range=POSITIVE_LIMIT,
    )
    glu_linear_offset: float = setting(
        0.0, "added to the half that the gate of --quick-geglu or --swiglu multiplies", range=Range(-1e12, 1e12)
    )
    add_bias_linear: bool = setting(True, "add a bias to linear layers", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, "add a bias to the QKV projection only")
    qk_layernorm: bool = setting(False, "apply the normalization layer to queries and keys")
    qk_l2_norm: bool = setting(False, "divide queries and keys by their root mean square (Llama 4)")
    qk_layernorm_across_heads: bool = setting(
        False, "with --qk-layernorm: normalize the channels of all heads together, as in OLMo 2, instead of each head",
        megatron=OWN,
    )
    norm_placement: str = setting(
        "pre", "norms of attention and MLP: pre (on their inputs), post (on their outputs, before the residual is "
        "added, as in OLMo 2) or sandwich (on both, as in Gemma 2)",
        choices=("pre", "post", "sandwich"), megatron=OWN,
    )
    parallel_residual: bool = setting(
        False, "add attention and MLP of the same input to the residual stream, as in GPT-NeoX", megatron=OWN
    )
    embedding_multiplier: float = setting(
        1.0, "multiply the output of the embedding by this", range=POSITIVE_LIMIT, megatron=OWN
    )
    residual_multiplier: float = setting(
        1.0, "multiply the outputs of attention and MLP by this, before they are added",
        range=POSITIVE_LIMIT, megatron=OWN,
    )
    softmax_scale: Optional[float] = setting(
        None, "multiply Q*K by this before the softmax",
        range=POSITIVE_LIMIT, unset="1 / sqrt(channels per head)", megatron=OWN,
    )
    logits_scaling: float = setting(1.0, "divide the logits by this", range=POSITIVE_LIMIT, megatron=OWN)
    share_embeddings_and_output_weights: bool = setting(
        True, "share the weights of the embedding and the output layer", off=("--untie-embeddings-and-output-weights",)
    )
    vocab_size: Optional[int] = setting(
        None, "vocabulary size before padding",
        maximum=INT32_MAX, range=AT_LEAST_1, role=Role.WEIGHTS | Role.SAMPLES | Role.MEMORY,
        unset="that of the tokenizer",
    )
    make_vocab_size_divisible_by: int = setting(
        128, "pad the vocabulary to a multiple of this x tensor-parallel size",
        maximum=INT32_MAX, range=AT_LEAST_1, role=Role.LEARNING | Role.MEMORY,
        megatron="does not pad further for the alignment that FP8 needs",
    )
    padded_vocab_size: Optional[int] = setting(
        None, "rows of the embedding, instead of the vocabulary size after padding",
        maximum=INT32_MAX, range=AT_LEAST_1, role=Role.FUNCTION | Role.MEMORY,
    )
    attention_dropout: float = setting(
        0.1, "dropout probability of attention weights", range=FRACTION_BELOW_1, role=Role.LEARNING | Role.MEMORY
    )
    hidden_dropout: float = setting(
        0.1, "dropout probability of hidden states", range=FRACTION_BELOW_1, role=Role.LEARNING | Role.MEMORY
    )
    init_method_std: float = setting(
        0.02, "standard deviation of the initial weights", range=COEFFICIENT, role=Role.MEMORY
    )
    embedding_init_method_std: Optional[float] = setting(
        None, "standard deviation of the initial embeddings",
        range=COEFFICIENT, role=Role.MEMORY, unset="--init-method-std",
    )
    attention_softmax_in_fp32: bool = setting(
        True, "compute the attention softmax in FP32",
        flags=("--attention-softmax-in-fp32",), role=Role.LEARNING | Role.MEMORY,
        megatron="off by default; here always on",
    )
    apply_query_key_layer_scaling: bool = setting(
        False, "scale Q*K by 1 / layer number (implies FP32 softmax)", role=Role.LEARNING | Role.MEMORY
    )
    window_size: Optional[str] = setting(
        None, "sliding attention window: each token attends to itself and to LEFT tokens before it; RIGHT is 0, as "
        "attention is causal",
        metavar="LEFT,RIGHT",
    )
    window_attn_skip_freq: Optional[str] = setting(
        None, "layers with full attention beside --window-size: N for every N-th layer, or a list with 1 for windows, "
        "like ([1]*3+[0])*4",
        metavar="PATTERN", requires="--window-size",
    )
    softmax_type: str = setting(
        "vanilla", "attention softmax; off-by-one adds 1 to its denominator, learnable adds exp of a parameter of each "
        "head",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    attention_logit_softcapping: Optional[float] = setting(
        None, "cap attention scores softly: x becomes C tanh(x / C) (Gemma 2)",
        metavar="C", range=POSITIVE_LIMIT, megatron=OWN,
    )
    output_logit_softcapping: Optional[float] = setting(
        None, "cap the output logits softly: x becomes C tanh(x / C) (Gemma 2)",
        metavar="C", range=POSITIVE_LIMIT, megatron=OWN,
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(MixtureParallelConfig):
    """How the work is split over ranks. world = tensor x pipeline x context x data."""

    ROLE: ClassVar[Role] = Role.MEMORY

    tensor_model_parallel_size: int = setting(
        1, "tensor-parallel ranks; they split each layer's weight matrices",
        range=AT_LEAST_1, role=Role.CARRIED | Role.MEMORY, unit="ranks", audience=COMMON,
    )
    pipeline_model_parallel_size: int = setting(
        1, "pipeline-parallel ranks; they split the sequence of layers",
        range=AT_LEAST_1, role=Role.CARRIED | Role.MEMORY, unit="ranks", audience=COMMON,
    )
    num_layers_per_virtual_pipeline_stage: Optional[int] = setting(
        None, "layers per virtual pipeline stage (interleaved schedule)",
        range=AT_LEAST_1, role=Role.CARRIED | Role.MEMORY, unit="layers",
    )
    num_virtual_stages_per_pipeline_rank: Optional[int] = setting(
        None, "virtual pipeline stages per pipeline rank (interleaved schedule)",
        range=AT_LEAST_1, role=Role.CARRIED | Role.MEMORY,
    )
    decoder_first_pipeline_num_layers: Optional[int] = setting(
        None, "layers of the first pipeline stage", range=AT_LEAST_1, unset="as many as other stages", unit="layers"
    )
    decoder_last_pipeline_num_layers: Optional[int] = setting(
        None, "layers of the last pipeline stage", range=AT_LEAST_1, unset="as many as other stages", unit="layers"
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "count the embedding as one layer when layers are split over pipeline stages"
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "count the output layer and the loss as one layer when layers are split over pipeline stages"
    )
    pipeline_model_parallel_layout: Optional[str] = setting(
        None, "contents of every (virtual) pipeline stage, separated by |; E: embedding, t: a layer, L: output layer "
        "and loss, x*N or (...)*N: N times; for example Et*3|(tt|)*6tL",
        metavar="STRING",
    )
    microbatch_group_size_per_virtual_pipeline_stage: Optional[int] = setting(
        None, "consecutive microbatches of a virtual pipeline stage",
        range=AT_LEAST_1, unset="number of pipeline-parallel ranks",
    )
    use_tp_pp_dp_mapping: bool = setting(
        False, "order ranks by tensor, context, pipeline, data instead of tensor, context, data, pipeline"
    )
    pipeline_model_parallel_comm_backend: Optional[str] = setting(
        None, "communication backend between pipeline stages",
        choices=("nccl", "ucc"), unset="that of the other collectives",
    )
    context_parallel_size: int = setting(
        1, "context-parallel ranks; they split each sequence",
        range=AT_LEAST_1, unit="ranks", audience=COMMON,
    )
    cp_comm_type: str = setting(
        "p2p", "communication of context-parallel attention in Transformer Engine",
        choices=("p2p", "a2a", "allgather", "a2a+p2p"),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = setting(
        (), "group sizes of --cp-comm-type a2a+p2p, from the innermost: ranks of the all-to-all, then of the ring; "
        "their product is --context-parallel-size",
        many=True,
    )
    sequence_parallel: bool = setting(
        False, "split norms and dropout over the tensor-parallel ranks; each has a part of the sequence",
        audience=COMMON,
    )
    use_distributed_optimizer: Optional[bool] = setting(
        None, "shard optimizer state over data-parallel ranks, by complete weights where the optimizer needs them",
        flags=("--use-distributed-optimizer",), off=("--no-use-distributed-optimizer",),
        role=Role.MEMORY | Role.AUTOMATIC, unset="on with --optimizer adam on GPUs", megatron="off by default",
    )
    use_torch_fsdp2: bool = setting(
        False, "shard all state over data-parallel ranks with torch's FSDP2; weights, gradients and optimizer state",
        audience=COMMON,
    )
    num_distributed_optimizer_instances: int = setting(
        1, "number of replicas of --use-torch-fsdp2, each sharded over consecutive data-parallel ranks (hybrid "
        "sharding); without it all data-parallel ranks share one state",
        range=AT_LEAST_1,
    )
    torch_fsdp2_reshard_after_forward: bool = setting(
        True, "free the gathered weights of a layer after its forward pass, and gather them again for its backward "
        "pass",
        off=("--torch-fsdp2-no-reshard-after-forward",), requires="--use-torch-fsdp2",
    )
    overlap_grad_reduce: Optional[bool] = setting(
        None, "overlap gradient reduction with the backward pass",
        flags=("--overlap-grad-reduce",), off=("--no-overlap-grad-reduce",), role=Role.MEMORY | Role.AUTOMATIC,
        unset="on with the distributed optimizer on GPUs", megatron="off by default",
    )
    overlap_param_gather: Optional[bool] = setting(
        None, "overlap the parameter all-gather with the forward pass",
        flags=("--overlap-param-gather",), off=("--no-overlap-param-gather",), role=Role.MEMORY | Role.AUTOMATIC,
        unset="on with --overlap-grad-reduce", megatron="off by default",
    )
    use_nccl_ub: Optional[bool] = setting(
        None, "keep weights and gradients in memory registered with NCCL, which then gathers weights with copy engines",
        flags=("--use-nccl-ub",), off=("--no-use-nccl-ub",), role=Role.MEMORY | Role.AUTOMATIC,
        unset="on with --overlap-param-gather on GPUs", megatron="off by default",
    )
    overlap_p2p_comm: bool = setting(
        True, "overlap pipeline communication with computation (interleaved schedule)",
        off=("--no-overlap-p2p-communication",),
    )
    overlap_p2p_comm_warmup_flush: bool = setting(
        False, "overlap pipeline communication in warmup and flush, too (interleaved schedule)",
        flags=("--overlap-p2p-communication-warmup-flush",),
    )
    tp_comm_overlap: bool = setting(
        False, "overlap tensor-parallel communication with GEMMs (Transformer Engine's user buffers)"
    )
    tp_comm_overlap_cfg: Optional[str] = setting(
        None, "YAML file that configures the overlap per GEMM (Transformer Engine's `ub_cfgs`)",
        metavar="FILE", path=True, needs="--tp-comm-overlap",
    )
    tp_comm_overlap_ag: bool = setting(
        True, "overlap all-gathers", off=("--disable-tp-comm-overlap-ag",), needs="--tp-comm-overlap"
    )
    tp_comm_overlap_rs: bool = setting(
        True, "overlap reduce-scatters", off=("--disable-tp-comm-overlap-rs",), needs="--tp-comm-overlap"
    )
    tp_comm_overlap_rs_dgrad: bool = setting(
        False, "overlap reduce-scatters with the dgrad GEMM instead of wgrad", needs="--tp-comm-overlap"
    )
    tp_comm_bulk_dgrad: bool = setting(
        True, "overlap the all-gather of inputs with the complete dgrad GEMM",
        off=("--disable-tp-comm-bulk-dgrad",), needs="--tp-comm-overlap",
    )
    tp_comm_bulk_wgrad: bool = setting(
        True, "overlap the reduce-scatter with the complete wgrad GEMM",
        off=("--disable-tp-comm-bulk-wgrad",), needs="--tp-comm-overlap",
    )
    tp_comm_bootstrap_backend: str = setting(
        "nccl", "communication backend for the setup of user buffers",
        choices=("nccl", "gloo", "mpi"), needs="--tp-comm-overlap",
    )
    ddp_bucket_size: Optional[int] = setting(
        None, "parameters per gradient bucket", range=AT_LEAST_1, unset="megatron-core's", unit="parameters"
    )
    ddp_average_in_collective: bool = setting(
        False, "no effect: gradients are always averaged over the tokens of the global batch",
        audience=DEPRECATED, megatron="averages in the collective; here without effect",
    )
    distributed_backend: Optional[str] = setting(
        None, "backend of collectives",
        choices=("nccl", "gloo"), unset="nccl on GPUs, gloo on CPUs", megatron="the default is nccl",
    )
    distributed_timeout_minutes: int = setting(
        10, "timeout of collectives, in minutes",
        range=AT_LEAST_1, role=Role.OUTPUT, unit="minutes", group="reliability",
    )
    rendezvous_timeout_s: float = setting(
        300.0, "timeout for all ranks to connect at startup, in seconds; the error lists the missing ranks",
        range=POSITIVE_LIMIT, role=Role.OUTPUT, unit="seconds", group="reliability", megatron=OWN,
    )

    # How data-parallel ranks share the model: what depends on it asks these, and not the flags.

    @property
    def shards_weights(self) -> bool:
        """Whether a rank has only rows: it gathers weights and reduces gradients in every microbatch, in no buffers."""
        return self.use_torch_fsdp2

    @property
    def shards_optimizer(self) -> Optional[bool]:
        """Whether a rank has a part of the optimizer state; None where that is not chosen yet."""
        return self.use_torch_fsdp2 or self.use_distributed_optimizer

    @property
    def num_replicas(self) -> int:
        """Groups of ranks over which all of this is sharded: several with hybrid sharding."""
        return self.num_distributed_optimizer_instances if self.use_torch_fsdp2 else 1

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered weights are kept from the forward to the backward pass."""
        return self.use_torch_fsdp2 and not self.torch_fsdp2_reshard_after_forward
