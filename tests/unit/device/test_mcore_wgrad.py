"""The function that megatron-core would take from Apex."""

from __future__ import annotations

import pytest
from test_mcore_cpu import core_source

from megafp8.device import mcore_wgrad


@pytest.mark.parametrize(("file", "text"), mcore_wgrad.EVIDENCE)
def test_megatron_core_still_asks_apex(file: str, text: str) -> None:
    assert text in core_source(file), "megatron-core no longer has this: see whether it can be told otherwise"
