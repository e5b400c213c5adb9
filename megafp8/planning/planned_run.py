"""What is planned: a configuration on so many GPUs of a kind. The other modules of the time model take one of these.

The constants of the time model that were measured. `python benchmarks/planner_accuracy.py --fit` finds them again.

Each is fitted on the kernels that it describes, fractions on large ones and seconds on small ones: profiles of
megatron-core 0.16.1 with Transformer Engine 2.20 on one H200, one step on four, the small model whose step waits for
the host, and the GEMMs and casts of a model of 1024 channels. The rows are in `benchmarks/planner_measurements.py`,
with those that were held out. On other GPUs the same fractions and seconds are assumed, but for one: block-scaled GEMMs
need Blackwell, where nothing was measured here. Their fraction comes from published speeds of whole runs.

The GEMMs of a rank for one microbatch: every linear of a layer, and the output layer, in all three products.

How much of a pipeline stage's linears computes by which recipe, and by which ones the output layer does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megafp8.config import derived, model_shapes, precision_map
from megafp8.config.schema import RunConfig
from megafp8.device.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How near to their peaks things come."""

    bf16_gemm_fraction: float = 0.744
    """Of the BF16 peak, for a large GEMM inside a step (the GPU at its power limit)."""
    fp8_gemm_fraction: float = 0.701
    """Of the FP8 peak, with one scale for a tensor."""
    block_scaled_gemm_fraction: float = 0.615
    """Of the FP8 or FP4 peak, with a scale for each block, on Blackwell (MXFP8, blockwise, NVFP4). Fitted to Megatron-
    Bridge's speeds of MXFP8 to tensorwise in one layout, release 25.11: Llama 3 8B on B200, GB200, GB300, 405B on B200
    (rows `fit` of `benchmarks/planner_published.py`). NVFP4's rows were held out."""
    blockwise_gemm_fraction: float = 0.566
    """Of the FP8 peak, with a scale for each block, on Hopper."""
    gemm_start_s: float = 3.7e-6
    """Seconds of a GEMM beside its FLOPs, however small it is."""
    attention_fraction: float = 0.402
    """Of the BF16 peak, for long sequences; causal FLOPs of the model, forward and backward."""
    attention_half_tokens: float = 518.0
    """Sequence length at which attention comes to half of that."""
    memory_fraction: float = 0.538
    """Of the HBM bandwidth, for norms, activations, rotary embeddings and loss."""
    cast_fraction: float = 0.87
    """Of the HBM bandwidth, for casts with a scale for a tensor. Assumed for MXFP8 and NVFP4."""
    optimizer_fraction: float = 0.771
    """Of the HBM bandwidth, for the optimizer's passes."""
    blockwise_cast_fraction: float = 0.53
    """Of the HBM bandwidth, for casts to blocks of 128."""
    cast_start_s: float = 8.26e-6
    """Seconds of quantizing a tensor beside its bytes, however small it is."""
    busy_fraction: float = 0.958
    """Of a step on one GPU, the part in which a kernel runs."""
    nvlink_fraction: float = 0.413
    """Of the NVLink bandwidth, for collectives within a node."""
    bf16_host_layer_s: float = 0.00426
    """Seconds the host takes to start the kernels of one layer, forward and backward."""
    fp8_host_layer_s: float = 0.0055
    """The same with an FP8 recipe."""


