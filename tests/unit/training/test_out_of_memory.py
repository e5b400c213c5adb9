"""Lack of memory: how it is recognized, and what the error of a run says."""

from __future__ import annotations

import ctypes
import resource
import types

import pytest
import torch

from megafp8.config import flags
from megafp8.errors import DataError, OutOfMemory
from megafp8.resources.savings import Saving
from megafp8.training import out_of_memory
from megafp8.training.memory_report import MemoryReport
from megafp8.training.out_of_memory import M_ARENA_MAX, check_limits, suggestions_on_memory
from megafp8.utils.memory import cause, is_out_of_memory

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.80 GiB\nSee the manual")
CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
NCCL = RuntimeError("NCCL error in: /torch/csrc, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'")
FLAGS = "--model-preset tiny --micro-batch-size 4 --global-batch-size 4 --train-iters 2 --lr 1e-3 --bf16 --mock-data"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CUDA, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.80 GiB"),
        (CPU, str(CPU)),
        (MemoryError(), "MemoryError"),
        (NCCL, "Cuda failure 2 'out of memory'"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ""),
    ],
)
def test_lack_of_memory_is_distinguished_from_other_errors(error: Exception, line: str) -> None:
    assert (cause(error), is_out_of_memory(error)) == (line, line != "")


@pytest.mark.parametrize(
    ("extra", "suggestions"),
    [
        ("", ["a smaller --micro-batch-size than 4", "--recompute-activations", "more tensor-"]),
        ("--micro-batch-size 1", ["--recompute-activations", "more tensor-"]),
        ("--micro-batch-size auto --recompute-activations", ["more tensor-"]),
        (
            "--micro-batch-size 1 --recompute-activations --cuda-graph-impl local",
            ["--cuda-graph-impl none", "more tensor-"],
        ),
    ],
)
def test_only_settings_that_would_help_are_named(extra: str, suggestions: list[str]) -> None:
    with pytest.raises(OutOfMemory) as raised, suggestions_on_memory(flags.parse(f"{FLAGS} {extra}".split()).config):
        raise CUDA
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("CUDA out of memory. Tried") and lines[-1].startswith("--dry-run estimates")
    found = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    assert len(found) == len(suggestions)
    assert all(line.startswith(suggestion) for line, suggestion in zip(found, suggestions, strict=True))
    assert raised.value.__cause__ is CUDA


class Report:
    """The used part of a `MemoryReport` on a run with GPUs."""

    run = types.SimpleNamespace(platform=types.SimpleNamespace(kind="cuda"))
    concerns = MemoryReport.concerns

    def describe(self, line: str) -> str:
        return "parts\n"

    def savings(self) -> list[Saving]:
        return [Saving("--micro-batch-size 2", 1 << 30)]


@pytest.mark.parametrize(
    ("error", "is_of_device"),
    [
        (CUDA, True), (NCCL, True), (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (CPU, False), (MemoryError(), False), (RuntimeError("can't start new thread"), False),
    ],
)  # fmt: skip
def test_what_saves_memory_of_the_gpu_is_no_help_for_the_host(error: Exception, is_of_device: bool) -> None:
    with pytest.raises(OutOfMemory) as raised, suggestions_on_memory(flags.parse(FLAGS.split()).config, Report()):
        raise error
    assert ("parts" in str(raised.value), "by the memory model" in str(raised.value)) == (is_of_device, is_of_device)


@pytest.mark.parametrize("part", ["describe", "savings"])
def test_a_report_that_fails_does_not_take_the_place_of_the_error(part: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Report, part, lambda self, *line: {}["layers"])
    config = flags.parse(FLAGS.split()).config
    with pytest.raises(OutOfMemory, match="Tried to alloc") as raised, suggestions_on_memory(config, Report()):
        raise CUDA
    assert raised.value.__cause__ is CUDA and "more tensor-" in str(raised.value)
    assert capsys.readouterr().out == "warning: no report on the memory: KeyError: 'layers'\n"


def test_the_end_of_a_failed_capture_does_not_hide_the_cause() -> None:
    with (
        pytest.raises(OutOfMemory, match="Tried to allocate"),
        suggestions_on_memory(flags.parse(FLAGS.split()).config),
    ):
        try:
            raise CUDA
        finally:
            raise RuntimeError("the operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    "error", [DataError("A data loader process died: the machine may be out of memory"), KeyError("layers")]
)
def test_other_errors_are_kept(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, suggestions_on_memory(flags.parse(FLAGS.split()).config):
        try:
            raise CUDA
        except RuntimeError:
            raise error from None
    assert raised.value is error


@pytest.mark.parametrize(("headroom_gib", "calls"), [(4, [(M_ARENA_MAX, 1)]), (512, [])])
def test_threads_share_a_heap_only_with_little_memory(
    headroom_gib: int, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    library = types.SimpleNamespace(mallopt=lambda *values: found.append(values))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(out_of_memory, "limits", lambda: iter(["ulimit -v 1"]))
    monkeypatch.setattr(out_of_memory, "fits", lambda num_bytes: num_bytes <= headroom_gib << 30)
    check_limits()
    del library.mallopt  # a C library other than glibc
    check_limits()
    assert found == calls


def test_the_limit_of_a_stack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(out_of_memory, "fits", lambda _: False)
    with pytest.raises(OutOfMemory, match=r"ulimit -v 1048576 .* 65536 MiB, .* ulimit -s 1048576$"):
        check_limits()
