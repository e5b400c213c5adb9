from __future__ import annotations

import interpreter
import pytest


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are interpreted, they round to BF16 as a GPU does."""
    if interpreter.IS_INTERPRETED:
        interpreter.make_exact(monkeypatch)
