"""The golden vectors, recorded from Transformer Engine 2.20.2 on an H200.

The repository has a part of them (`select_golden.py` selected it). MEGAFP8_GOLDEN=FOLDER adds all. The keys of the
arrays:

    SHAPE/DISTRIBUTION/DTYPE/x                          the input's bits; a selected x may have some of its rows
    .../x_columns                                       selected: some of its columns
    .../tensorwise-FORMAT-fp32|pow2/codes, scale_inv    one scale from the tensor itself
    .../delayed-FORMAT-scale3.7/codes, scale_inv, amax  a cast with a given scale, and the amax that it recorded
    .../block1d|2d-FORMAT-pow2|fp32/row_|col_codes, row_|col_scale_inv
    update/ALGORITHM-lenN-marginM-FORMAT/amax, scale, history   delayed scaling: 24 updates of 5 tensors
    linear/RECIPE/stepN/...                             operands and results of a linear
    product/CASE/a, b, a_scale_inv, b_scale_inv, bias, sums, results    a GEMM; recorded by `record_products.py`
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

CARRIED = Path(__file__).parent / "golden.npz"
FOLDER = os.environ.get("MEGAFP8_GOLDEN")
Arrays = dict[str, np.ndarray]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

needs_all = pytest.mark.skipif(not FOLDER, reason="MEGAFP8_GOLDEN names no folder of golden vectors")


def selected() -> Arrays:
    """The vectors of the repository."""
    with np.load(CARRIED) as source:
        return dict(source)


def everything(part: str = "") -> Arrays:
    """The vectors of the folder, in files whose names contain `part`."""
    arrays: Arrays = {}
    for path in sorted(Path(FOLDER or "").glob(f"*{part}*.npz")):
        with np.load(path) as source:
            arrays |= dict(source)
    return arrays


def tensor(raw: np.ndarray, dtype: str = "bf16") -> torch.Tensor:
    """Stored bits as a tensor."""
    return torch.from_numpy(raw.copy()).view(DTYPES[dtype])
