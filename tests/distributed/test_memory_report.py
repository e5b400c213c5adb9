"""What an out-of-memory error says about the memory of a run, with a snapshot as torch would take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_run import build_run, small_config, train

from megafp8.errors import OutOfMemory
from megafp8.training.memory_report import (
    ACTIVATIONS,
    MemoryReport,
    bytes_outside_torch,
    expected_memory,
    measure_layers,
    owners_of,
    parts_of,
    table,
)
from megafp8.training.out_of_memory import suggestions_on_memory
from megafp8.training.run import Run

LINE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 512.00 MiB is "
    "free. Process 71 has 99.00 GiB memory in use. Including non-PyTorch memory, this process has 13.65 GiB memory in "
    "use. Of the allocated memory 5.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch."
)
OF_PROCESS = "Including non-PyTorch memory, this process has 13.65 GiB memory in use. "
CUDA = torch.OutOfMemoryError(f"{LINE}\nSee the manual")
LOGITS, OTHER, FREE = 1 << 40, (1 << 40) + 1, (1 << 40) + 2


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state}


def snapshot_of(run: Run) -> dict[str, Any]:
    """The storages of a run as blocks of torch's allocator, with logits, an activation and free memory beside them."""
    state = run.training_state
    tensors = [*state.chunks[0].parameters(), *(p.main_grad for p in state.chunks[0].parameters())]
    inner = getattr(state.optimizer, "chained_optimizers", [state.optimizer])[0].optimizer
    tensors += [p for group in inner.param_groups for p in group["params"]]
    tensors += [each for values in inner.state.values() for each in values.values() if isinstance(each, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    num_logits = 4 * 32 * run.vocab_size
    blocks = [block(*storage) for storage in storages.items()]
    blocks += [block(LOGITS, 4 * num_logits), block(OTHER, 5 << 30), block(FREE, 1 << 30, "inactive")]
    return {"segments": [{"blocks": blocks}]}


@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --use-distributed-optimizer"])
def test_storages_have_the_sizes_that_the_memory_model_expects(flags: str) -> None:
    def measure() -> tuple[dict[str, int], dict[str, int]]:
        run = build_run(small_config("llama", flags))
        train(run, 1)
        return parts_of(snapshot_of(run), owners_of(run), 4 * 32 * run.vocab_size), expected_memory(run).parts()

    ((parts, expected),) = run_ranks(1, measure)
    for part in ("weights", "gradients", "optimizer"):
        assert parts[part] == pytest.approx(expected[part], rel=0.02), part  # padding of buffers, counts of steps
    assert parts[ACTIVATIONS] == 5 << 30 and parts["fragments: reserved, not allocated"] == 1 << 30
    assert parts["logits"] == 4 * 4 * 32 * 256


def test_the_error_names_the_owners_and_the_flag_that_saves_most() -> None:
    def lack_memory() -> str:
        config = small_config("llama", "--bf16")
        report, run = MemoryReport(config, 0), build_run(config)
        train(run, 1)
        report.watch(run)
        with suggestions_on_memory(config, report):
            report.snapshot, report._owners = snapshot_of(run), owners_of(run)  # torch's observer of CUDA
            report._layer_bytes.update({0: 1 << 29, 1: 1 << 29})
            raise CUDA
        raise AssertionError

    def text() -> str:
        try:
            return lack_memory()
        except OutOfMemory as error:
            return str(error)

    (message,) = run_ranks(1, text)
    lines = message.splitlines()
    assert lines[0].startswith("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert lines[1] == "Memory of rank 0 when it was lacking, and what the memory model expects:"
    rows = [" ".join(line.split()) for line in lines[4 : lines.index("These need less memory:")]]
    assert rows[0].startswith(f"{ACTIVATIONS} 5.00 0.00") and rows[1].startswith(
        "fragments: reserved, not allocated 1."
    )
    assert rows[-4].startswith("all of torch 6.0")
    assert rows[-3].startswith("outside of torch, this process 7.6") and rows[-2] == "other processes 125.65"
    assert rows[-1].startswith("activations of a microbatch in layers 0-1: 0.500 GiB each, expected 0.000")
    flags = [line for line in lines if line.startswith("  - --") and line.endswith("by the memory model")]
    assert flags and flags[0].startswith("  - --micro-batch-size 2: ")


@pytest.mark.parametrize(
    "flags", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
def test_layers_note_what_their_forward_pass_left(flags: str) -> None:
    """Not what a recomputation in the backward pass leaves, where there are more calls in between."""

    def measure() -> dict[int, int]:
        run, noted, allocated = build_run(small_config("llama", flags)), dict[int, int](), iter(range(10_000))
        measure_layers(run.training_state.chunks, noted, lambda: next(allocated) ** 2)
        train(run, 1)
        return noted

    (noted,) = run_ranks(1, measure)
    # Calls of the last microbatch: two microbatches of two layers, with a call before and after each.
    is_recomputed = bool(flags)
    first = 4 if not is_recomputed else 6
    assert noted == {0: (first + 1) ** 2 - first**2, 1: (first + 3) ** 2 - (first + 2) ** 2}


def test_the_table_names_parts_that_only_one_side_has() -> None:
    def text() -> str:
        return table({ACTIVATIONS: 3 << 30}, expected_memory(build_run(small_config("llama"))), {})

    (found,) = run_ranks(1, text)
    rows = {line.split("  ")[0]: line.split()[-2:] for line in found.splitlines()[2:]}
    assert rows[ACTIVATIONS][0] == "3.00" and rows["weights"][0] == "0.00"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (LINE, {"outside of torch, this process": 7.65, "other processes": 125.65}),
        (LINE.replace(OF_PROCESS, ""), {"outside of torch, all processes": 133.3}),  # in a container
        (LINE.replace("13.65 GiB", "154.00 MiB"), {"outside of torch, all processes": 133.3}),  # another one of this ID
        (LINE.replace("13.65", "17179869184.00"), {"outside of torch, all processes": 133.3}),  # WSL
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", {}),
    ],
)
def test_what_torch_does_not_have_is_that_of_the_driver(line: str, expected: dict[str, float]) -> None:
    found = bytes_outside_torch(line, 6 << 30)
    assert {name: size / (1 << 30) for name, size in found.items()} == pytest.approx(expected)
