"""Attention backends that Transformer Engine has on this device."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Optional

from megafp8.utils.strict_json import parse_json

BACKENDS = ("flash", "fused", "unfused")
TIMEOUT_S = 300
# BF16 outputs and gradients against FP32: half a unit in the last place is 2^-8, and rounded probabilities add to it.
LARGEST_ERROR = 2.0**-5


@dataclass(frozen=True)
class AttentionTrial:
    """One backend.

    Attributes:
        error: largest difference from FP32 over the largest value; None if the backend is not available.
        ms: median time of forward and backward pass.
        unavailable: why it is not available.
        wrong: why its values cannot be compared.
    """

    backend: str
    error: Optional[float] = None
    ms: Optional[float] = None
    unavailable: Optional[str] = None
    wrong: Optional[str] = None

    @property
    def is_right(self) -> bool:
        """Whether it is unavailable, or near enough to FP32."""
        return self.wrong is None and (self.error is None or self.error <= LARGEST_ERROR)

    def problem(self) -> str:
        """A line on values that are wrong."""
        return f"attention, {self.backend}: {self.wrong or f'differs by {self.error:.1e} from FP32'}"

    def row(self) -> tuple[str, ...]:
        """A row of the report."""
        if self.error is None or self.ms is None:
            return self.backend, "", self.wrong or f"not available: {self.unavailable}"
        return self.backend, f"{self.ms:.3f}", f"{self.error:.1e}"


def try_backend(backend: str) -> AttentionTrial:
    """Run one backend in a process of its own."""
    command = [sys.executable, "-m", "megafp8.te.attention_trial", backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return AttentionTrial(backend, unavailable=f"no result in {TIMEOUT_S} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return AttentionTrial(backend, unavailable=f"status {done.returncode}: {last[0]}")
    return AttentionTrial(backend, **parse_json(lines[-1]))
