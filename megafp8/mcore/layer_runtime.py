"""What a kind of layers does in the model of a rank: the interface of `te/runtime.py` and `models/layer_runtime.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as BlockSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megafp8.config.model_plan import ModelPlan
from megafp8.config.schema import ModelConfig, OptimizerConfig, PrecisionConfig

Model = Sequence[Any]
"""The chunks of this rank."""
MultiTokenSpec = Optional[MultiTokenPredictionBlockSubmodules]
"""None on all chunks but the last."""
CodesOf = Callable[[Tensor, torch.Size], Any]
"""Makes the `GatheredCodes` of a weight, of this rank's rows [n, K] and its shape (N, K)."""
CodesByLinear = tuple[Mapping[Any, CodesOf], Callable[[], bool]]
"""The codes by linear, and whether a forward pass finds the weights quantized already."""


class LayerRuntime(ABC):
    """The mechanisms of a kind of layers that need torch. The defaults are for layers that have nothing to do."""

    # ---- Building a model -------------------------------------------------------------------------------------------

    @abstractmethod
    def block_spec(self, plan: ModelPlan, core: TransformerConfig, indices: Sequence[int]) -> BlockSpec:
        """The spec of the transformer block of a model chunk.

        Args:
            indices: of its layers in the model.
        """

    @abstractmethod
    def multi_token_spec(self, plan: ModelPlan, core: TransformerConfig, vp_stage: Optional[int]) -> MultiTokenSpec:
        """The spec of multi-token prediction."""

    @abstractmethod
    def finish_chunk(self, plan: ModelPlan, chunk: GPTModel) -> None:
        """Give a built chunk what specs cannot express: recipes of single linears, and that of the output layer."""

    @abstractmethod
    def fuse_wgrad_accumulation(self, chunks: Sequence[nn.Module]) -> None:
        """Let the linears add wgrad to `main_grad` inside the GEMM, without rounding it to BF16 first.

        It is set after construction, because megatron-core's own linears would require Apex in their constructors.
        """

    def writable_weights(self, chunks: list[nn.Module]) -> AbstractContextManager[None]:
        """Context in which weights that are stored as codes can be initialized."""
        return nullcontext()

    def convert_weights(self, chunks: Sequence[nn.Module]) -> None:  # noqa: B027
        """Store weights as codes, before megatron-core creates the parameter buffers."""

    @abstractmethod
    def codes_to_gather(self, model: ModelConfig, precision: PrecisionConfig, chunk: Any) -> CodesByLinear:
        """What ranks gather in place of the rows of sharded weights in BF16."""

    @abstractmethod
    def set_optimizer_state(self, settings: OptimizerConfig, optimizers: Iterable[Any]) -> None:
        """Prepare what distributed optimizers store in low precision."""

    # ---- Training ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def change_linears(self, model: Model, in_high_precision: Collection[str], smoothed: Collection[str]) -> None:
        """Compute linears in high precision, or with a scale per channel, from now on; those of this rank.

        Args:
            model: the chunks of this rank, unwrapped.
        """

    @abstractmethod
    def set_precision(self, model: ModelConfig, precision: PrecisionConfig, chunks: Model) -> None:
        """Compute the linears of this rank in the precision of a phase of `--fp8-schedule` from now on.

        Args:
            precision: of the phase.
            chunks: of this rank, unwrapped.
        """

    def cached_weights(self, chunks: Sequence[Any]) -> AbstractContextManager[None]:
        """Context of one step, whose microbatches share the codes of a weight."""
        return nullcontext()

    def delayed_state(self, chunk: Any) -> list[Tensor]:
        """Amax histories and scales that are not those of a `DelayedState`, not copied."""
        return []

    def delayed_scales(self, chunk: Any) -> list[Tensor]:
        """The scales among them, FP32."""
        return []

    def lacks_scales_of_attention(self, chunks: Sequence[Any]) -> bool:
        """Whether layers with FP8 attention have no scales of attention yet."""
        return False

    def weights_with_fused_gradients(self, chunks: Sequence[Any]) -> list[nn.Parameter]:
        """Weights whose first wgrad of a step can overwrite `main_grad`."""
        return []

    def attention_kernel(self) -> Optional[str]:
        """The kernel that was selected in the last forward pass; None before the first one, and where it is torch's."""
        return None
