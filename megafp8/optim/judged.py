"""megafp8's last word between the gradients' norm and the update, for megatron-core's own optimizer.

A step of it takes the norm, clips and updates in one call. Here the update waits for a judgement of the norm, which
costs nothing: the norm is that of the clipping, and the ranks of a run have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

Judge = Callable[[float], bool]


class JudgedOptimizer(ChainedOptimizer):
    """megatron-core's optimizers of one run, whose update can be called off.

    Args:
        optimizer: megatron-core's chain, which this takes the place of.
    """

    def __init__(self, optimizer: MegatronOptimizer):
        assert isinstance(optimizer, ChainedOptimizer)
        super().__init__(optimizer.chained_optimizers)
        self._allows: Optional[Judge] = None
        self._grad_norm = 0.0

    def step(self, allows: Optional[Judge] = None) -> tuple[bool, Optional[float], Optional[float]]:
        """megatron-core's step.

        Args:
            allows: told the norm before clipping; False leaves weights and moments as they are. It must give the same
                answer on all ranks.

        Returns:
            Whether the update was made, the norm, and the number of zeros if that is asked for; the norm is None where
            a loss scale overflowed, which nobody is asked about.
        """
        self._allows = allows
        return super().step()

    def get_grad_norm(self) -> float:
        """megatron-core's; kept for the judge."""
        self._grad_norm = super().get_grad_norm()
        return self._grad_norm

    def step_with_ready_grads(self) -> bool:
        """megatron-core's update, unless it is called off."""
        return (self._allows is None or self._allows(self._grad_norm)) and super().step_with_ready_grads()
