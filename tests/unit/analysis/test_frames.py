"""Step records as a pandas DataFrame."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megafp8
from megafp8.errors import DataError


def test_one_row_for_each_step(write_run: Callable[..., Path]) -> None:
    pytest.importorskip("pandas")
    folder = write_run("run", [4.0, 3.0, 2.5], validations={2: 3.1}, step_fields={"timers_ms": {"forward": 5.0}})
    write_run("run", [2.75], first_step=3, resumed_from_step=2)  # a restart repeats step 3
    frame = megafp8.read_records(folder)
    assert frame.index.name == "step" and list(frame.index) == [1, 2, 3]
    assert list(frame["loss"]) == [4.0, 3.0, 2.75]
    assert frame["valid_loss"].notna().tolist() == [False, True, False] and frame.loc[2, "valid_loss"] == 3.1
    assert frame["timers_ms.forward"].tolist()[:2] == [5.0, 5.0]
    assert {"grad_norm", "memory_peak_bytes", "num_saturated_operands", "test_loss"} <= set(frame.columns)
    assert megafp8.read_records(folder / "records.jsonl").equals(frame)


def test_without_pandas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        megafp8.read_records(tmp_path)


def test_without_records(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(DataError, match=r"no run in .*: there is no records.jsonl"):
        megafp8.read_records(tmp_path)
