"""A job that is killed at any point and restarted produces the same shards, with little repeated work."""

import dataclasses
import gzip
import math
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from shard_files import content_of

from megafp8.data import shards
from megafp8.data.preprocessing import plan
from megafp8.data.preprocessing import preprocess as preprocess_module
from megafp8.data.preprocessing import workers as preprocess_work
from megafp8.data.preprocessing.part_files import PartFolder, PartWriter
from megafp8.data.preprocessing.plan import PreprocessJob
from megafp8.data.preprocessing.preprocess import preprocess
from megafp8.data.shard_verification import check_shard
from megafp8.errors import DataError

KILLS = 6
PAUSE_S = 0.02
# Parts that a job may start after its kill was due: on a busy machine the kill is late.
MORE_PARTS = 5


@dataclass
class SlowParts:
    """The parts that were started. Beyond the limit, one waits for the end of its job."""

    path: Path
    limit: float = math.inf

    def begun(self) -> list[str]:
        return self.path.read_text().split()

    def begin(self, name: str) -> None:
        with open(self.path, "a") as stream:
            stream.write(name + "\n")
        parent = os.getppid()
        while len(self.begun()) > self.limit and os.getppid() == parent:
            time.sleep(0.001)


@pytest.fixture
def slow_parts(monkeypatch, tmp_path):
    """About seventy parts, each of which takes a moment."""
    monkeypatch.setattr(plan, "SMALLEST_PART_BYTES", 200)
    monkeypatch.setattr(plan, "MIN_PARTS", 1 << 30)
    parts = SlowParts(tmp_path / "begun")
    parts.path.touch()
    enter = PartWriter.__enter__

    def log(writer):
        parts.begin(writer._name)
        return enter(writer)

    finish = PartWriter.finish

    def dawdle(writer, *arguments):
        time.sleep(PAUSE_S * random.random())
        return finish(writer, *arguments)

    monkeypatch.setattr(PartWriter, "__enter__", log)
    monkeypatch.setattr(PartWriter, "finish", dawdle)
    return parts


def run_until(job: PreprocessJob, slow_parts: SlowParts, num_begun: int) -> bool:
    """Run a job in a separate process and kill it after this many parts. Returns whether it had finished."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            slow_parts.limit = num_begun + MORE_PARTS
            preprocess(job)
            status = 0
        finally:
            os._exit(status)
    while len(slow_parts.begun()) < num_begun:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return True
        time.sleep(0.001)
    time.sleep(PAUSE_S * random.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_killed_at_random_times_gives_equal_shards(
    tmp_path, corpus_file, tokenizer_config, shard, slow_parts, workers, compression
):
    path = tmp_path / f"corpus.jsonl{compression}"
    content = corpus_file.read_bytes()
    path.write_bytes(gzip.compress(content) if compression else content)
    job = PreprocessJob(
        inputs=(str(path),),
        output_prefix=str(tmp_path / "out" / "c"),
        tokenizer=tokenizer_config,
        append_eod=True,
        workers=workers,
    )
    preprocess(dataclasses.replace(job, output_prefix=str(tmp_path / "unbroken" / "c")))
    num_parts = len(slow_parts.begun())
    rng = random.Random(workers)
    kills = 0
    for _ in range(KILLS):
        # From the very first moment to a tenth of the work later.
        if run_until(job, slow_parts, len(slow_parts.begun()) + rng.randrange(num_parts // 10)):
            break
        kills += 1
    assert kills >= 3
    preprocess(job)
    assert content_of(job.shard_prefix("text")) == content_of(shard)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        f"c_text_document{end}" for end in (".bin", ".idx", ".manifest.json")
    )
    done_again = len(slow_parts.begun()) - 2 * num_parts
    assert 0 <= done_again <= kills * workers


LAST_STEPS = [(shards, "publish", 4), (preprocess_module, "save_manifest", 2), (PartFolder, "remove", 1)]


@pytest.mark.parametrize(("owner", "name", "calls"), LAST_STEPS)
def test_a_job_killed_while_publishing_gives_equal_shards(
    tmp_path, corpus_file, tokenizer_config, shard, monkeypatch, owner, name, calls
):
    """The moments after the last part: between tokens and index, before a manifest, before the parts are removed."""
    for call in range(calls):
        job = PreprocessJob(
            inputs=(str(corpus_file),),
            output_prefix=str(tmp_path / str(call)),
            tokenizer=tokenizer_config,
            append_eod=True,
            json_keys=("text", "title"),
        )
        made = []
        real = getattr(owner, name)

        def die(*arguments, real=real, made=made, call=call):
            if len(made) == call:
                os._exit(77)
            made.append(1)
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, die)
            child = os.fork()
            if child == 0:
                try:
                    preprocess(job)
                finally:
                    os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
        preprocess(job)
        assert not list(tmp_path.glob("*.parts"))
        check_shard(job.shard_prefix("title"), 1 << 16)
        assert content_of(job.shard_prefix("text")) == content_of(shard)


def test_a_killed_worker_loses_only_its_parts(tmp_path, corpus_file, tokenizer_config, shard, slow_parts):
    job = PreprocessJob(
        inputs=(str(corpus_file),),
        output_prefix=str(tmp_path / "c"),
        tokenizer=tokenizer_config,
        append_eod=True,
        workers=2,
    )
    real = preprocess_work._encode_part
    flag, parts = tmp_path / "died", tmp_path / "c.parts"

    def die_once(worker, part):
        if part.name == "000009" and not flag.exists():
            while len(list(parts.glob("00000[0-8].json"))) < 9:
                time.sleep(0.001)  # the other worker may still process one of them
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(worker, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess_work, "_encode_part", die_once)
        with pytest.raises(DataError, match="SIGKILL"):
            preprocess(job)
    assert len(list(parts.glob("0*.json"))) >= 9
    seen = []
    preprocess(job, on_progress=seen.append)
    assert seen[0].num_documents >= 9
    assert content_of(job.shard_prefix("text")) == content_of(shard)
