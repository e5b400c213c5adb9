"""The inputs of the planner: `PlannedRun`, the measured `Calibration`, and the GEMMs of a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Optional

from megafp8.config import derived, model_shapes, stages, topology
from megafp8.config.data_phases import training_blends
from megafp8.config.latent_attention import DOWN_PROJECTIONS
from megafp8.config.precision_map import MLP_LINEARS, OUTPUT_LAYER
from megafp8.config.run_sizes import RunSizes, run_sizes
from megafp8.config.schema import RunConfig
from megafp8.device.gpus import Gpu
from megafp8.resources.recipe_shares import BF16

if TYPE_CHECKING:
    from megafp8.data.document_lengths import DocumentEstimate


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured constants of the time model: fractions of peak rates, and fixed costs in seconds.

    `python benchmarks/planner_accuracy.py --fit` fits them again. Each is fitted on the kernels that it describes,
    fractions on large ones and seconds on small ones: profiles of megatron-core 0.16.1 with Transformer Engine 2.20 on
    one H200, one step on four, a small model whose step waits for the host, and the GEMMs and casts of a model with
    hidden size 1024. `benchmarks/planner_measurements.py` has the rows, including those that were held out. Other GPUs
    are assumed to reach the same values, except for block-scaled GEMMs: they need Blackwell, which was not measured.
    Their fraction comes from published speeds of complete runs.
    """

    bf16_gemm_fraction: float = 0.744
    """Of the BF16 peak, for a large GEMM within a step, where the GPU is at its power limit."""
    fp8_gemm_fraction: float = 0.701
    """Of the FP8 peak, with one scale per tensor."""
    block_scaled_gemm_fraction: float = 0.615
    """Of the FP8 or FP4 peak, with one scale per block, on Blackwell (MXFP8, blockwise, NVFP4). Fitted to the speed of
    MXFP8 relative to tensorwise that Megatron-Bridge 25.11 publishes for Llama 3 8B on B200, GB200 and GB300, and 405B
    on B200 (rows `fit` of `benchmarks/planner_published.py`). NVFP4's rows were held out."""
    blockwise_gemm_fraction: float = 0.566
    """Of the FP8 peak, with one scale per block, on Hopper."""
    gemm_start_s: float = 3.7e-6
    """Fixed seconds of a GEMM, in addition to its FLOPs."""
    attention_fraction: float = 0.402
    """Of the BF16 peak, for long sequences. Counts causal model FLOPs, forward and backward."""
    attention_half_tokens: float = 518.0
    """Sequence length at which attention reaches half of that."""
    memory_fraction: float = 0.538
    """Of the HBM bandwidth, for norms, activations, rotary embeddings and loss."""
    cast_fraction: float = 0.87
    """Of the HBM bandwidth, for casts with one scale per tensor. Assumed for MXFP8 and NVFP4 as well."""
    optimizer_fraction: float = 0.771
    """Of the HBM bandwidth, for the optimizer's kernels."""
    blockwise_cast_fraction: float = 0.53
    """Of the HBM bandwidth, for casts with blocks of 128."""
    cast_start_s: float = 8.26e-6
    """Fixed seconds of quantizing a tensor, in addition to its bytes."""
    busy_fraction: float = 0.958
    """Of a step on one GPU: the fraction of time in which a kernel runs."""
    nvlink_fraction: float = 0.413
    """Of the NVLink bandwidth, for collectives within a node."""
    bf16_host_layer_s: float = 0.00426
    """Seconds that the host takes to launch the kernels of one layer, forward and backward."""
    fp8_host_layer_s: float = 0.0055
    """The same with an FP8 recipe."""


