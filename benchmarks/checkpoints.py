"""Saving and loading checkpoints: comparison with megatron-core on the same state, cost and benefit of the hashes.

    python benchmarks/checkpoints.py [--folder DIR] [--use-distributed-optimizer] [--rounds 10] [--mutations 200]

One CPU rank, BF16 weights with FP32 master weights and moments; the sides alternate. `without hashes` is megafp8 with
torch's CRC-32 instead of SHA-256, and without reading every byte before a load. megatron-core saves the same state with
`torch_dist` and its default writers, forked processes whose CPU time is counted. Each side syncs its files.

Then checkpoints are written while training continues (`--async-save`; for megatron-core the caller that forks, because
the persistent one needs a GPU). The stall is the time in which no step runs: until training continues, and at the next
update until the copy is complete. Steps during a save are compared with steps without one. Finally single bits are
flipped in a small checkpoint: a side refuses it, loads the saved values (the bit was padding), or silently loads other
values.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from benchmarks.in_process import add_size_options, command_line, end_runs, start_run

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # isort: skip
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # isort: skip
from megatron.core.safe_globals import register_safe_globals  # isort: skip

from megafp8.checkpoint import writer
from megafp8.checkpoint.async_save import AsyncSaver
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import read_tensors
from megafp8.checkpoint.manifest import MANIFEST, check_complete, find_damage, read_manifest
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import build_state_dict, save_checkpoint
from megafp8.checkpoint.state_dict import model_state, optimizer_state, sharding_metadata
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import train_step

OURS, UNHASHED, PLAIN = "megafp8", "megafp8, without hashes", "megatron-core"
SMALL = argparse.Namespace(
    num_layers=1, hidden_size=64, num_attention_heads=2, seq_length=16, vocab_size=64, micro_batch_size=1,
    global_batch_size=1,
)  # fmt: skip
PROGRESS = Progress(1, 1)


class NoDigest:
    """In the place of SHA-256: does nothing."""

    def update(self, content: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64


def started(text: str) -> Run:
    """A run after its first step: before, the optimizer has no moments."""
    run = start_run(text)
    train_step(run, build_batches(run, run.datasets[0], 0, run.global_batch_size, num_workers=0), Progress())
    return run


def save_plain(run: Run, path: Path) -> None:
    """megatron-core's own way; the distributed optimizer's state is gathered as it does."""
    path.mkdir(parents=True)
    state = build_state_dict(run.config, run.training_state, PROGRESS, None)
    if run.config.parallel.use_distributed_optimizer:
        model = model_state(run.training_state.chunks)
        metadata = sharding_metadata(run.training_state.chunks)
        state["optimizer"] = run.training_state.optimizer.sharded_state_dict(model, metadata=metadata)
    dist_checkpointing.save(state, str(path), TorchDistSaveShardedStrategy("torch_dist", 1))


def wanted_state(run: Run) -> dict[str, Any]:
    """What a run asks of a checkpoint."""
    model = model_state(run.training_state.chunks)
    return model | {"optimizer": optimizer_state(run.training_state, model, is_loading=True)}


def with_children_ms(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU time of this process and of its children that have ended."""

    def cpu_s() -> float:
        uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(use.ru_utime + use.ru_stime for use in uses)

    wall, cpu = time.perf_counter(), cpu_s()
    run()
    return (time.perf_counter() - wall) * 1e3, (cpu_s() - cpu) * 1e3


def compare_saves(run: Run, folder: Path, rounds: int) -> dict[str, timing.Times]:
    """Times of a save. Every one writes to a folder that is not there yet."""

    def ours() -> None:
        save_checkpoint(folder / "ours", run.config, run.training_state, PROGRESS)

    def unhashed() -> None:
        no_digest = mock.patch.object(writer, "hashlib", SimpleNamespace(sha256=NoDigest))
        with no_digest, mock.patch.object(writer, "no_checksum", nullcontext):
            save_checkpoint(folder / "unhashed", run.config, run.training_state, PROGRESS)

    def timed(save: Callable[[], Any]) -> tuple[float, float]:
        for old in folder.iterdir():
            shutil.rmtree(old)
        return with_children_ms(save)

    sides = {OURS: ours, UNHASHED: unhashed, PLAIN: lambda: save_plain(run, folder / "plain")}
    for save in sides.values():
        timed(save)
    return timing.take_turns(sides, rounds=rounds, warmup=0, times_ms=timed)


