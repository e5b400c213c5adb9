"""Cross-entropy loss with equal weight per token, independent of micro-batch size and parallel layout.

Every rank returns the sum over its tokens and their number. megatron-core divides the gradients by the number of
tokens of the global batch, and `optimizer/fused_adam.py`, where it is used, does so within the update. A mean of
per-microbatch means would give tokens of a half-masked sequence a double weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.mcore.multi_token import MultiTokenGPT
from megafp8.mcore.process_groups import split_over_context
from megafp8.models.graph_room import GraphRoom
from megafp8.resilience import fault_injection

DOCUMENT_ROOM = 2.0  # the most documents of a few steps say little about later ones

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


def row_loss(loss_mask: Tensor, losses: Tensor) -> LossOutput:
    """`token_loss`; the record also has the sum of each sequence as `row_losses`, FP32 (B,)."""
    total, num_tokens, report = token_loss(loss_mask, losses)
    return total, num_tokens, report | {"row_losses": (losses.detach().float() * loss_mask.float()).sum(dim=1)}


def multi_token_loss(depth_sums: Tensor, loss_mask: Tensor, losses: Tensor) -> LossOutput:
    """`token_loss` of the main output; the record also has the sums of multi-token prediction as `mtp_losses`.

    megatron-core adds the gradient of the other losses in the backward pass.
    """
    total, num_tokens, report = token_loss(loss_mask, losses)
    return total, num_tokens, report | {"mtp_losses": depth_sums}


class DocumentRoom(GraphRoom):
    """Room for the documents of a microbatch, in powers of two: Transformer Engine plans kernels for each number."""

    def __init__(self, device: torch.device, has_graph: bool):
        super().__init__(device, DOCUMENT_ROOM if has_graph else 1.0, lambda number: 1 << (number - 1).bit_length())

    def size(self, needed: Tensor, worst: int) -> int:
        """Launched passes have the size of a graph: a capture must not be the first to run kernels of it."""
        if not torch.is_grad_enabled():  # an evaluation has no graph, and runs no backward kernels
            return min(worst, self.rounded(int(needed)))
        return max(min(worst, super().size(needed, worst)), self.graph_size(worst))


def document_ends(document_starts: Tensor, num_documents: Optional[int] = None) -> Tensor:
    """The borders of documents. Models take them in place of an attention mask: only attention reads them.

    Args:
        document_starts: bool (B, S); the first token of each sequence starts a document.
        num_documents: the borders of so many, and empty documents at the end where there are fewer; the last one joins
            those that are too many. None: as many as there are, for which the host waits.

    Returns:
        int32 [documents + 1]: where documents start in the sequences, one after the other, and where the last one ends.
    """
    starts = document_starts.flatten()
    numbers = torch.arange(1, 1 + (int(starts.sum()) if num_documents is None else num_documents), device=starts.device)
    # The n-th document starts at the first token with n starts up to it.
    return F.pad(torch.searchsorted(starts.cumsum(0), numbers, out_int32=True), (0, 1), value=starts.numel())


def counting_documents(loss: Callable[[Tensor], LossOutput], squares: Tensor, losses: Tensor) -> LossOutput:
    """A loss whose record also has the sum of the squared lengths of documents, FP64 [1]."""
    total, num_tokens, report = loss(losses)
    return total, num_tokens, report | {"document_squares": squares}


def build_forward_step(
    device: torch.device, context_parallel_size: int, documents_room: GraphRoom, sums_rows: bool = False
) -> Callable[[Iterator[dict[str, Tensor]], torch.nn.Module], tuple[Tensor, Callable[[Tensor], LossOutput]]]:
    """Build megatron-core's forward step, which returns a chunk's output and its loss function.

    Pipeline stages that need no part of a batch get None for `batches`.

    Args:
        documents_room: decides on the number of documents.
        sums_rows: the losses are those of `row_loss`, for models without multi-token prediction.
    """

    def forward_step(
        batches: Iterator[dict[str, Tensor]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
        tokens = labels = loss_mask = positions = documents = squares = None
        if batches is not None:
            fault_injection.point("data.wait")
            on_host = next(batches)
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in on_host.items()}
            if (starts := on_host.get("document_starts")) is not None:
                number = documents_room.size(starts.sum(), worst=starts.numel())
                documents = document_ends(batch["document_starts"], number)
                # Each of the context-parallel ranks, which have the same documents, counts its part.
                squares = documents.diff().double().square().sum().view(1) / context_parallel_size
            if context_parallel_size > 1:
                batch = split_over_context(batch)
            tokens, positions = batch["tokens"], batch["position_ids"]
            labels, loss_mask = batch["labels"], batch["loss_mask"]
        chunk = unwrap_model(model)
        if sums_rows or not isinstance(chunk, MultiTokenGPT):
            output = model(tokens, positions, documents, labels=labels)
            loss: Callable[[Tensor], LossOutput] = partial(row_loss if sums_rows else token_loss, loss_mask)
        else:
            output = model(tokens, positions, documents, labels=labels, loss_mask=loss_mask)
            loss = partial(multi_token_loss, chunk.depth_sums(loss_mask), loss_mask)
        return output, loss if squares is None else partial(counting_documents, loss, squares)

    return forward_step