CALIBRATION = Calibration()


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run on a cluster.

    Attributes:
        config: a configuration that breaks no rule.
        world_size: GPUs.
        padded_vocab: rows of the embedding.
    """

    config: RunConfig
    gpu: Gpu
    world_size: int
    padded_vocab: int
    calibration: Calibration = CALIBRATION

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def context(self) -> int:
        """Context-parallel ranks."""
        return self.config.parallel.context_parallel_size

    @property
    def pipeline(self) -> int:
        """Pipeline stages."""
        return self.config.parallel.pipeline_model_parallel_size

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return derived.data_parallel_size(self.config, self.world_size)

    @property
    def chunks(self) -> int:
        """Model chunks of a pipeline rank; 1 without the interleaved schedule."""
        return derived.virtual_pipeline_size(self.config) or 1

    @property
    def recipe(self) -> str:
        """`bf16`, or the FP8 or FP4 recipe of the linears."""
        return derived.quantization_recipe(self.config.precision) or "bf16"

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        assert self.config.model.hidden_size is not None
        return self.config.model.hidden_size

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank: the rows of a linear's GEMM."""
        seq, micro = self.config.data.seq_length, self.config.training.micro_batch_size
        assert seq is not None and micro is not None
        return seq * micro // self.context

    @property
    def sharded_tokens(self) -> int:
        """Tokens that a rank has between the linears: its part of them with sequence parallelism."""
        return self.tokens // (self.tensor if self.config.parallel.sequence_parallel else 1)

    def memory_s(self, num_bytes: float) -> float:
        """Time of passes over device memory."""
        return num_bytes / (self.gpu.hbm_bytes_per_s * self.calibration.memory_fraction)


GEMMS = ("fprop", "dgrad", "wgrad")
OUTPUT_LAYER = "output_layer"


@dataclass(frozen=True)
class Product:
    """A matrix of rows x summed numbers times one of summed x columns."""

    linear: str
    gemm: str
    rows: int
    columns: int
    summed: int

    @property
    def flops(self) -> float:
        """Two for each multiplication."""
        return 2.0 * self.rows * self.columns * self.summed


def products_of(linear: str, tokens: int, out_features: int, in_features: int) -> tuple[Product, Product, Product]:
    """Fprop, dgrad and wgrad of a linear that sees so many tokens."""
    return (
        Product(linear, "fprop", tokens, out_features, in_features),
        Product(linear, "dgrad", tokens, in_features, out_features),
        Product(linear, "wgrad", out_features, in_features, tokens),
    )


def layer_products(run: PlannedRun) -> list[Product]:
    """Those of one transformer layer, in the order of the forward pass."""
    return [
        product
        for linear in model_shapes.gemm_dimensions(run.config)
        for product in products_of(linear.name, run.tokens, linear.out_features, linear.in_features)
    ]


def output_products(run: PlannedRun) -> tuple[Product, Product, Product]:
    """Those of the output layer, on the last pipeline stage."""
    return products_of(OUTPUT_LAYER, run.tokens, run.padded_vocab // run.tensor, run.hidden_size)


HIGH = "bf16"
FORWARD, BACKWARD = ("fprop",), ("dgrad", "wgrad")


@functools.lru_cache(maxsize=256)
def layer_shares(config: RunConfig, stage: int, products: tuple[str, ...]) -> dict[str, float]:
    """Layers of a stage by recipe, `bf16` for high precision. Of a layer, each linear counts by its multiplications.

    Args:
        products: the GEMMs that are counted, FORWARD or BACKWARD.
    """
    sizes = {linear.name: linear.in_features * linear.out_features for linear in model_shapes.gemm_dimensions(config)}
    chosen, counted = precision_map.resolve(config.model, config.precision), dict[str, int]()
    for layer in layers_of_stage(config, stage):
        for linear, size in sizes.items():
            for product in products:
                recipe = getattr(chosen[f"layers.{layer}.{linear}"], product).recipe or HIGH
                counted[recipe] = counted.get(recipe, 0) + size
    of_layer = len(products) * sum(sizes.values())
    return {recipe: size / of_layer for recipe, size in counted.items()}


def output_recipes(config: RunConfig) -> dict[str, str]:
    """The recipe of each GEMM of the output layer, `bf16` for high precision, which it has unless a map names it."""
    chosen = precision_map.resolve(config.model, config.precision)[precision_map.OUTPUT_LAYER]
    return {gemm: getattr(chosen, gemm).recipe or HIGH for gemm in precision_map.GEMMS}


def layers_of_stage(config: RunConfig, stage: int) -> list[int]:
    """Numbers of the layers of a pipeline stage, from all its chunks."""
    stages, chunks = config.parallel.pipeline_model_parallel_size, derived.virtual_pipeline_size(config) or 1
    length = derived.layers_per_pipeline_rank(config) // chunks
    return [(chunk * stages + stage) * length + index for chunk in range(chunks) for index in range(length)]
