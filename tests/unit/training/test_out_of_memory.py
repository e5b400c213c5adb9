"""Lack of memory: how it is recognized, and what the error of a run says."""

from __future__ import annotations

import pytest
import torch

from megafp8.config import flags
from megafp8.errors import DataError, OutOfMemory
from megafp8.training import pretrain
from megafp8.training.out_of_memory import explain_out_of_memory, is_out_of_memory

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.80 GiB\nSee the manual")
FLAGS = "--model-preset tiny --micro-batch-size 4 --global-batch-size 4 --train-iters 2 --lr 1e-3 --bf16 --mock-data"


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (CUDA, True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("NCCL error: ... Cuda failure 2 'out of memory'"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_lack_of_memory_is_distinguished_from_other_errors(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it
    assert isinstance(explain_out_of_memory(error, flags.parse(FLAGS.split()).config), OutOfMemory) == is_it


@pytest.mark.parametrize(
    ("extra", "fixes"),
    [
        ("", "a smaller --micro-batch-size than 4, or auto, which finds the largest that fits or --recompute-"),
        ("--micro-batch-size 1", "--recompute-granularity selective or full or more model-parallel ranks"),
        ("--micro-batch-size auto --recompute-activations", "more model-parallel ranks"),
        ("--micro-batch-size 1 --recompute-activations --cuda-graph-impl local", "--cuda-graph-impl none"),
    ],
)
def test_only_flags_that_would_help_are_named(extra: str, fixes: str) -> None:
    config = flags.parse(f"{FLAGS} {extra}".split()).config
    first, second = str(explain_out_of_memory(CUDA, config)).splitlines()
    assert first == "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.80 GiB"
    assert second.startswith(f"Use {fixes}")


def test_the_end_of_a_failed_capture_does_not_hide_the_cause() -> None:
    try:
        try:
            raise CUDA
        finally:
            raise RuntimeError("the operation failed due to a previous error during capture")
    except RuntimeError as error:
        found = explain_out_of_memory(error, flags.parse(FLAGS.split()).config)
    assert str(found).startswith("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_an_error_with_its_own_fix_is_kept() -> None:
    error = DataError("A data loader process died: the machine may be out of memory")
    assert explain_out_of_memory(error, flags.parse(FLAGS.split()).config) is error


def test_a_run_that_ran_out_of_memory_ends_with_the_advice() -> None:
    with (
        pytest.raises(OutOfMemory, match="--micro-batch-size than 4") as raised,
        pretrain.guarded(flags.parse(FLAGS.split()).config),
    ):
        raise CUDA
    assert raised.value.__cause__ is CUDA
