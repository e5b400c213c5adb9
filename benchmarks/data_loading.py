"""Data loading: time to build the index before the first batch, and throughput of the loader.

    python benchmarks/data_loading.py [--rounds 5] [--json FILE]

Index: a shard of 10 billion tokens in 10 million documents, with a real .idx and a sparse .bin of the right size, is
checked, indexed for one epoch at sequence length 2048, and opened again from the cache; then with `--packing best-fit`.
This runs in a separate process, whose memory is reported without that of the imports.

Loader: microbatches of 4 x 2048 tokens in random order from a shard of 64 million tokens in the page cache, read in the
main process and by loader processes, alternating with megatron-core's dataset under the same loader. Documents have
1000 or 100 tokens. Bar: 2 million tokens/s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing

SEQ_LENGTH, MICRO_BATCH, VOCAB_SIZE = 2048, 4, 50_000
BAR_TOKENS_PER_S = 2e6
MIB = 1 << 20


def lengths_of(num_documents: int, mean: int) -> np.ndarray:
    """Lengths of documents, int32, spread as those of web pages are: most short, some very long."""
    generator = np.random.default_rng(0)
    spread = generator.lognormal(0, 1, num_documents)
    return np.maximum(1, spread * (mean / spread.mean())).astype(np.int32)


def write_hollow_shard(prefix: Path, lengths: np.ndarray) -> None:
    """A shard with these lengths, all of whose tokens are 0 and take no room on the disk."""
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * int(lengths.sum(dtype=np.int64)))
    write_index_of(prefix, lengths)


def write_random_shard(prefix: Path, lengths: np.ndarray) -> None:
    """A shard with these lengths and random tokens."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, int(lengths.sum()), np.uint16)
    tokens.tofile(f"{prefix}.bin")
    write_index_of(prefix, lengths)


def write_index_of(prefix: Path, lengths: np.ndarray) -> None:
    """The index of documents of these lengths."""
    from megafp8.data.shards import build_document_index, write_index

    with open(f"{prefix}.idx", "wb") as stream:
        write_index(stream, [build_document_index(lengths, np.dtype(np.uint16))])


def build(prefix: Path, cache: Path, num_samples: int, packing: str = "cut") -> Any:
    """The training dataset of a shard."""
    from megafp8.config.schema import DataConfig
    from megafp8.data.datasets import build_datasets
    from megafp8.data.tokenizers.build import build_tokenizer

    data = DataConfig(
        data_path=(str(prefix),), split="1", seq_length=SEQ_LENGTH, data_cache_path=str(cache),
        tokenizer_type="NullTokenizer", packing=packing,
    )  # fmt: skip
    tokenizer = build_tokenizer(data, VOCAB_SIZE)
    return build_datasets(data, tokenizer, (num_samples, 0, 0), seed=1234)[0]


def megatron_dataset(prefix: Path, cache: Path, num_samples: int) -> Any:
    """The same of megatron-core alone."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megafp8.config.schema import DataConfig
    from megafp8.data.tokenizers.build import build_tokenizer

    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=SEQ_LENGTH, path_to_cache=str(cache), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        tokenizer=build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), VOCAB_SIZE),
    )  # fmt: skip
    shard = IndexedDataset(str(prefix))
    documents = np.arange(len(shard), dtype=np.int32)
    return GPTDataset(shard, str(prefix), documents, num_samples, Split.train, config)


def import_all() -> None:
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    import megafp8.data.datasets  # noqa: F401


def peak_bytes() -> int:
    """The most memory that this process had resident, mapped files included."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def time_index(folder: Path, num_documents: int, results: Any) -> None:
    """In a process of its own: (step, wall s, CPU s, peak MiB beyond the imports), to `results`."""
    import_all()
    from megafp8.data.shard_verification import check_shard, content_key

    base_bytes, prefix = psutil.Process().memory_info().rss, folder / "hollow"
    samples = num_documents // 10
    rows = []
    for name, step in {
        "check the shard, hash its index": lambda: (check_shard(str(prefix), VOCAB_SIZE), content_key(str(prefix))),
        "check and build the indices": partial(build, prefix, folder / "cache", samples),
        "check and open the indices": partial(build, prefix, folder / "cache", samples),
        "check and build packed indices": partial(build, prefix, folder / "packed", samples, "best-fit"),
        "check and open packed indices": partial(build, prefix, folder / "packed", samples, "best-fit"),
    }.items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        wall_ms, cpu_ms = timing.own_times_ms(step)
        rows.append((name, wall_ms / 1e3, cpu_ms / 1e3, (peak_bytes() - base_bytes) / MIB))
    results.put(rows)


def index_rows(folder: Path, num_documents: int) -> list[tuple[Any, ...]]:
    """The table of the index build."""
    lengths = lengths_of(num_documents, 1000)
    write_hollow_shard(folder / "hollow", lengths)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=time_index, args=(folder, num_documents, results))
    process.start()
    rows = results.get()
    process.join()
    disk = sum(path.stat().st_size for path in (folder / "cache").iterdir()) / MIB
    print(f"{lengths.sum(dtype=np.int64) / 1e9:.1f}e9 tokens in {num_documents:,} documents; indices {disk:.0f} MiB")
    return rows


