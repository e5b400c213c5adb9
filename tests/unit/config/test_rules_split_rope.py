"""When queries, keys and values are split and rotated in one kernel."""

import pytest

from megafp8.config.rules.precision import uses_split_rope_kernel
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values

ROPE = {"model.position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (ROPE, True),
        ({}, False),
        (ROPE | {"model.qk_layernorm": True}, False),
        (ROPE | {"precision.split_rope_fusion": False}, False),
        (ROPE | {"precision.apply_rope_fusion": False}, False),
    ],
)
def test_split_rope_is_on_by_default_where_supported(values: dict, expected: bool) -> None:
    assert uses_split_rope_kernel(with_values(RunConfig(), values)) is expected
