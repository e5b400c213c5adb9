"""Names of the GPUs that `--target` and `--gpu` know, their compute capabilities, and the spellings that people use.

Their figures are in `device/gpus.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from megafp8.utils.suggestions import NameType

COMPUTE_CAPABILITIES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "a100": (8, 0), "a100-40gb": (8, 0), "l40s": (8, 9), "rtx4090": (8, 9),
        "h100": (9, 0), "h100-pcie": (9, 0), "h100-nvl": (9, 0), "h200": (9, 0), "h200-nvl": (9, 0),
        "gh200": (9, 0), "gh200-144gb": (9, 0), "h20": (9, 0),
        "b200": (10, 0), "gb200": (10, 0), "b300": (10, 3), "gb300": (10, 3),
        "rtx5090": (12, 0), "rtxpro6000": (12, 0), "gb10": (12, 1),
    }
)  # fmt: skip
"""By name. Source: NVIDIA's table of CUDA GPUs, developer.nvidia.com/cuda-gpus."""

# Of the words of a name that are not left out, in one.
_SPELLINGS = {
    "4090": "rtx4090", "5090": "rtx5090", "pro6000": "rtxpro6000", "6000pro": "rtxpro6000",
    "rtx6000pro": "rtxpro6000", "spark": "gb10",
    "a10080gb": "a100", "h10080gb": "h100", "h10080gbhbm3": "h100", "h200141gb": "h200", "h2096gb": "h20",
    "h100pcie80gb": "h100-pcie", "h10080gbpcie": "h100-pcie", "h100nvl94gb": "h100-nvl",
    "h200nvl141gb": "h200-nvl", "gh200480gb": "gh200", "gh20096gb": "gh200", "gh200144ghbm3e": "gh200-144gb",
}  # fmt: skip
# Makers, families, and forms of which the table has one.
_LEFT_OUT = (
    "nvidia", "geforce", "tesla", "dgx", "hgx", "blackwell", "workstation", "edition", "tensor", "core", "gpu", "nvl72",
    "sxm", "sxm4", "sxm5", "sxm6", "ac",
)  # fmt: skip


def spelled(text: str) -> str:
    """The name of the GPU that a text means, in any case: `rtx4090` for "RTX 4090", `gb10` for "DGX Spark".

    A text that means no known GPU is returned as it is.
    """
    words = re.findall(r"[a-z0-9]+", text.casefold())
    plain = re.sub(r"sxm[456]?$", "", "".join(word for word in words if word not in _LEFT_OUT))
    by_letters = {name.replace("-", ""): name for name in COMPUTE_CAPABILITIES} | _SPELLINGS
    return by_letters.get(plain, text)


def gpu_type(*others: str, kind: str = "GPUs") -> NameType:
    """argparse `type` of the name of a GPU, or of one of `others`."""
    return NameType(
        (*others, *COMPUTE_CAPABILITIES), kind,
        "others: --gpu-memory-gib, --gpu-peak-tflops",
        spelling=spelled, similarity=0.7, count=3,  # one letter of four
    )  # fmt: skip
