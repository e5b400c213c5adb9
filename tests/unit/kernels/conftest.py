from __future__ import annotations

import interpreter
import pytest


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are interpreted, they round to BF16 as a GPU does."""
    if interpreter.IS_INTERPRETED:
        interpreter.exact_bf16(monkeypatch)
        interpreter.constants_before_tensors(monkeypatch)
