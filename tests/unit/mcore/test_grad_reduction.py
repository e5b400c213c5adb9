"""megatron-core's gradient reductions can be replaced at the calls that the patch quotes."""

from __future__ import annotations

import pytest
from test_cpu_patches import core_source

from megafp8.mcore.grad_reduction import REDUCTION_EVIDENCE


@pytest.mark.parametrize(("file", "text"), REDUCTION_EVIDENCE)
def test_megatron_core_still_makes_these_calls(file: str, text: str) -> None:
    assert text in core_source(file), "megatron-core no longer has this: the FP8 reduction would not be called"
