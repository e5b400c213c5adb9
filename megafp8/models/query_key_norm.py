"""RMSNorm of queries or keys over the channels of all heads (OLMo et al. 2024, OLMo 2)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class AcrossHeadsNorm(torch.nn.Module):
    """RMSNorm over all heads, which tensor-parallel ranks share.

    Shapes: input and output (S, B, heads, channels) with the heads of this rank; weight (heads * channels,).
    Numerics: in FP32; the result has the dtype of the input.

    Args:
        num_heads: over all tensor-parallel ranks.
        hidden_size: channels of one head, which is what megatron-core's attention passes.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, num_heads: int, eps: float = 1e-5):
        super().__init__()
        self.eps, self.width = eps, num_heads * hidden_size
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.group = parallel_state.get_tensor_model_parallel_group()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        local_width = self.width // self.group.size()
        self.weight = torch.nn.Parameter(torch.empty(local_width, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the channels of all heads together."""
        values = x.float()
        total = values.square().sum(dim=(-2, -1), keepdim=True)
        if self.group.size() > 1:
            # The sum is reduced in the forward pass, and its gradient in the backward pass: every rank uses the sum.
            total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(total))
        weight = self.weight.float() + 1 if self.is_zero_centered else self.weight.float()
        normalized = values * torch.rsqrt(total / self.width + self.eps)
        return (normalized * weight.view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weight, split over the heads."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=self.group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
