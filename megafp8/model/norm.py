"""LayerNorm and RMSNorm for the layers that run without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, as `config.normalization` says.

    Shapes: input and output (..., hidden_size); weight (and bias of LayerNorm) (hidden_size,).
    Numerics: torch's own kernels, statistics in FP32. With `layernorm_zero_centered_gamma` the weight is stored - 1.

    Under sequence parallelism each tensor-parallel rank sees another part of the sequence, so the weights' gradients
    are sums over the ranks: megatron-core adds them for parameters marked `sequence_parallel`. (Its own torch norm
    refuses sequence parallelism; unmarked, the ranks' weights would drift apart unnoticed.)
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.is_rms = config.normalization == "RMSNorm"
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = self.parameter(device, config)
        self.bias = None if self.is_rms else self.parameter(device, config)

    def parameter(self, device: torch.device, config: TransformerConfig) -> torch.nn.Parameter:
        """An uninitialized vector, marked for megatron-core's gradient reduction."""
        parameter = torch.nn.Parameter(torch.empty(self.shape, dtype=config.params_dtype, device=device))
        parameter.sequence_parallel = config.sequence_parallel
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        weight = self.weight + 1 if self.is_zero_centered else self.weight
        if self.is_rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
