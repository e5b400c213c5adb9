"""--part I/N: several machines make the bytes that one makes, whatever happens to one of them."""

import dataclasses
import gzip
import json
import os
import signal
from pathlib import Path

import pytest
from shard_files import names_in, null_job, shard_bytes

from megafp8.data.preprocessing import part_files
from megafp8.data.preprocessing.part_files import PartFolder, PartWriter
from megafp8.data.preprocessing.plan import InputPart, InputRange, Stream, Stripe
from megafp8.data.preprocessing.preprocess import make_share, merge_shares, preprocess
from megafp8.data.preprocessing.shares import Share, describe_progress, divide_tasks, read_progress
from megafp8.data.preprocessing.sources import InputSource
from megafp8.data.shards import load_manifest
from megafp8.errors import DataError


def beside(job, name: str):
    """The same job with shards elsewhere."""
    return dataclasses.replace(job, output_prefix=str(Path(job.output_prefix).parent.with_name(name) / "c"))


def prefix_of(job) -> str:
    return job.shard_prefix("text")


def lines_of(job) -> list[str]:
    return list(describe_progress(read_progress(job.output_prefix)))


@pytest.fixture
def job_of(job, documents, tmp_path):
    """The job with the corpus in another kind of file."""

    def write(kind: str):
        folder = tmp_path / "in"
        folder.mkdir()
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        if kind == "text":
            (folder / "a.txt").write_text("\n==\n".join(documents))
            return dataclasses.replace(job, inputs=(str(folder),), text_separator="\n==\n")
        if kind == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": documents}), folder / "a.parquet", row_group_size=7)
        elif kind == "gz":
            (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
            (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[:2]).encode()))
        else:
            sizes = (1, 40, 0, 19) if kind == "files" else (len(lines),)
            for number, size in enumerate(sizes):
                first = sum(sizes[:number])
                (folder / f"{number}.jsonl").write_text("".join(lines[first : first + size]))
        return dataclasses.replace(job, inputs=(str(folder),))

    return write


