"""What has a GPU's memory: torch's snapshots, their parts, and the table of an out-of-memory error.

A block of torch's allocator belongs to the tensor whose storage starts at its address, so that weights, gradients and
optimizer state are found exactly, whatever made them. Logits are known by their size. What is left are activations and
workspaces of kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megafp8.config.run_sizes import RunSizes, run_sizes
from megafp8.config.schema import RunConfig
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.resources.memory import MemoryEstimate, estimate_memory, logit_elements, saved_layer_bytes
from megafp8.resources.savings import Saving, savings
from megafp8.training.run import Run, run_folder
from megafp8.utils.best_effort import optional_write, reason_of, warn
from megafp8.utils.formatting import text_table

GIB = 1 << 30
SNAPSHOT_FILE = "snapshot.pickle"
MOST_HISTORY_ENTRIES = 100_000  # of some KB each, as in Megatron-LM
ACTIVATIONS = "activations, workspaces"
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
Snapshot = Mapping[str, Any]


class MemoryReport:
    """Takes torch's snapshot of the GPU of this rank at the moment when memory is lacking, and describes it.

    Later, when the error has reached the caller, activations are free already.

    Attributes:
        run: whose tensors are told apart; None while it is built.
        snapshot: of the last lack of memory; None before.
    """

    def __init__(self, config: RunConfig, rank: int):
        self.run: Optional[Run] = None
        self.snapshot: Optional[Snapshot] = None
        self._owners: dict[int, str] = {}
        self._layer_bytes: dict[int, int] = {}
        self.path = snapshot_path(config, rank)
        self._records_history = config.logging.record_memory_history

    def start(self) -> None:
        """Watch for lack of memory, and record the history of allocations if the run asks for it."""
        if self._records_history:
            torch.cuda.memory._record_memory_history(max_entries=MOST_HISTORY_ENTRIES, stacks="python")
        torch._C._cuda_attach_out_of_memory_observer(self._lacks_memory)

    def watch(self, run: Run) -> None:
        """Tell the tensors of a run apart from now on."""
        self.run = run
        if self._records_history:
            measure_layers(run.training_state.chunks, self._layer_bytes, allocated_bytes)

    def describe(self, line: str) -> str:
        """Lines on the parts of the memory when it was lacking; empty if torch did not say that it was, or without a
        run.

        Args:
            line: of the error that says that memory is lacking.
        """
        if self.snapshot is None or self.run is None:
            return ""
        run = self.run
        sizes, expected = sizes_of(run), expected_memory(run)
        parts = parts_of(self.snapshot, self._owners, logit_elements(sizes))
        lines = [
            f"Memory of rank {run.rank_position.rank} when it was lacking, and what the memory model expects:",
            table(parts, expected, bytes_outside_torch(line, sum(parts.values()))),
        ]
        lines += layer_lines(self._layer_bytes, saved_layer_bytes(sizes, implementation=run.implementation))
        if self.path is not None:
            lines.append(f"Snapshot: {self.path}; https://docs.pytorch.org/memory_viz shows it")
        return "".join(f"{line}\n" for line in lines)

    def savings(self) -> list[Saving]:
        """What saves memory in this run, by the memory model; empty without a run."""
        if self.run is None:
            return []
        run = self.run
        size, stage = run.rank_position.world_size, run.rank_position.pipeline_rank
        return savings(run.config, size, run.vocab_size, stage, run.implementation)

    def concerns(self, line: str) -> bool:
        """Whether the memory that is lacking is that of the run's device, by the line of the error that says so."""
        return self.run is not None and (self.run.platform.kind == "cpu" or bool(re.search("cuda|cublas", line, re.I)))

    def _lacks_memory(self, *_: int) -> None:
        """torch calls it before it raises the error. An exception here would take the place of that error."""
        try:
            write_snapshot(self.path)  # first: it needs nothing of the run
            self._owners = {} if self.run is None else owners_of(self.run)
            self.snapshot = torch.cuda.memory._snapshot()
        except Exception as error:
            warn(f"no report on the memory: {reason_of(error)}")