class Stalls:
    """A side that saves while training goes on, and the training beside it.

    Attributes:
        stall_ms: of each save.
        stall_cpu_ms: of the training thread meanwhile; what it only waited for is not in it.
        slowed_ms: how much longer the steps took that ran while it was under way, together.
    """

    def __init__(self, run: Run, folder: Path, begin: Callable[[Path], Callable[[], bool]]):
        """
        Args:
            begin: starts a save to a folder; what it returns ends a finished save and says whether it has.
        """
        self.run, self.folder, self.begin = run, folder, begin
        samples = run.datasets[0]
        self.batches = build_batches(run, samples, 0, len(samples), num_workers=0)
        self.stall_ms: list[float] = []
        self.stall_cpu_ms: list[float] = []
        self.slowed_ms: list[float] = []
        self.step_ms = [timing.own_times_ms(self.step)[0] for _ in range(5)]

    def step(self) -> None:
        train_step(self.run, self.batches, PROGRESS)

    def save(self) -> None:
        """One save beside as many steps as it takes, after a step without."""
        self.step_ms.append(timing.own_times_ms(self.step)[0])
        wall, cpu = time.perf_counter(), time.thread_time()
        has_ended = self.begin(self.folder)
        stall_s, cpu_s = time.perf_counter() - wall, time.thread_time() - cpu
        waits, waited_ms, steps_ms, is_over = self.run.training_state.pending_copies[:], [0.0], [], False
        self.run.training_state.pending_copies[:] = [
            lambda: waited_ms.append(timing.own_times_ms(lambda: [wait() for wait in waits])[0])
        ]
        while not is_over:
            steps_ms.append(timing.own_times_ms(self.step)[0])
            wall, cpu = time.perf_counter(), time.thread_time()
            is_over = has_ended()
            stall_s, cpu_s = stall_s + time.perf_counter() - wall, cpu_s + time.thread_time() - cpu
        self.stall_ms.append(stall_s * 1e3 + sum(waited_ms))
        self.stall_cpu_ms.append(cpu_s * 1e3)
        self.slowed_ms.append(sum(steps_ms) - sum(waited_ms) - len(steps_ms) * statistics.median(self.step_ms))


def begin_ours(run: Run) -> Callable[[Path], Callable[[], bool]]:
    saves = AsyncSaver(run.config, run.training_state, timeout_s=300, device=run.platform.device)

    def begin(folder: Path) -> Callable[[], bool]:
        under_way = saves.begin(folder / "ours", PROGRESS)
        return lambda: under_way.poll() is not None

    return begin


def begin_plain(run: Run) -> Callable[[Path], Callable[[], bool]]:
    queue = AsyncCallsQueue(persistent=False)

    def begin(folder: Path) -> Callable[[], bool]:
        path = folder / "plain"
        path.mkdir(parents=True)
        state = build_state_dict(run.config, run.training_state, PROGRESS, None)
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        queue.schedule_async_request(dist_checkpointing.save(state, str(path), strategy, async_sharded_save=True))

        def has_ended() -> bool:
            queue.maybe_finalize_async_calls(blocking=False)
            return queue.get_num_unfinalized_calls() == 0

        return has_ended

    return begin


def compare_stalls(run: Run, folder: Path, rounds: int) -> dict[str, Any]:
    """Saves beside training, in turns with saves instead of it."""
    sides = {OURS: Stalls(run, folder, begin_ours(run)), PLAIN: Stalls(run, folder, begin_plain(run))}
    saves = timing.Times()

    def clear() -> None:
        for old in folder.iterdir():
            shutil.rmtree(old)

    for number in range(rounds + 1):
        clear()
        wall_ms, cpu_ms = timing.own_times_ms(
            lambda: save_checkpoint(folder / "now", run.config, run.training_state, PROGRESS)
        )
        for side in sides.values():
            clear()
            side.save()
        if number:  # the first saves make their memory
            saves.extend(timing.Times([wall_ms], [cpu_ms]))
    return {"save": saves} | {
        name: {
            "stalls": timing.Times(side.stall_ms[1:], side.stall_cpu_ms[1:]),
            "slowed_ms": side.slowed_ms[1:], "step_ms": side.step_ms,
        }
        for name, side in sides.items()
    }  # fmt: skip


def show_stalls(found: dict[str, Any]) -> None:
    save, rows = found["save"], []
    for name in (OURS, PLAIN):
        stalls, slowed = found[name]["stalls"], found[name]["slowed_ms"]
        both = [stall + slow for stall, slow in zip(stalls.wall_ms, slowed, strict=True)]
        rows.append(
            (name, stalls.median_wall_ms, timing.ratio_of(stalls.wall_ms, save.wall_ms), stalls.median_cpu_ms,
             timing.ratio_of(stalls.cpu_ms, save.cpu_ms), statistics.median(slowed),
             timing.ratio_of(both, save.wall_ms))
        )  # fmt: skip
    print(f"a save instead of training: {save.median_wall_ms:.0f} ms, {save.median_cpu_ms:.0f} ms of CPU time")
    header = ("save beside training", "stall ms", "to a save", "CPU ms", "to a save", "steps slower by ms", "both")
    print(timing.format_table(header, rows) + "\n")