class Reader:
    """Reads microbatches of a dataset, from where it stopped, over and over."""

    def __init__(self, dataset: Any, num_workers: int):
        self._dataset, self._num_workers = dataset, num_workers
        self._start()

    def _start(self) -> None:
        from megafp8.config.batch_schedule import constant
        from megafp8.data.loader import build_loader

        others = set(psutil.Process().children())
        total = len(self._dataset) // MICRO_BATCH * MICRO_BATCH
        self._batches = build_loader(
            self._dataset, consumed_samples=0, micro_batch_size=MICRO_BATCH, data_parallel_rank=0,
            data_parallel_size=1, batch_schedule=constant(MICRO_BATCH), num_workers=self._num_workers,
            total_samples=total,
        )  # fmt: skip
        self._workers, self._num_read = set(psutil.Process().children()) - others, 0

    def read(self, num_batches: int) -> None:
        """Take so many microbatches."""
        for _ in range(num_batches):
            if next(self._batches, None) is None:
                self._start()
                next(self._batches)
            self._num_read += 1

    def worker_cpu_ms(self) -> float:
        """CPU time of one loader process for one microbatch, its own start included."""
        return 1e3 * sum(sum(worker.cpu_times()[:2]) for worker in self._workers) / self._num_read


def loader_times(
    folder: Path, num_tokens: int, rounds: int, num_batches: int
) -> tuple[dict[str, timing.Times], dict[str, float]]:
    """Times of `num_batches` microbatches of each side, and milliseconds of CPU of the loader processes for one."""
    import_all()
    readers: dict[str, Reader] = {}
    for mean in (1000, 100):
        prefix = folder / f"documents_of_{mean}"
        write_random_shard(prefix, lengths_of(num_tokens // mean, mean))
        samples = num_tokens // SEQ_LENGTH // 2
        ours = build(prefix, folder / "cache", samples)
        theirs = megatron_dataset(prefix, folder / "theirs", samples)
        for name, dataset, workers in (
            ("megafp8", ours, 0), ("megatron-core's dataset", theirs, 0), ("megafp8, 1 worker", ours, 1),
            ("megafp8, 2 workers", ours, 2),
        ):  # fmt: skip
            readers[f"{name}, documents of {mean}"] = Reader(dataset, workers)
    sides = {name: partial(reader.read, num_batches) for name, reader in readers.items()}
    times = timing.take_turns(sides, rounds=rounds)
    return times, {name: reader.worker_cpu_ms() for name, reader in readers.items() if "worker" in name}


def loader_rows(
    times: dict[str, timing.Times], worker_cpu_ms: dict[str, float], num_batches: int
) -> list[tuple[Any, ...]]:
    """Batches and million tokens a second by wall time; million tokens a second of CPU time of the training process,
    and of the loader processes together."""
    tokens = MICRO_BATCH * SEQ_LENGTH / 1e3  # by milliseconds: millions by seconds
    rows = []
    for name, side in times.items():
        batch_ms, cpu_ms = side.median_wall_ms / num_batches, side.median_cpu_ms / num_batches
        worker_ms = worker_cpu_ms.get(name)  # none without workers; 0 where so few batches take less than a clock tick
        of_workers = tokens / worker_ms if worker_ms else None
        rows.append((name, 1e3 / batch_ms, tokens / batch_ms, tokens / cpu_ms, of_workers))
    return rows


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loader; medians are reported")
    parser.add_argument("--batches", type=int, default=400, help="microbatches a turn")
    parser.add_argument("--documents", type=int, default=10_000_000, help="of 1000 tokens, in the shard to index")
    parser.add_argument("--tokens", type=int, default=64_000_000, help="in the shard to read")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as name:
        started = time.monotonic()
        indexing = index_rows(Path(name), options.documents)
        print(timing.format_table(("one shard", "wall s", "CPU s", "peak MiB"), indexing))
        times, worker_cpu_ms = loader_times(Path(name), options.tokens, options.rounds, options.batches)
    loading = loader_rows(times, worker_cpu_ms, options.batches)
    header = ("loader", "batches/s", "M tokens/s", "M tokens/s of CPU here", "M tokens/s of CPU in workers")
    print(timing.format_table(header, loading))
    print(timing.describe_quiet({name: side for name, side in times.items() if "worker" not in name}))
    slowest = min(min(filter(None, row[3:])) for row in loading if row[0].startswith("megafp8"))
    verdict = "over" if slowest * 1e6 >= BAR_TOKENS_PER_S else "UNDER"
    print(f"slowest process: {slowest:.1f}M tokens/s of CPU time, {verdict} the bar of 2M")
    print(f"{time.monotonic() - started:.0f} s")
    if options.json:
        timing.write_json(options.json, {"options": vars(options), "index": indexing, "loader": loading})


if __name__ == "__main__":
    main()
