"""megatron-core still pickles the state of grouped linears; `tests/gpu/test_grouped_experts.py` saves and loads it."""

from __future__ import annotations

import pytest

from megafp8.mcore import grouped_state, patches


@pytest.mark.parametrize(("file", "text"), grouped_state.EVIDENCE)
def test_the_faults_are_still_there(file: str, text: str) -> None:
    assert text in (patches.core_folder() / file).read_text(encoding="utf-8")
