"""Tensors from files and generated tensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.errors import CapabilityError, DataError
from megafp8.metrics.recipe_comparison import load_tensor_file, sample_distribution


def test_normal_numbers() -> None:
    values = sample_distribution("normal:300x400")
    assert values.shape == (300, 400)
    assert values.dtype == torch.bfloat16
    assert values.float().std().item() == pytest.approx(1, abs=0.02)
    assert sample_distribution("normal:300x400:0.02").float().std().item() == pytest.approx(0.02, rel=0.02)


def test_a_seed_determines_the_tensor() -> None:
    assert torch.equal(sample_distribution("outliers:8x600", 3), sample_distribution("outliers:8x600", 3))
    assert not torch.equal(sample_distribution("outliers:8x600", 3), sample_distribution("outliers:8x600", 4))


@pytest.mark.parametrize(("columns", "num_outliers"), [(16, 1), (511, 1), (1024, 2), (2048, 4)])
@pytest.mark.parametrize(("given", "factor"), [("", 10_000), (":1e3", 1e3)])
def test_outliers_fill_some_columns(columns: int, num_outliers: int, given: str, factor: float) -> None:
    deviations = sample_distribution(f"outliers:200x{columns}{given}").float().std(dim=0)
    large = deviations > 10
    assert large.sum() == num_outliers
    assert deviations[large].mean().item() == pytest.approx(factor, rel=0.2)
    assert deviations[~large].mean().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    "source",
    ["normal:", "normal:4", "normal:0x4", "normal:4x0", "normal:4x4x4", "outliers:4x4:0", "outliers:4x4:e",
     "cauchy:4x4", "normal:4x4:1.2.3", "normal:4x4:1e999", "normal:-4x4"],
)  # fmt: skip
def test_other_distributions_are_refused_with_an_example(source: str) -> None:
    with pytest.raises(DataError, match="use normal:ROWSxCOLUMNS.*for example"):
        sample_distribution(source)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", torch.float16), ("float32", torch.float32), ("float64", torch.float32)]
)
def test_npy(tmp_path: Path, dtype: str, expected: torch.dtype) -> None:
    values = np.arange(6, dtype=dtype).reshape(2, 3)
    np.save(tmp_path / "x.npy", values)
    ((name, tensor),) = load_tensor_file(tmp_path / "x.npy").items()
    assert name == "x"
    assert tensor.dtype == expected
    assert tensor.tolist() == values.tolist()


def test_a_single_tensor_may_have_any_shape(tmp_path: Path) -> None:
    torch.save(torch.ones(5, dtype=torch.bfloat16), tmp_path / "x.pt")
    assert load_tensor_file(tmp_path / "x.pt")["x"].dtype == torch.bfloat16


def test_a_dictionary_gives_its_matrices_or_the_requested_tensors(tmp_path: Path) -> None:
    state = {
        "model": {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(2), "empty": torch.ones(0, 3)},
        "ids": torch.ones(2, 3, dtype=torch.int64), "step": 7,
    }  # fmt: skip
    torch.save(state, tmp_path / "x.pt")
    assert list(load_tensor_file(tmp_path / "x.pt")) == ["model.fc.weight"]
    assert list(load_tensor_file(tmp_path / "x.pt", "*.bias")) == ["model.fc.bias"]
    with pytest.raises(DataError, match=r"whose name matches 'ids'; its tensors: .*ids \[2, 3\] int64"):
        load_tensor_file(tmp_path / "x.pt", "ids")


class Custom:
    """An object that only code could create from a file."""


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    torch.save(Custom(), tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    for name in ("cut.npy", "cut.pt", "text.txt"):
        (tmp_path / name).write_bytes(b"\x93NUM")
    for name in ("code.pt", "list.pt", "objects.npy", "cut.npy", "cut.pt", "text.txt", "absent.pt"):
        with pytest.raises(DataError) as caught:
            load_tensor_file(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is not None, reason="safetensors is installed")
def test_safetensors_without_its_library(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(CapabilityError, match="pip install safetensors"):
        load_tensor_file(tmp_path / "x.safetensors")


def test_safetensors(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}, tmp_path / "x.safetensors")
    assert list(load_tensor_file(tmp_path / "x.safetensors")) == ["a.weight"]
    (tmp_path / "bad.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(DataError, match="cannot be read as .safetensors"):
        load_tensor_file(tmp_path / "bad.safetensors")