CALIBRATION = Calibration()


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A training run on a cluster, the input of the memory and time models.

    Attributes:
        config: a configuration that violates no rule.
        world_size: number of GPUs.
        padded_vocab: vocabulary size after padding.
        document_length: tokens of a token's document, on average over tokens, where attention stops at its borders.
    """

    config: RunConfig
    gpu: Gpu
    world_size: int
    padded_vocab: int
    calibration: Calibration = CALIBRATION
    document_length: Optional[float] = None

    @cached_property
    def sizes(self) -> RunSizes:
        """What memory and time depend on."""
        return run_sizes(self.config, self.world_size, self.padded_vocab)

    @property
    def context(self) -> int:
        """Context-parallel size."""
        return self.config.parallel.context_parallel_size

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel size."""
        return self.config.parallel.pipeline_model_parallel_size

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return topology.data_parallel_size(self.config, self.world_size)

    @property
    def chunks(self) -> int:
        """Model chunks per pipeline rank; 1 without the interleaved schedule."""
        return stages.virtual_pipeline_size(self.config.model, self.config.parallel) or 1

    @property
    def recipe(self) -> str:
        """`bf16`, or the FP8 or FP4 recipe of the linears."""
        return derived.quantization_recipe(self.config.precision) or BF16

    @property
    def attended_tokens(self) -> float:
        """Tokens of which attention computes the causal half: of the sequence, or of a mean document."""
        assert self.config.data.seq_length is not None
        return self.config.data.seq_length if self.document_length is None else self.document_length

    @property
    def sharded_tokens(self) -> int:
        """Tokens of one microbatch on one rank outside of the linears: a shard with sequence parallelism."""
        return self.sizes.tokens // (self.sizes.tensor if self.config.parallel.sequence_parallel else 1)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of reading or writing `num_bytes` of device memory."""
        return num_bytes / (self.gpu.hbm_bytes_per_s * self.calibration.memory_fraction)


def documents_of(config: RunConfig, world_size: int) -> DocumentEstimate:
    """The lengths of the documents of a run, and its padding."""
    from megafp8.data.document_lengths import estimate_documents  # numpy must come after torch

    return estimate_documents(config.data, training_blends(config, world_size))


def attention_lines(config: RunConfig, documents: DocumentEstimate) -> list[str]:
    """A line about the tokens of which attention is counted, if it stops at the borders of documents."""
    if not config.data.reset_attention_mask:
        return []
    if documents.length is None:
        return [
            "--reset-attention-mask: attention is counted over whole sequences, since the lengths of documents are not "
            f"known ({documents.problem})"
        ]
    return [
        f"attention is counted within documents, of {documents.length:,.0f} of {config.data.seq_length:,} tokens on "
        "average over tokens"
    ]


@dataclass(frozen=True)
class LinearGemm:
    """An (m, k) x (k, n) GEMM of a linear.

    Attributes:
        kind: fprop, dgrad or wgrad.
    """

    linear: str
    kind: str
    m: int
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """m, n, k."""
        return self.m, self.n, self.k

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


def linear_gemms(
    linear: str, tokens: int, out_features: int, in_features: int
) -> tuple[LinearGemm, LinearGemm, LinearGemm]:
    """Fprop, dgrad and wgrad of a linear."""
    return (
        LinearGemm(linear, "fprop", tokens, out_features, in_features),
        LinearGemm(linear, "dgrad", tokens, in_features, out_features),
        LinearGemm(linear, "wgrad", out_features, in_features, tokens),
    )


def layer_linears(config: RunConfig, has_experts: bool = False) -> list[model_shapes.GemmDimensions]:
    """The linears of a transformer layer on one rank, in the order of the forward pass.

    Args:
        has_experts: of a layer with experts: the shared experts in place of the MLP, or nothing.
    """
    if not has_experts:
        return model_shapes.gemm_dimensions(config)
    shared = config.model.moe_shared_expert_intermediate_size
    width = replace(config, model=replace(config.model, ffn_hidden_size=shared or config.model.ffn_hidden_size))
    linears = model_shapes.gemm_dimensions(width)
    return linears if shared else [linear for linear in linears if linear.name not in MLP_LINEARS]


def layer_gemms(run: PlannedRun, has_experts: bool = False) -> list[LinearGemm]:
    """The GEMMs of one transformer layer for one microbatch without routed experts, in the order of the forward pass.

    Down projections of multi-latent attention multiply the rows of a rank, others those that are gathered.
    """
    return [
        gemm
        for linear in layer_linears(run.config, has_experts)
        for gemm in linear_gemms(
            linear.name, linear.rows if linear.name in DOWN_PROJECTIONS else run.sizes.tokens, linear.out_features,
            linear.in_features,
        )
    ]  # fmt: skip


def output_layer_gemms(run: PlannedRun) -> tuple[LinearGemm, LinearGemm, LinearGemm]:
    """The GEMMs of the output layer for one microbatch."""
    return linear_gemms(OUTPUT_LAYER, run.sizes.tokens, run.padded_vocab // run.sizes.tensor, run.sizes.hidden_size)
