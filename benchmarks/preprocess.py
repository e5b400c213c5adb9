"""Preprocessing speed: tools/preprocess_data.py, compared with the pipeline of Megatron-LM's script of that
name (`single_writer.py`) and with the tokenizer's own library.

    python benchmarks/preprocess.py --folder runs/preprocess [--megabytes 400] [--rounds 3] [--json FILE]
    python benchmarks/preprocess.py --folder runs/preprocess --memory-limit-mb 600 --megabytes 2000
    python benchmarks/preprocess.py --folder runs/preprocess --cases byte-level --megabytes 100 --parts --datatrove

The first command creates a corpus (Python's standard library, repeated with other words), trains four tokenizers, and
runs both pipelines alternately as separate processes on the same text: the shards must be byte-identical. Bar: 20 times
the documents per second for byte-pair encodings. If gigatoken does not support the tokenizer, the bar is 0.85 of the
speed of the library's batch calls on texts in memory, on the same number of cores. The second command sets a memory
limit for each process and reports the peak. The third adds two sides: as many `--part`s with a worker each, and their
merge, whose shards must be equal too; and datatrove's tokenizer. Bar: a fifth of datatrove's CPU time.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing
from benchmarks.startup import process_times_ms
from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.corpus import stdlib_documents, stdlib_folder
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer
from megafp8.data.shards import load_manifest
from megafp8.data.tokenizers.build import build_tokenizer

BPE_BAR, LIBRARY_BAR, DATATROVE_BAR = 20.0, 0.85, 5.0
DOCUMENT_CHARACTERS = 3000
CHANGED_FRACTION = 0.05
WORD = re.compile(r"[A-Za-z]{5,}")
# megatron-core's TikTokenizer takes such text for special tokens, other tokenizers do not.
SPECIAL = re.compile(r"</?s>|<(unk|mask|pad|cls|sep)>|<SPECIAL_|<\|endoftext\|>")
NUM_SPECIAL_TOKENS = 1000


@dataclass(frozen=True)
class Case:
    """A tokenizer: the flags that name it, and whether the bar for byte-pair encodings is its."""

    name: str
    flags: tuple[str, ...]
    is_bpe: bool


def corpus_documents(num_bytes: int, seed: int = 1234) -> Iterator[str]:
    """Yield documents of about 3000 characters, `num_bytes` of UTF-8 in all. From the second time over, every 20th
    longer word is another one, so that new words keep coming, as they do in text."""
    rng = random.Random(seed)
    modules = [document.text for document in stdlib_documents(stdlib_folder(), max_bytes=1 << 30, seed=seed)]
    done, first_time = 0, True
    while True:
        for text in modules:
            for start in range(0, len(text), DOCUMENT_CHARACTERS):
                piece = text[start : start + DOCUMENT_CHARACTERS]
                if not first_time:
                    piece = WORD.sub(partial(_change_some, rng), piece)
                if SPECIAL.search(piece):
                    continue
                yield piece
                done += len(piece.encode("utf-8"))
                if done >= num_bytes:
                    return
        first_time = False


def _change_some(rng: random.Random, found: re.Match[str]) -> str:
    word = found.group()
    return word[:-1] + rng.choice("abcdefghij") if rng.random() < CHANGED_FRACTION else word


def write_corpus(path: Path, num_bytes: int) -> Path:
    """Write the corpus as JSON lines, if it is not there."""
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8") as stream:
            for number, text in enumerate(corpus_documents(num_bytes)):
                stream.write(json.dumps({"text": text, "id": number}, ensure_ascii=False) + "\n")
        temporary.rename(path)
    return path


def make_cases(folder: Path, words: Optional[list[str]], vocab_size: int, sample_megabytes: int) -> list[Case]:
    """Train the tokenizers that are not there; only those with one of `words` in their name."""
    sample = write_corpus(folder / "sample.jsonl", sample_megabytes * 10**6)
    makers = {
        "byte-level BPE": (_byte_level, True),
        "tiktoken": (_tiktoken, True),
        "SentencePiece BPE": (partial(_sentencepiece, "bpe"), True),
        "SentencePiece unigram": (partial(_sentencepiece, "unigram"), False),
    }
    return [
        Case(name, make(folder, sample, vocab_size), is_bpe)
        for name, (make, is_bpe) in makers.items()
        if not words or any(word in name for word in words)
    ]


def _byte_level(folder: Path, sample: Path, vocab_size: int) -> tuple[str, ...]:
    train_tokenizer([str(sample)], str(folder / "byte"), vocab_size=vocab_size, model_type="byte-bpe")
    return "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "byte")


def _tiktoken(folder: Path, sample: Path, vocab_size: int) -> tuple[str, ...]:
    _byte_level(folder, sample, vocab_size)
    num_ranks = write_ranks(folder / "byte", folder / "ranks.json")
    model = ("--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(folder / "ranks.json"))
    return *model, "--vocab-size", str(num_ranks + NUM_SPECIAL_TOKENS)


def _sentencepiece(kind: str, folder: Path, sample: Path, vocab_size: int) -> tuple[str, ...]:
    threads = os.cpu_count() or 1
    prefix = str(folder / kind)
    train_tokenizer([str(sample)], prefix, vocab_size=vocab_size // 4, model_type=kind, num_threads=threads)
    return "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{prefix}.model"


def write_ranks(byte_level: Path, path: Path) -> int:
    """Write the tokens of a byte-level BPE as Megatron's file of ranks for tiktoken; return their number."""
    content = json.loads((byte_level / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    special = {token["content"] for token in content["added_tokens"]}
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    tokens = [bytes([byte]) for byte in range(256)]
    for text in sorted(model["vocab"], key=model["vocab"].__getitem__):
        if len(text) > 1 and text not in special:
            tokens.append(bytes(byte_of[character] for character in text))
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode("ascii"), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return len(tokens)


def _byte_characters() -> dict[int, str]:
    """The characters with which a byte-level BPE writes bytes: themselves, or those from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}


def run_pipeline(script: str, case: Case, corpus: Path, prefix: Path, workers: int, *more: str) -> tuple[float, float]:
    """Run a pipeline as a process; its wall and CPU time."""
    for suffix in (".bin", ".idx", ".manifest.json"):
        Path(f"{prefix}_text_document{suffix}").unlink(missing_ok=True)
    common = ("--input", str(corpus), "--output-prefix", str(prefix), "--workers", str(workers))
    return process_times_ms([script, *common, *case.flags, *more])


def run_parts(case: Case, corpus: Path, prefix: Path, count: int) -> tuple[float, float]:
    """Make the parts at the same time, in a process each, and merge them; wall and CPU time."""
    command = [
        sys.executable, "tools/preprocess_data.py", "--input", str(corpus), "--output-prefix", str(prefix),
        "--workers", "1", "--append-eod", "--overwrite", *case.flags,
    ]  # fmt: skip
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    quiet: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    parts = [subprocess.Popen([*command, "--part", f"{number}/{count}"], **quiet) for number in range(1, count + 1)]
    assert [part.wait() for part in parts] == [0] * count
    subprocess.run([*command, "--merge-parts"], check=True, **quiet)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (time.perf_counter() - start) * 1e3, cpu_s * 1e3


def divide_lines(corpus: Path, count: int) -> Path:
    """Write the corpus as so many files, for datatrove, which divides work by files; return their folder."""
    folder = corpus.with_suffix(f".{count}")
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack, open(corpus, "rb") as lines:
        files = [stack.enter_context(open(folder / f"{number}.jsonl", "wb")) for number in range(count)]
        for number, line in enumerate(lines):
            files[number % count].write(line)
    return folder


def run_library(case: Case, corpus: Path, workers: int) -> tuple[float, float]:
    """Call the library's batch calls on texts in memory, in as many processes; wall and CPU time of the calls alone."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    with context.Pool(workers) as pool:
        times = pool.starmap(_library_times_ms, [(case.flags, corpus, number, workers) for number in range(workers)])
    return max(wall_ms for wall_ms, _ in times), sum(cpu_ms for _, cpu_ms in times)


def _library_times_ms(flags: tuple[str, ...], corpus: Path, number: int, count: int) -> tuple[float, float]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    config = DataConfig(tokenizer_type=values["--tokenizer-type"], tokenizer_model=values["--tokenizer-model"])
    tokenizer = build_tokenizer(config, int(values["--vocab-size"]) if "--vocab-size" in values else None)
    with open(corpus, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for index, line in enumerate(lines) if index % count == number]

    def encode() -> None:
        for first in range(0, len(texts), 1000):
            tokenizer.tokenize_batch(texts[first : first + 1000])

    return timing.own_times_ms(encode)


def compare(case: Case, corpus: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the pipelines in turns and compare what they made."""
    ours, theirs = folder / "ours", folder / "theirs"
    sides: dict[str, Callable[[], tuple[float, float]]] = {
        "megafp8": partial(
            run_pipeline, "tools/preprocess_data.py", case, corpus, ours, options.workers, "--append-eod", "--overwrite"
        )
    }
    if not options.library:
        sides["single writer"] = partial(
            run_pipeline, "benchmarks/single_writer.py", case, corpus, theirs, options.workers
        )
    else:
        sides["megafp8"] = partial(sides["megafp8"], "--encoder", "library")
        sides["library alone"] = partial(run_library, case, corpus, options.workers)
    if options.parts:
        sides["parts and merge"] = partial(run_parts, case, corpus, folder / "parts", options.workers)
    if options.datatrove:
        files = divide_lines(corpus, options.workers)
        sides["datatrove"] = partial(
            run_pipeline, "benchmarks/datatrove_tokenizer.py", case, files, folder / "datatrove", options.workers
        )
    times = timing.take_turns(sides, rounds=options.rounds, warmup=options.warmup, times_ms=lambda run: run())
    manifest = load_manifest(f"{ours}_text_document")
    assert manifest is not None
    equal = [theirs] * (not options.library) + [folder / "parts"] * options.parts
    for other, suffix in itertools.product(equal, (".bin", ".idx")):
        same = subprocess.run(["cmp", f"{ours}_text_document{suffix}", f"{other}_text_document{suffix}"])
        assert same.returncode == 0, f"{case.name}: {other.name} made other shards"
    reference = "megafp8"
    others = [name for name in sides if name != reference]
    ratios = {name: timing.ratios_to(reference, times)[name] for name in others}
    return {
        "encoder": manifest.encoder,
        "documents": manifest.num_documents,
        "tokens": manifest.num_tokens,
        "bytes": corpus.stat().st_size,
        "times": times,
        "ratios": ratios,
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """A row for each tokenizer and side."""
    rows = []
    for name, result in results.items():
        for side, times in result["times"].items():
            seconds, cpu_s = times.median_wall_ms / 1e3, times.median_cpu_ms / 1e3
            ratio = result["ratios"].get(side)
            rows.append((
                name, f"{side} ({result['encoder']})" if side == "megafp8" else side,
                result["documents"] / seconds, result["bytes"] / seconds / 1e6, result["tokens"] / seconds, seconds,
                cpu_s, str(ratio["wall"]) if ratio else "", str(ratio["cpu"]) if ratio else "",
            ))  # fmt: skip
    header = ("tokenizer", "pipeline", "documents/s", "MB/s", "tokens/s", "wall s", "CPU s", "times wall", "times CPU")
    print(timing.format_table(header, rows))


def run_with_limit(case: Case, corpus: Path, prefix: Path, limit_mb: int, workers: int) -> float:
    """Preprocess with a limit on the memory of each process; return the most that one used, in MB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mb << 20, limit_mb << 20))

    command = [sys.executable, "tools/preprocess_data.py", "--input", str(corpus), "--output-prefix", str(prefix),
               "--workers", str(workers), "--overwrite", *case.flags]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, preexec_fn=limit)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def main(argv: Optional[list[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for corpus, tokenizers and shards; kept")
    parser.add_argument("--megabytes", type=int, default=400, help="of text (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="of byte-level BPE; SentencePiece has a quarter")
    parser.add_argument("--sample-megabytes", type=int, default=10, help="to train them on (default %(default)s)")
    parser.add_argument("--cases", nargs="+", metavar="WORD", help="only tokenizers with such a word in their name")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--library", action="store_true", help="compare --encoder library with the library alone")
    parser.add_argument("--parts", action="store_true", help="add a --part for each worker, and their merge")
    parser.add_argument("--datatrove", action="store_true", help="add datatrove's tokenizer")
    parser.add_argument("--memory-limit-mb", type=int, help="run megafp8 alone, with so much memory for each process")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)

    options.folder.mkdir(parents=True, exist_ok=True)
    cases = make_cases(options.folder, options.cases, options.vocab_size, options.sample_megabytes)
    corpus = write_corpus(options.folder / f"corpus{options.megabytes}.jsonl", options.megabytes * 10**6)
    if options.memory_limit_mb is not None:
        for case in cases:
            used = run_with_limit(case, corpus, options.folder / "limited", options.memory_limit_mb, options.workers)
            print(f"{case.name}: no process used more than {used:.0f} MB so far, of {options.memory_limit_mb} allowed")
        return
    results = {case.name: compare(case, corpus, options.folder, options) for case in cases}
    print_table(results)
    for case in cases:
        for side, ratio in results[case.name]["ratios"].items():
            bar = {"library alone": LIBRARY_BAR, "datatrove": DATATROVE_BAR, "parts and merge": None}.get(
                side, BPE_BAR if case.is_bpe else None
            )
            median = ratio["cpu" if side == "datatrove" else "wall"].median
            verdict = "" if bar is None else f", {'within' if median >= bar else 'UNDER'} the bar of {bar:g}"
            print(f"{case.name}: {side} takes {median:.2f} times as long{verdict}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores; this benchmark alone is about 2")
    if options.json:
        timing.write_json(options.json, {"options": vars(options), "results": results})


if __name__ == "__main__":
    main()
