"""megatron-core's multi-token prediction: its configuration, its modules with other linears and norms, and its losses.

megatron-core sums the mean losses of microbatches in a tracker of the process, which it divides by their number at the
end. A token of a microbatch with few unmasked tokens then has a larger weight. `MultiTokenGPT` keeps the losses of each
token instead, so that records weight all tokens of a global batch alike, as those of the main loss do.

In the loss of training every token has the weight of a token of the main loss, as in 0.16 and in the paper of
DeepSeek-V3 (equation 24). megatron-core 0.19 multiplies the loss of a depth by the tokens of the microbatch on this
rank over those that count at the depth. Gradients then depend on context parallelism and on the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Optional
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec, get_gpt_mtp_block_spec_for_backend
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    roll_tensor,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megafp8.config import multi_token
from megafp8.config.schema import ModelConfig
from megafp8.mcore.patches import import_core, is_installed
from megafp8.mcore.process_groups import split_over_context

LOSS_EVIDENCE = (
    (
        ("transformer/multi_token_prediction.py", 'tracker["values"][layer_number] += loss.detach()'),
        ("models/gpt/gpt_model.py", "torch.sum(mtp_loss) / num_tokens,"),
        ("models/gpt/gpt_model.py", "mtp_loss = self.compute_language_model_loss(mtp_labels, mtp_logits)"),
    )
    if is_installed("<0.19")
    else (
        ("transformer/multi_token_prediction.py", 'tracker["loss_values"][layer_number] += loss.detach()'),
        ("transformer/multi_token_prediction.py", ") / num_tokens.clamp(min=1)"),
        (
            "transformer/multi_token_prediction.py",
            "mtp_loss_scale * mtp_loss * (original_num_tokens / num_tokens_safe)",
        ),
        ("models/gpt/gpt_model.py", "compute_language_model_loss=self.compute_language_model_loss,"),
        ("models/gpt/gpt_model.py", "hidden_states = process_mtp_loss("),
    )
)
"""The code of megatron-core that makes `MultiTokenGPT` necessary. A test fails when a quoted text is gone."""


def multi_token_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields of `TransformerConfig`; empty without multi-token prediction."""
    if not multi_token.num_depths(model):
        return {}
    return {"mtp_num_layers": model.mtp_num_layers, "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor}


class LocalModules(LocalSpecProvider):
    """megatron-core's local modules with another projection and norm."""

    def __init__(self, projection: type | ModuleSpec, norm: type):
        self.projection, self.norm = projection, norm

    def column_parallel_linear(self) -> Any:
        """The projection of hidden states and embeddings."""
        return self.projection

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The three norms of a module."""
        return self.norm


def local_spec(
    config: TransformerConfig, layer: ModuleSpec, projection: type | ModuleSpec, norm: type, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The modules without Transformer Engine of a model chunk; None on other chunks than the last one.

    Args:
        layer: the transformer layer of each module.
    """
    block, modules = TransformerBlockSubmodules([layer], norm), LocalModules(projection, norm)
    return get_gpt_mtp_block_spec_for_backend(config, block, modules, vp_stage)


def transformer_engine_spec(
    config: TransformerConfig, layer: ModuleSpec, norm: type, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The same with Transformer Engine's modules."""
    return get_gpt_mtp_block_spec(config, TransformerBlockSubmodules([layer], norm), True, vp_stage)


def add_depth_losses(
    hidden_states: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    output_layer: Any,
    output_weight: Optional[Tensor],
    runtime_gather_output: Optional[bool],
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: TransformerConfig,
    cp_group: dist.ProcessGroup,
    scale_logits_fn: Optional[Callable[[Tensor], Tensor]] = None,
    **unused: Any,
) -> Tensor:
    """Add the losses of all depths to the backward pass, in place of megatron-core's `process_mtp_loss`.

    Shapes: hidden_states ((1 + depths) * S, B, H), of the main output first; labels and loss_mask (B, S).

    Returns:
        Hidden states of the main output (S, B, H).
    """
    main, *depths = hidden_states.chunk(1 + config.mtp_num_layers, dim=0)
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()
    factor = config.mtp_loss_scaling_factor / config.mtp_num_layers
    shifted = import_core("transformer.multi_token_prediction").roll_tensor  # `shifts` may have replaced it
    for depth in depths:
        logits, _ = output_layer(depth, weight=output_weight, runtime_gather_output=runtime_gather_output)
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        labels, _ = shifted(labels, shifts=-1, dims=-1, cp_group=cp_group)
        loss_mask, _ = shifted(loss_mask, shifts=-1, dims=-1, cp_group=cp_group)
        losses = loss_mask * compute_language_model_loss(labels, logits)
        main = MTPLossAutoScaler.apply(main, factor * losses)
    return main


def tokens_weighted_alike() -> AbstractContextManager[Any]:
    """Context in which the loss of a depth is the sum over its tokens, without a factor of their microbatch."""
    if is_installed("<0.19"):
        return nullcontext()
    return patch.object(import_core("models.gpt.gpt_model"), "process_mtp_loss", add_depth_losses)


def shift_in_documents(has_next: Tensor, tensor: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """`roll_tensor` with zeros where the next token is of another document."""
    rolled = roll_tensor(tensor, *args, **options)[0] * has_next.to(tensor.dtype)
    return rolled, rolled.sum()


@contextmanager
def shifts(shifted: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Context in which megatron-core shifts tokens, labels and masks by this function."""
    modules = (import_core("transformer.multi_token_prediction"), import_core("models.gpt.gpt_model"))
    with ExitStack() as stack:
        for module in modules if shifted is not roll_tensor else ():
            if hasattr(module, "roll_tensor"):
                stack.enter_context(patch.object(module, "roll_tensor", shifted))
        yield


@contextmanager
def main_output_only(chunks: Iterable[GPTModel]) -> Iterator[None]:
    """Context in which models compute no multi-token prediction, which megatron-core cannot without labels.

    Args:
        chunks: without wrappers; each that is no `MultiTokenGPT` is left as it is.
    """
    models = [(chunk, chunk.config.mtp_num_layers) for chunk in chunks if isinstance(chunk, MultiTokenGPT)]
    for model, _ in models:
        model.mtp_process, model.config.mtp_num_layers = False, None
    try:
        yield
    finally:
        for model, num_depths in models:
            model.mtp_process, model.config.mtp_num_layers = True, num_depths


class MultiTokenGPT(GPTModel):
    """megatron-core's GPT, which keeps the losses of multi-token prediction for the records.

    Attributes:
        losses: of the last forward pass with labels: (B, S) of each depth, then of the main output.
        shifted: how a tensor (B, S) is shifted to the next token; zeros where the next token is of another document.
    """

    losses: list[Tensor]
    shifted: Callable[..., tuple[Tensor, Tensor]] = staticmethod(roll_tensor)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Optional[Tensor], *args: Any, **options: Any
    ) -> Tensor:
        """Start the losses of a microbatch, and compute them.

        Args:
            attention_mask: the borders of documents (`models/loss.py`); None for one document.
        """
        self.losses, self.shifted = [], roll_tensor
        if attention_mask is not None and self.mtp_process:
            self.shifted = partial(shift_in_documents, self.has_next(attention_mask, input_ids))
        with tokens_weighted_alike(), shifts(self.shifted):
            return super().forward(input_ids, position_ids, attention_mask, *args, **options)

    def has_next(self, ends: Tensor, tokens: Tensor) -> Tensor:
        """Whether the next token is of the same document, bool (B, S), S of this context-parallel rank."""
        batch_size, length = tokens.shape[0], tokens.shape[1] * self.cp_group.size()
        is_last = torch.zeros(batch_size * length, dtype=torch.bool, device=tokens.device)
        is_last[ends[1:].long() - 1] = True
        complete = {"has_next": ~is_last.view(batch_size, length)}
        return (split_over_context(complete) if self.cp_group.size() > 1 else complete)["has_next"]

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy (B, S) in nats; megatron-core calls it for each depth, and then for the main output."""
        losses = super().compute_language_model_loss(labels, logits)
        self.losses.append(losses.detach())
        return losses

    def depth_sums(self, loss_mask: Tensor) -> Tensor:
        """Loss sum and number of tokens of each depth in the last microbatch, FP32 [depths, 2].

        Args:
            loss_mask: (B, S), 1 for tokens that count in the main loss. Depth d counts a token if the one d positions
                later counts, which the last ones of a sequence do not have.
        """
        sums = []
        for losses in self.losses[:-1]:
            loss_mask, _ = self.shifted(loss_mask, shifts=-1, dims=-1, cp_group=self.cp_group)
            mask = loss_mask.float()
            sums.append(torch.stack(((losses.float() * mask).sum(), mask.sum())))
        return torch.stack(sums)
