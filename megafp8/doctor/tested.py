"""Sets of versions that the project was tested with. What is not among them may work, and nobody has seen it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEGATRON_CORE = "0.16.1"
PYTHON_FROM, PYTHON_BELOW = (3, 10), (3, 13)
TORCH_FROM = (2, 6)


@dataclass(frozen=True, kw_only=True)
class TestedSet:
    """Versions that ran together.

    Attributes:
        packages: version or beginning of a version (`2.11`) of each.
    """

    name: str
    pythons: tuple[tuple[int, int], ...]
    packages: Mapping[str, str]

    __test__ = False  # no test class, whatever its name begins with


CPU = TestedSet(
    name="CPU (continuous integration)",
    pythons=((3, 11),),
    packages={"torch": "2.13", "megatron-core": MEGATRON_CORE},
)
H200 = TestedSet(
    name="H200, driver 580.159, CUDA 13.0, cuDNN 9.19",
    pythons=((3, 12),),
    packages={"torch": "2.11", "megatron-core": MEGATRON_CORE, "transformer-engine": "2.20.2", "triton": "3.6"},
)

MINIMUM_DRIVER = {12: 525, 13: 580}
"""NVIDIA driver that a CUDA major version needs. Source: CUDA Toolkit release notes, minor version compatibility."""
