"""The output layer as one of Transformer Engine's linears, to compute logits and their gradients in FP8.

megatron-core makes its own, in high precision. A recipe with a memory (delayed scaling) is not for it: megatron-core
takes what an output layer remembers out of checkpoints. Beside layers that have one it leaves theirs alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


@contextmanager
def after_layers() -> Iterator[None]:
    """Within, a context counts as one inside another: Transformer Engine updates no scales of delayed scaling for it.

    It updates those of all layers when an outermost context ends, and when the context's first linear has had its
    backward pass. The layers' own context sees to both. For the output layer it would be once more, each way: amaxes of
    0 in the histories, and in the backward pass before any layer had its gradients.
    """
    state = FP8GlobalStateManager.quantization_state
    state.autocast_depth += 1
    try:
        yield
    finally:
        state.autocast_depth -= 1


class OutputLayer(TEColumnParallelLinear):
    """Logits [S, B, vocabulary / P] of hidden states [S, B, H], or [S / P, B, H] with sequence parallelism."""

    recipe: Recipe
    is_output = True
    is_quantizing = True

    @classmethod
    def in_place_of(cls, plain: ColumnParallelLinear, recipe: Recipe) -> OutputLayer:
        """A layer with the weight of megatron-core's own, which must not be the embedding's."""
        config = copy.copy(plain.config)
        config.tp_comm_overlap = False  # there are no buffers of this shape
        layer = cls(
            plain.input_size, plain.output_size, config=config, init_method=config.init_method, gather_output=False,
            bias=False, skip_bias_add=False, is_expert=False, tp_group=plain.tp_group,
        )  # fmt: skip
        layer.weight = plain.weight
        layer.recipe = recipe
        return layer

    def forward(
        self, input_: Tensor, weight: Optional[Tensor] = None, runtime_gather_output: Optional[bool] = None
    ) -> tuple[Tensor, Any]:
        """Logits, and None for the bias that there is not."""
        assert weight is None and not runtime_gather_output, "logits stay split over the vocabulary, for the loss"
        with after_layers(), te.autocast(enabled=self.is_quantizing, recipe=self.recipe):
            return super().forward(input_)

    def get_extra_state(self) -> None:
        """None: megatron-core asks for its truth, which Transformer Engine's tensor without elements does not have."""

    def set_extra_state(self, state: Any) -> None:
        """There is none."""
