"""Cross-entropy loss with equal weight per token, independent of micro-batch size and parallel layout.

Every rank returns the sum over its tokens and their number, and megatron-core divides the gradients by the number of
tokens of the global batch. A mean of per-microbatch means would give tokens of a half-masked sequence a double weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megafp8.mcore.process_groups import split_over_context
from megafp8.resilience import fault_injection

LossOutput = tuple[Tensor, Tensor, dict[str, Tensor]]


def token_loss(loss_mask: Tensor, losses: Tensor) -> LossOutput:
    """Sum of the losses of unmasked tokens.

    Args:
        loss_mask: (B, S), 1 for tokens that count.
        losses: (B, S), cross entropy in nats.

    Returns:
        The sum (differentiable), the number of tokens (int32), and `{"loss": (sum, tokens)}` in FP32 for the record.
    """
    losses, loss_mask = losses.float(), loss_mask.float()
    total = (losses * loss_mask).sum()
    num_tokens = loss_mask.sum()
    return total, num_tokens.to(torch.int32), {"loss": torch.stack((total.detach(), num_tokens))}


def build_forward_step(
    device: torch.device, context_parallel_size: int
) -> Callable[[Iterator[dict[str, Tensor]], torch.nn.Module], tuple[Tensor, Callable[[Tensor], LossOutput]]]:
    """Build megatron-core's forward step, which returns a chunk's output and its loss function.

    Pipeline stages that need neither tokens nor labels get None for `batches`.
    """

    def forward_step(
        batches: Iterator[dict[str, Tensor]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
        tokens = labels = loss_mask = positions = None
        if batches is not None:
            fault_injection.point("data.wait")
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
            if context_parallel_size > 1:
                batch = split_over_context(batch)
            tokens, positions = batch["tokens"], batch["position_ids"]
            labels, loss_mask = batch["labels"], batch["loss_mask"]
        output = model(tokens, positions, None, labels=labels)
        return output, partial(token_loss, loss_mask)

    return forward_step
