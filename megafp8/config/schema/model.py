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
        None, "named model shape whose values apply where a flag does not say otherwise (see --list-presets)"
    )
    num_layers: Optional[int] = setting(None, "number of transformer layers", maximum=10_000)
    hidden_size: Optional[int] = setting(None, "width of the residual stream", maximum=MAX_WIDTH)
    ffn_hidden_size: Optional[int] = setting(
        None,
        "width of the MLP; default 4 x hidden size, with --swiglu 4 x hidden x 2/3 rounded to 64",
        maximum=MAX_WIDTH,
    )
    num_attention_heads: Optional[int] = setting(None, "number of query heads", maximum=MAX_HEADS)
    kv_channels: Optional[int] = setting(None, "width of one head; default hidden size / heads", maximum=MAX_WIDTH)
    group_query_attention: bool = setting(False, "share key and value heads (grouped-query attention)")
    num_query_groups: int = setting(1, "number of key/value heads, with --group-query-attention", maximum=MAX_HEADS)
    max_position_embeddings: Optional[int] = setting(
        None,
        "longest sequence that the position embeddings allow; must be at least the sequence length",
        maximum=INT32_MAX,
    )
    position_embedding_type: str = setting(
        "learned_absolute", "position embeddings", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = setting(10000, "base of the rotary frequencies")
    rotary_percent: float = setting(1.0, "fraction of a head's channels that rotate")
    rotary_interleaved: bool = setting(False, "rotate neighbouring channels instead of halves")
    rotary_seq_len_interpolation_factor: Optional[int] = setting(
        None, "linear interpolation factor of rotary positions"
    )
    use_rope_scaling: bool = setting(False, "scale rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = setting(8.0, "factor for --use-rope-scaling")
    normalization: str = setting("LayerNorm", "normalization of every layer", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(1e-5, "epsilon of the normalization")
    apply_layernorm_1p: bool = setting(False, "norm weights are stored as weight - 1")
    swiglu: bool = setting(False, "gated SiLU instead of GELU in the MLP")
    squared_relu: bool = setting(False, "squared ReLU instead of GELU in the MLP")
    add_bias_linear: bool = setting(True, "biases in the linears", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, "bias in the QKV projection only")
    qk_layernorm: bool = setting(False, "normalize queries and keys")
    share_embeddings_and_output_weights: bool = setting(
        True, "one matrix for embedding and output layer", off=("--untie-embeddings-and-output-weights",)
    )
    vocab_size: Optional[int] = setting(
        None, "tokens in the vocabulary before padding; default the tokenizer's", maximum=INT32_MAX
    )
    make_vocab_size_divisible_by: int = setting(
        128, "vocabulary is padded to a multiple of this x tensor-parallel", maximum=INT32_MAX
    )
    attention_dropout: float = setting(0.1, "dropout of the attention probabilities")
    hidden_dropout: float = setting(0.1, "dropout of the hidden state")
    init_method_std: float = setting(0.02, "standard deviation of the initial weights")
    attention_softmax_in_fp32: bool = setting(True, "attention softmax in FP32", flags=("--attention-softmax-in-fp32",))
    apply_query_key_layer_scaling: bool = setting(False, "scale Q*K by 1 / layer number (implies FP32 softmax)")
    window_size: Optional[int] = setting(None, "sliding attention window in tokens; default full causal attention")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is split over ranks. world = tensor x pipeline x context x data."""

    tensor_model_parallel_size: int = setting(1, "ranks that share each layer's matrices")
    pipeline_model_parallel_size: int = setting(1, "ranks that share the stack of layers")
    num_layers_per_virtual_pipeline_stage: Optional[int] = setting(
        None, "layers in one chunk of the interleaved pipeline schedule"
    )
    num_virtual_stages_per_pipeline_rank: Optional[int] = setting(
        None, "chunks per pipeline rank of the interleaved schedule"
    )
    context_parallel_size: int = setting(1, "ranks that share each sequence")
    cp_comm_type: str = setting(
        "p2p", "how context-parallel attention communicates (TE)", choices=("p2p", "a2a", "allgather")
    )
    sequence_parallel: bool = setting(
        False, "split norms and dropout over the tensor-parallel ranks along the sequence"
    )
    use_distributed_optimizer: Optional[bool] = setting(
        None,
        "shard optimizer state over the data-parallel ranks; default on GPUs with --optimizer adam",
        flags=("--use-distributed-optimizer",),
        off=("--no-use-distributed-optimizer",),
    )
    overlap_grad_reduce: Optional[bool] = setting(
        None,
        "reduce gradients while the backward pass runs; default on GPUs with the distributed optimizer",
        flags=("--overlap-grad-reduce",),
        off=("--no-overlap-grad-reduce",),
    )
    overlap_param_gather: Optional[bool] = setting(
        None,
        "gather parameters while the forward pass runs; default where gradients overlap",
        flags=("--overlap-param-gather",),
        off=("--no-overlap-param-gather",),
    )
    overlap_p2p_comm: bool = setting(
        True, "overlap pipeline sends with computation (interleaved schedule)", off=("--no-overlap-p2p-communication",)
    )
    tp_comm_overlap: bool = setting(
        False, "send activations between tensor-parallel ranks while GEMMs run (Transformer Engine's user buffers)"
    )
    tp_comm_overlap_cfg: Optional[str] = setting(
        None,
        "YAML file with how each GEMM's communication is overlapped (`ub_cfgs` of Transformer Engine)",
        metavar="FILE",
        path=True,
    )
    tp_comm_overlap_ag: bool = setting(True, "overlap all-gathers", off=("--disable-tp-comm-overlap-ag",))
    tp_comm_overlap_rs: bool = setting(True, "overlap reduce-scatters", off=("--disable-tp-comm-overlap-rs",))
    tp_comm_overlap_rs_dgrad: bool = setting(False, "overlap reduce-scatters with dgrad, not with wgrad")
    tp_comm_bulk_dgrad: bool = setting(
        True, "overlap all-gathers of inputs with dgrad as a whole", off=("--disable-tp-comm-bulk-dgrad",)
    )
    tp_comm_bulk_wgrad: bool = setting(
        True, "overlap reduce-scatters with wgrad as a whole", off=("--disable-tp-comm-bulk-wgrad",)
    )
    tp_comm_bootstrap_backend: str = setting(
        "nccl", "collectives that set up the user buffers", choices=("nccl", "gloo", "mpi")
    )
    ddp_bucket_size: Optional[int] = setting(None, "parameters in one gradient bucket; default megatron-core's")
    ddp_average_in_collective: bool = setting(False, "average gradients inside the collective")
    distributed_backend: Optional[str] = setting(
        None, "collective backend; default nccl on CUDA and gloo on CPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = setting(10, "minutes after which a collective gives up")
    rendezvous_timeout_s: float = setting(
        300.0, "seconds that the ranks have to reach each other at the start; those that did not come are named"
    )
