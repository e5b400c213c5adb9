"""The faults of Transformer Engine that docs/dev/upstream.md shows still exist: one that does not is fixed."""

import pytest
from reproducers import reproducers, wrong_endings
from requirements import require_transformer_engine

require_transformer_engine()

pytestmark = pytest.mark.gpu
NUMBERS = [number for number, (library, _) in enumerate(reproducers()) if library == "Transformer Engine on a GPU"]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_fault_still_exists(number: int) -> None:
    assert wrong_endings([number]) == []
