"""What is planned: a configuration on so many GPUs of a kind. The other modules of the time model take one of these."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.planning.calibration import CALIBRATION, Calibration
from megafp8.planning.hardware import Gpu


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