@pytest.mark.parametrize("kind", ["jsonl", "files", "gz", "parquet", "text"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_parts_are_merged_into_the_bytes_of_one_run(job_of, small_parts, kind, count):
    """Most of 40 parts are empty."""
    job = job_of(kind)
    whole = beside(job, "whole")
    preprocess(whole)
    for number in reversed(range(1, count + 1)):
        made = make_share(dataclasses.replace(job, workers=1 + number % 2), Share(number, count))
        assert made.is_complete
    assert [": complete, 100.0% of" in line for line in lines_of(job)] == [True] * count + [False]
    merge_shares(job)
    assert shard_bytes(prefix_of(job)) == shard_bytes(prefix_of(whole))
    assert load_manifest(prefix_of(job)) == load_manifest(prefix_of(whole))
    assert names_in(Path(job.output_prefix).parent) == names_in(Path(whole.output_prefix).parent)
    assert make_share(job, Share(1, count)).made is False  # nothing is done again


def test_skipped_records_are_listed_as_by_one_run(tmp_path, small_parts):
    job = null_job(tmp_path, ["1 " * 300, "x", "2 " * 900, "y"], skip_bad=True)
    whole = beside(job, "whole")
    preprocess(whole)
    for number in (1, 2):
        make_share(job, Share(number, 2))
    merge_shares(job)
    assert [Path(f"{each.output_prefix}.skipped.jsonl").read_bytes() for each in (job, whole)][0].count(b"\n") == 2
    assert Path(f"{job.output_prefix}.skipped.jsonl").read_text() == (
        Path(f"{whole.output_prefix}.skipped.jsonl").read_text()
    )


def test_all_parts_may_start_at_the_same_time(job, small_parts):
    children = []
    for number in (1, 2, 3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                make_share(job, Share(number, 3))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    merge_shares(job)
    preprocess(whole := beside(job, "whole"))
    assert shard_bytes(prefix_of(job)) == shard_bytes(prefix_of(whole))


@pytest.mark.parametrize("kind", ["jsonl", "gz"])
def test_a_killed_part_starts_again_where_it_was(job_of, small_parts, monkeypatch, kind):
    job = job_of(kind)
    child = os.fork()
    finish, begun = PartWriter.finish, []
    if child == 0:

        def finish_two(writer, *arguments):
            if len(begun) == 2:
                os.kill(os.getpid(), signal.SIGKILL)  # after the files of the part, before its record
            begun.append(writer)
            return finish(writer, *arguments)

        PartWriter.finish = finish_two
        make_share(job, Share(1, 2))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    make_share(job, Share(2, 2))
    first, second, _ = lines_of(job)
    assert first.startswith("part 1/2: stopped, ") and second.startswith("part 2/2: complete, 100.0% of ")
    with pytest.raises(DataError, match=r"part 1/2 is not complete. Run the same command with --part 1/2 in place"):
        merge_shares(job)

    kept = set(PartFolder(job.output_prefix, 1, "uint16").part_names())
    monkeypatch.setattr(PartWriter, "finish", lambda writer, *rest: begun.append(writer._name) or finish(writer, *rest))
    make_share(job, Share(1, 2))
    assert begun and not kept & set(begun)
    again = len(begun)
    for number in (1, 2):
        make_share(job, Share(number, 2))
    assert len(begun) == again  # finished parts are kept
    merge_shares(job)
    preprocess(whole := beside(job, "whole"))
    assert shard_bytes(prefix_of(job)) == shard_bytes(prefix_of(whole))


def test_a_torn_part_is_not_merged(job, small_parts):
    for number in (1, 2, 3):
        make_share(job, Share(number, 3))
    folder = PartFolder(job.output_prefix, 1, "uint16")
    torn = folder.token_path(folder.part_names()[1], 0)
    torn.write_bytes(bytes(torn.stat().st_size))
    messages = []
    with pytest.raises(DataError, match=r"part \d/3 is not complete") as error:
        merge_shares(job, messages.append)
    assert (
        f"not used, because damaged or of an earlier version in {folder.path}: 1 part ({torn.name[:6]})" == messages[-1]
    )
    number = int(str(error.value).partition("part ")[2][0])
    make_share(job, Share(number, 3))
    merge_shares(job)
    preprocess(whole := beside(job, "whole"))
    assert shard_bytes(prefix_of(job)) == shard_bytes(prefix_of(whole))


def test_one_machine_may_finish_a_divided_job(job, small_parts):
    make_share(job, Share(2, 3))
    preprocess(job)
    preprocess(whole := beside(job, "whole"))
    assert shard_bytes(prefix_of(job)) == shard_bytes(prefix_of(whole))


def test_parts_that_do_not_belong_together(job, corpus_file, tmp_path, small_parts):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(corpus_file.read_bytes())
    job = dataclasses.replace(job, inputs=(str(copy),))
    with pytest.raises(DataError, match=r"c.parts does not exist: make the parts first"):
        merge_shares(job)
    with pytest.raises(DataError, match="has no job that is divided by --part"):
        read_progress(job.output_prefix)
    make_share(job, Share(1, 2))
    with pytest.raises(DataError, match=r"is divided into 2 parts, not 3: use --part I/2"):
        make_share(job, Share(2, 3))
    other = dataclasses.replace(job, append_eod=False)
    for make in (lambda: make_share(other, Share(2, 2)), lambda: merge_shares(other)):
        with pytest.raises(DataError, match="unfinished job with different append eod"):
            make()
    copy.write_text(copy.read_text() + json.dumps({"text": "one more"}) + "\n")
    for make in (lambda: make_share(job, Share(2, 2)), lambda: merge_shares(job)):
        with pytest.raises(DataError, match=r"different sources \(from .*copy.jsonl \(\d+ bytes.* instead of"):
            make()


def test_a_part_has_one_maker_and_the_merge_waits(job, small_parts, monkeypatch):
    monkeypatch.setattr(part_files, "LOCK_PATIENCE_S", 0.2)
    make_share(job, Share(1, 2))
    folder = PartFolder(job.output_prefix, 1, "uint16")
    with folder.lock("2-of-2"), folder.lock(shared=True):
        assert lines_of(job)[1:] == ["part 2/2: starting", lines_of(job)[2]]
        with pytest.raises(DataError, match="--part 2/2 is being made by another process in"):
            make_share(job, Share(2, 2))
        with pytest.raises(DataError, match="Another job is writing to"):
            merge_shares(job)
        with pytest.raises(DataError, match="Another job is writing to"):
            preprocess(job)
    assert lines_of(job)[1] == "part 2/2: not started"


def test_progress_of_a_running_part(job, small_parts):
    seen = []
    make_share(job, Share(1, 2), on_progress=lambda _: seen.extend(lines_of(job)[:1] if seen else [""]))
    assert seen[2].startswith("part 1/2: running, ") and " MB/s on " in seen[2] and seen[2].endswith("s ago")


def test_division_is_even_and_keeps_the_order():
    sources = [InputSource("a.jsonl.gz", "jsonl", 900, 0), InputSource("b.jsonl", "jsonl", 1000, 0)]
    ranges = [InputPart(f"{n + 1:06d}", (InputRange(1, n * 100, n * 100 + 100, 100),)) for n in range(10)]
    units = [Stream("000000", 0, 10), *ranges]
    first, second = divide_tasks(units, sources, 2)
    assert first == [Stripe(units[0], 0, 2), *ranges[::2]] and second == [Stripe(units[0], 1, 2), *ranges[1::2]]
    assert [len(share) for share in divide_tasks(ranges, sources, 4)] == [3, 3, 2, 2]
    assert divide_tasks([], sources, 2) == [[], []]