def compare_loads(run: Run, path: Path, rounds: int) -> dict[str, timing.Times]:
    """Times of a restore."""

    def read() -> None:
        read_tensors(path, wanted_state(run), run.training_state.chunks, ["model"])

    def checked() -> None:
        check_complete(path)
        read()

    def plain() -> None:
        state = dist_checkpointing.load(wanted_state(run), str(path), strict="return_unexpected")[0]
        run.training_state.chunks[0].module.load_state_dict(state["model"], strict=False)

    return timing.take_turns({OURS: checked, UNHASHED: read, PLAIN: plain}, rounds=rounds, warmup=1)


def show_times(title: str, times: dict[str, timing.Times], num_bytes: int) -> None:
    ratios = timing.ratios_to(UNHASHED, times)
    rows = [
        (name, each.median_wall_ms, each.median_cpu_ms, num_bytes / 1e3 / each.median_wall_ms,
         ratios[name]["wall"], ratios[name]["cpu"])
        for name, each in times.items()
    ]  # fmt: skip
    header = (title, "wall ms", "CPU ms", "MB/s", "wall, to without hashes", "CPU")
    print(timing.format_table(header, rows) + "\n")


# --- flipped bits -----------------------------------------------------------------------------------------------------


def loaded_bytes(run: Run, path: Path) -> bytes:
    """Everything that plain megatron-core loads."""
    state = dist_checkpointing.load(wanted_state(run), str(path), strict="return_unexpected")[0]
    leaves = [leaf for leaf in nested_values(state) if isinstance(leaf, (torch.Tensor, int, float, str))]
    parts = (leaf.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(leaf, torch.Tensor)
             and leaf.dim() else repr(leaf).encode() for leaf in leaves)  # fmt: skip
    return b"|".join(parts)


def outcome_of_plain(run: Run, path: Path, truth: bytes) -> str:
    try:
        return "harmless" if loaded_bytes(run, path) == truth else "silently wrong"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "refused"


def flip_bits(run: Run, path: Path, count: int) -> dict[str, Counter[str]]:
    """Outcomes of `count` flips, as many in each file, for both sides."""
    outcomes: dict[str, Counter[str]] = {OURS: Counter(), PLAIN: Counter()}
    names = sorted(name.name for name in path.iterdir() if name.name != MANIFEST)
    truth, generator = loaded_bytes(run, path), random.Random(0)
    for number in range(count):
        file = path / names[number % len(names)]
        before = file.read_bytes()
        offset = generator.randrange(len(before))
        file.write_bytes(before[:offset] + bytes([before[offset] ^ 1 << generator.randrange(8)]) + before[offset + 1 :])
        outcomes[OURS]["refused" if find_damage(path) else "silently wrong"] += 1
        outcomes[PLAIN][outcome_of_plain(run, path, truth)] += 1
        file.write_bytes(before)
    return outcomes


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size_options(
        parser, num_layers=8, hidden_size=512, num_attention_heads=8, seq_length=64, vocab_size=8192,
        micro_batch_size=1, global_batch_size=1,
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where to write; default a new one for temporary files")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--mutations", type=int, default=200, help="bits to flip; default 200")
    parser.add_argument("--json", type=Path, metavar="F", help="write the result to F")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    register_safe_globals()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, extra = Path(name), "--bf16 --transformer-impl local"
        extra += " --use-distributed-optimizer" if options.use_distributed_optimizer else ""
        (folder / "saves").mkdir()
        run = started(command_line(options, train_iters=10, extra=extra))
        saves = compare_saves(run, folder / "saves", options.rounds)
        path = save_checkpoint(folder, run.config, run.training_state, PROGRESS)
        num_bytes = read_manifest(path).num_bytes
        print(f"a checkpoint of {num_bytes / 1e6:.0f} MB\n")
        show_times("save", saves, num_bytes)
        loads = compare_loads(run, path, options.rounds)
        show_times("restore", loads, num_bytes)
        stalls = compare_stalls(run, folder / "saves", options.rounds)
        show_stalls(stalls)
        end_runs()
        small = started(command_line(SMALL, train_iters=10, extra=extra))
        save_checkpoint(folder / "small", small.config, small.training_state, PROGRESS)
        outcomes = flip_bits(small, checkpoint_path(folder / "small", PROGRESS.step), options.mutations)
        kinds = ("refused", "harmless", "silently wrong")
        rows = [(side, *(counts[kind] for kind in kinds)) for side, counts in outcomes.items()]
        print(timing.format_table((f"{options.mutations} flipped bits", *kinds), rows))
        end_runs()
    if options.json:
        found = {"bytes": num_bytes, "save": saves, "restore": loads, "stalls": stalls, "flips": outcomes}
        timing.write_json(options.json, found)


if __name__ == "__main__":
    main()
