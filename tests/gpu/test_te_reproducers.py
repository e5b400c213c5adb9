"""The faults of Transformer Engine that docs/upstream.md shows still exist: one that does not is fixed."""

import importlib.util

import pytest
import torch
from reproducers import reproducers, wrong_endings

if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
    pytest.skip("needs Transformer Engine and a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NUMBERS = [number for number, (library, _) in enumerate(reproducers()) if library == "Transformer Engine on a GPU"]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_fault_still_exists(number: int) -> None:
    assert wrong_endings([number]) == []
