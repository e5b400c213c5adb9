"""Studies of runs that are never trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.launch.study import Study, read_study

COMMON = (
    "--num-layers 2 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 4 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255"
)


@pytest.fixture
def write_study(tmp_path: Path) -> Callable[..., Study]:
    """Writes a study's file and reads it. Its folder is `study` in the test's folder."""

    def write(text: str, common: str = COMMON) -> Study:
        path = tmp_path / "small.yaml"
        path.write_text(f"flags: {common}\n{text}", encoding="utf-8")
        return read_study(path, tmp_path / "study")

    return write