def snapshot_path(config: RunConfig, rank: int) -> Optional[Path]:
    """The file of a rank's snapshots, `snapshot_rank3.pickle`; None if the run writes none."""
    logging = config.logging
    if logging.memory_snapshot_path is None and not logging.record_memory_history:
        return None
    default = (run_folder(config) or Path(".")) / SNAPSHOT_FILE
    path = default if logging.memory_snapshot_path is None else Path(logging.memory_snapshot_path)
    return path.with_name(f"{path.stem}_rank{rank}{path.suffix}")


def write_snapshot(path: Optional[Path]) -> None:
    """Write torch's snapshot of the memory of this process's GPU, if there is a path."""
    if path is not None:
        with optional_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))


def sizes_of(run: Run) -> RunSizes:
    """What the memory model reads of a run."""
    return run_sizes(run.config, run.rank_position.world_size, run.vocab_size)


def expected_memory(run: Run) -> MemoryEstimate:
    """The memory model's estimate for this rank."""
    return estimate_memory(sizes_of(run), stage=run.rank_position.pipeline_rank, implementation=run.implementation)


# ---- Whose memory it is ----------------------------------------------------------------------------------------------


def owners_of(run: Run) -> dict[int, str]:
    """The part to which a storage belongs, by its address."""
    state, owners = run.training_state, dict[int, str]()

    def add(part: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            for address in addresses(tensor):
                owners.setdefault(address, part)

    for chunk in state.chunks:
        # First the buffers of all gradients or weights, since parameters and their gradients are views of them.
        for buffer in ddp_buffers(chunk):
            add("gradients", [buffer.grad_data])
            add("weights", [buffer.param_data])
        add("gradients", (each for p in chunk.parameters() for each in (p.grad, getattr(p, "main_grad", None))))
        add("weights", (*chunk.parameters(), *nn.Module.buffers(chunk)))  # `chunk.buffers` may be a list, see above
        add("weights", (p.codes.raw for p in chunk.parameters() if isinstance(p, QuantizedParameter)))
        for module in chunk.modules():
            add("FP8 copies", getattr(module, "_fp8_workspaces", {}).values())  # of Transformer Engine
    for optimizer in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
        inner = optimizer.optimizer
        add("optimizer", (p for group in inner.param_groups for p in group["params"]))
        add("optimizer", (value for values in inner.state.values() for value in values.values()))
    add("optimizer", state.gradient_residuals)
    return owners


def ddp_buffers(chunk: nn.Module) -> list[Any]:
    """megatron-core's buffers of gradients, and of weights with the distributed optimizer; none under FSDP2."""
    found = vars(chunk)
    return [*found.get("buffers", ()), *found.get("expert_parallel_buffers", ())]


def addresses(tensor: Any) -> Iterator[int]:
    """Addresses of the storages of a tensor; of a quantized one those of its codes and scales."""
    if not isinstance(tensor, Tensor):
        return
    # Transformer Engine's quantized tensors have these in attributes such as `_data` and `_columnwise_scale_inv`; those
    # of a parameter without an underscore are other tensors, such as `main_grad`.
    parts = [part for name, part in getattr(tensor, "__dict__", {}).items() if name.startswith("_")]
    for part in (tensor, *(part for part in parts if isinstance(part, Tensor))):
        try:
            address = part.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper of other tensors
            continue
        if address:
            yield address


def parts_of(snapshot: Snapshot, owners: Mapping[int, str], num_logits: int) -> dict[str, int]:
    """Bytes of each part of torch's memory.

    Args:
        num_logits: elements of the logits of a microbatch on this rank.
    """
    parts = dict[str, int]()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                part = "fragments: reserved, not allocated"
            else:
                is_logits = block.get("requested_size", block["size"]) in (2 * num_logits, 4 * num_logits)
                part = owners.get(block["address"], "logits" if is_logits else ACTIVATIONS)
            parts[part] = parts.get(part, 0) + block["size"]
    return parts


def bytes_outside_torch(line: str, torch_bytes: int) -> dict[str, int]:
    """What this process and others have of the GPU's memory beside `torch_bytes`, as torch's error says by the driver's
    figures; the sum of both where it has none of this process, and empty for other errors."""

    def size_after(words: str) -> Optional[int]:
        found = re.search(f"{words} {SIZE}", line)
        return None if found is None else int(float(found[1]) * UNITS[found[2]])

    capacity, free = size_after("total capacity of"), size_after("of which")
    if capacity is None or free is None:
        return {}
    others = capacity - free - torch_bytes
    of_process = size_after("this process has")
    # The driver's process IDs are the host's: in a container this process has none, or that of a smaller one. Where the
    # driver does not know (a part of a GPU, WSL), its figure is larger than the GPU.
    if of_process is None or not torch_bytes - GIB // 100 <= of_process <= capacity:
        return {"outside of torch, all processes": others}
    own = of_process - torch_bytes
    return {"outside of torch, this process": own, "other processes": others - own}


def table(parts: Mapping[str, int], expected: MemoryEstimate, outside: Mapping[str, int]) -> str:
    """The parts, the largest first, beside the expected ones, then what is outside of torch, in GiB."""
    planned = expected.parts()
    planned[ACTIVATIONS] = planned.pop("activations") + planned.pop("buffers")
    names = sorted({*parts, *(name for name, size in planned.items() if size)}, key=lambda name: -parts.get(name, 0))
    rows = [
        [name, f"{parts.get(name, 0) / GIB:.2f}", f"{planned[name] / GIB:.2f}" if name in planned else ""]
        for name in names
    ]
    total = ["all of torch", f"{sum(parts.values()) / GIB:.2f}", f"{sum(planned.values()) / GIB:.2f}"]
    beside = [[name, f"{max(size, 0) / GIB:.2f}", ""] for name, size in outside.items()]  # the error's are rounded
    return text_table(["part", "GiB", "expected"], [*rows, total, *beside])


# ---- Activations of each layer ---------------------------------------------------------------------------------------


def allocated_bytes() -> int:
    """What tensors of this rank have of its GPU's memory."""
    return torch.cuda.memory_allocated()


def measure_layers(chunks: Iterable[nn.Module], into: dict[int, int], allocated: Callable[[], int]) -> None:
    """Have each layer note the memory that its last forward pass left allocated, by its number from 0."""
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)):
        number, before = layer.layer_number - 1, list[int]()

        def enter(*_: Any, before: list[int] = before) -> None:
            before[:] = [allocated()]

        def leave(*_: Any, number: int = number, before: list[int] = before) -> None:
            if torch._C._current_graph_task_id() == -1:  # else it is a recomputation in the backward pass
                into[number] = allocated() - before[0]

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)


def layer_lines(layer_bytes: Mapping[int, int], expected: int) -> list[str]:
    """Activations of a microbatch by layer, equal neighbours in one line."""
    texts = {number: f"{size / GIB:.3f}" for number, size in sorted(layer_bytes.items())}
    groups = list[tuple[list[int], str]]()
    for number, text in texts.items():
        if groups and groups[-1][1] == text and groups[-1][0][-1] == number - 1:
            groups[-1][0].append(number)
        else:
            groups.append(([number], text))
    return [
        f"activations of a microbatch in layer{'' if len(numbers) == 1 else 's'} "
        f"{numbers[0] if len(numbers) == 1 else f'{numbers[0]}-{numbers[-1]}'}: {text} GiB each, expected "
        f"{expected / GIB:.3f}"
        for numbers, text in groups
    ]
