"""Settings of the model and of parallelism."""

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting

# Far above any real model. Below these limits a table of the layers fits in memory and tensor sizes fit an int64.
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 16
INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the GPT."""

    model_preset: Optional[str] = setting(
        None, "named model shape; other flags override its values (see --list-presets)"
    )
    num_layers: Optional[int] = setting(None, "number of transformer layers", maximum=10_000)
    hidden_size: Optional[int] = setting(None, "hidden size (width of the residual stream)", maximum=MAX_WIDTH)
    ffn_hidden_size: Optional[int] = setting(
        None,
        "hidden size of the MLP; default 4 x hidden size, with --swiglu 8/3 x hidden size rounded to a multiple of 64",
        maximum=MAX_WIDTH,
    )
    num_attention_heads: Optional[int] = setting(None, "number of attention (query) heads", maximum=MAX_HEADS)
    kv_channels: Optional[int] = setting(
        None, "channels per attention head; default hidden size / number of heads", maximum=MAX_WIDTH
    )
    group_query_attention: bool = setting(False, "use grouped-query attention (see --num-query-groups)")
    num_query_groups: int = setting(1, "number of key-value heads with --group-query-attention", maximum=MAX_HEADS)
    max_position_embeddings: Optional[int] = setting(
        None,
        "maximum sequence length of the position embeddings; must be at least --seq-length",
        maximum=INT32_MAX,
    )
    position_embedding_type: str = setting(
        "learned_absolute", "position embeddings", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = setting(10000, "base of the rotary embedding's frequencies")
    rotary_percent: float = setting(1.0, "fraction of each head's channels with rotary embedding")
    rotary_interleaved: bool = setting(
        False, "rotate pairs of adjacent channels instead of pairs from the two halves of a head"
    )
    rotary_seq_len_interpolation_factor: Optional[int] = setting(
        None, "linear interpolation factor for rotary positions"
    )
    use_rope_scaling: bool = setting(False, "scale rotary frequencies as in Llama 3.1")
    rope_scaling_factor: float = setting(8.0, "scaling factor for --use-rope-scaling")
    normalization: str = setting("LayerNorm", "normalization layer", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(1e-5, "epsilon of the normalization")
    apply_layernorm_1p: bool = setting(False, "store norm weights as weight - 1 (initialized to 0 instead of 1)")
    swiglu: bool = setting(False, "use SwiGLU instead of GELU in the MLP")
    squared_relu: bool = setting(False, "use squared ReLU instead of GELU in the MLP")
    add_bias_linear: bool = setting(True, "add a bias to linear layers", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, "add a bias to the QKV projection only")
    qk_layernorm: bool = setting(False, "apply the normalization layer to queries and keys")
    share_embeddings_and_output_weights: bool = setting(
        True, "share the weights of the embedding and the output layer", off=("--untie-embeddings-and-output-weights",)
    )
    vocab_size: Optional[int] = setting(
        None, "vocabulary size before padding; default: that of the tokenizer", maximum=INT32_MAX
    )
    make_vocab_size_divisible_by: int = setting(
        128, "pad the vocabulary to a multiple of this x tensor-parallel size", maximum=INT32_MAX
    )
    attention_dropout: float = setting(0.1, "dropout probability of attention weights")
    hidden_dropout: float = setting(0.1, "dropout probability of hidden states")
    init_method_std: float = setting(0.02, "standard deviation of the initial weights")
    attention_softmax_in_fp32: bool = setting(
        True, "compute the attention softmax in FP32", flags=("--attention-softmax-in-fp32",)
    )
    apply_query_key_layer_scaling: bool = setting(False, "scale Q*K by 1 / layer number (implies FP32 softmax)")
    window_size: Optional[int] = setting(None, "sliding attention window, in tokens; default: full causal attention")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is split over ranks. world = tensor x pipeline x context x data."""

    tensor_model_parallel_size: int = setting(
        1, "number of tensor-parallel ranks, which split each layer's weight matrices"
    )
    pipeline_model_parallel_size: int = setting(
        1, "number of pipeline-parallel ranks, which split the sequence of layers"
    )
    num_layers_per_virtual_pipeline_stage: Optional[int] = setting(
        None, "layers per virtual pipeline stage (interleaved schedule)"
    )
    num_virtual_stages_per_pipeline_rank: Optional[int] = setting(
        None, "virtual pipeline stages per pipeline rank (interleaved schedule)"
    )
    context_parallel_size: int = setting(1, "number of context-parallel ranks, which split each sequence")
    cp_comm_type: str = setting(
        "p2p", "communication of context-parallel attention in Transformer Engine", choices=("p2p", "a2a", "allgather")
    )
    sequence_parallel: bool = setting(
        False, "split norms and dropout along the sequence over the tensor-parallel ranks"
    )
    use_distributed_optimizer: Optional[bool] = setting(
        None,
        "shard optimizer state over data-parallel ranks; default on GPUs with --optimizer adam",
        flags=("--use-distributed-optimizer",),
        off=("--no-use-distributed-optimizer",),
    )
    overlap_grad_reduce: Optional[bool] = setting(
        None,
        "overlap gradient reduction with the backward pass; default on GPUs with the distributed optimizer",
        flags=("--overlap-grad-reduce",),
        off=("--no-overlap-grad-reduce",),
    )
    overlap_param_gather: Optional[bool] = setting(
        None,
        "overlap the parameter all-gather with the forward pass; default with --overlap-grad-reduce",
        flags=("--overlap-param-gather",),
        off=("--no-overlap-param-gather",),
    )
    overlap_p2p_comm: bool = setting(
        True,
        "overlap pipeline communication with computation (interleaved schedule)",
        off=("--no-overlap-p2p-communication",),
    )
    tp_comm_overlap: bool = setting(
        False, "overlap tensor-parallel communication with GEMMs (Transformer Engine's user buffers)"
    )
    tp_comm_overlap_cfg: Optional[str] = setting(
        None,
        "YAML file that configures the overlap per GEMM (Transformer Engine's `ub_cfgs`)",
        metavar="FILE",
        path=True,
    )
    tp_comm_overlap_ag: bool = setting(True, "overlap all-gathers", off=("--disable-tp-comm-overlap-ag",))
    tp_comm_overlap_rs: bool = setting(True, "overlap reduce-scatters", off=("--disable-tp-comm-overlap-rs",))
    tp_comm_overlap_rs_dgrad: bool = setting(False, "overlap reduce-scatters with the dgrad GEMM instead of wgrad")
    tp_comm_bulk_dgrad: bool = setting(
        True, "overlap the all-gather of inputs with the complete dgrad GEMM", off=("--disable-tp-comm-bulk-dgrad",)
    )
    tp_comm_bulk_wgrad: bool = setting(
        True, "overlap the reduce-scatter with the complete wgrad GEMM", off=("--disable-tp-comm-bulk-wgrad",)
    )
    tp_comm_bootstrap_backend: str = setting(
        "nccl", "communication backend for the setup of user buffers", choices=("nccl", "gloo", "mpi")
    )
    ddp_bucket_size: Optional[int] = setting(None, "parameters per gradient bucket; default: megatron-core's")
    ddp_average_in_collective: bool = setting(False, "average gradients in the collective (not supported)")
    distributed_backend: Optional[str] = setting(
        None, "backend of collectives; default nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = setting(10, "timeout of collectives, in minutes")
    rendezvous_timeout_s: float = setting(
        300.0, "timeout for all ranks to connect at startup, in seconds; the error lists the missing ranks"
    )
