"""Transformer Engine's attention in FP8, with what delayed scaling remembers of it in checkpoints."""

from __future__ import annotations

from typing import Any, Optional

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class FP8Attention(TEDotProductAttention):
    """megatron-core's, which leaves the scales of queries, keys, values, probabilities and output, and of their
    gradients, out of checkpoints."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Optional[dict[str, Any]] = None,
    ) -> dict[str, Any]:
        """As of a linear: one object of this layer, the same on all ranks that share its scales."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self._tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
