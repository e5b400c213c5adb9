"""The FineWeb-Edu example from Parquet files to a trained model, and its download."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megafp8.data.preprocessing.corpus import stdlib_documents, stdlib_folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fineweb_edu"

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("tokenizers")

# The model and the machine of the test. The recipe is the example's.
TINY = (
    "--model-preset tiny --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --save-interval 2 "
    "--eval-iters 1 --eval-interval 2 --num-workers 0 --num-threads 1 --transformer-impl emulated "
    "--cross-entropy-fusion-impl native --no-progress-bar"
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    modules = [document.text for document in stdlib_documents(stdlib_folder(), max_bytes=600_000, seed=1)]
    return [text[first : first + 2000] for text in modules for first in range(0, len(text), 2000)]


def run_example(out: Path, *arguments: str, **environment: str) -> str:
    """The standard output of one start."""
    done = subprocess.run(
        ["bash", str(EXAMPLE / "run.sh"), *arguments],
        env={**os.environ, "OUT": str(out), "PYTHON": sys.executable, "GPUS_PER_NODE": "1", **environment},
        capture_output=True, text=True, cwd="/", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_from_parquet_to_a_model_twice(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "text").mkdir()
    # some of FineWeb-Edu's columns
    table = {"text": texts, "id": [str(n) for n in range(len(texts))], "score": [3.5] * len(texts)}
    parquet.write_table(pyarrow.table(table), tmp_path / "text" / "000_00000.parquet", row_group_size=50)
    data = {"TEXT": str(tmp_path / "text"), "VOCAB_SIZE": "500"}

    first = run_example(tmp_path / "out", STOP_AFTER="shards", **data)
    assert f"{len(texts)} documents" in first
    assert not (tmp_path / "out" / "llama-1b").exists()
    second = run_example(tmp_path / "out", *TINY.split(), **data)
    assert second.count("is there already") == 2
    assert "step 2/2" in second
    assert "validation" in second
    assert (tmp_path / "out" / "llama-1b" / "iter_0000002").is_dir()
    config = "configs/gpt2_124m_fineweb_edu_h200.yaml"
    assert "step 2/2" in run_example(
        tmp_path / "out", *TINY.split(), "--lr-warmup-iters", "1", "--split", "9,1,0", CONFIG=config, **data
    )
    assert (tmp_path / "out" / "gpt2_124m_fineweb_edu_h200" / "records.jsonl").exists()


def test_a_part_of_the_dataset_is_no_configuration() -> None:
    done = subprocess.run(
        ["bash", str(EXAMPLE / "run.sh")], env={**os.environ, "CONFIG": "sample-10BT"}, capture_output=True, text=True
    )
    assert done.returncode == 64 and "SUBSET" in done.stdout


def test_one_text_file_is_divided_at_a_separator(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "input.txt").write_text("\n\n".join(" ".join(text.split()) for text in texts[:50]), encoding="utf-8")
    data = {"TEXT": str(tmp_path / "input.txt"), "TEXT_SEPARATOR": "\\n\\n", "VOCAB_SIZE": "500"}
    assert "50 documents" in run_example(tmp_path / "out", STOP_AFTER="shards", **data)


def test_dry_run_needs_no_text(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\necho "$*"\n')
    stub.chmod(0o755)
    output = run_example(tmp_path / "out", "--dry-run", "--world-size", "8", PYTHON=str(stub))
    assert output.startswith("pretrain_gpt.py ") and output.endswith("--dry-run --world-size 8\n")
    assert not (tmp_path / "out").exists()


def test_slurm_script_starts_the_example(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/usr/bin/env bash\necho "srun $*"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    command = ["bash", str(EXAMPLE / "slurm.sh"), "--train-iters", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=20)
    assert done.stdout == f"srun bash {EXAMPLE}/run.sh --train-iters 5\n"
    options = [line for line in (EXAMPLE / "slurm.sh").read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1"} <= set(options)


class Stream:
    """A streamed dataset, as far as the download uses it. It records what was read."""

    def __init__(self, texts: list[str]):
        self.texts, self.num_read = texts, 0

    def select_columns(self, names):
        assert names == ["text"]
        return self

    def skip(self, count):
        self.texts = self.texts[count:]
        return self

    def iter(self, batch_size):
        for first in range(0, len(self.texts), batch_size):
            batch = self.texts[first : first + batch_size]
            self.num_read += len(batch)
            yield {"text": batch}


def test_download_resumes_and_stops(tmp_path: Path, texts: list[str], monkeypatch) -> None:
    sys.path.insert(0, str(EXAMPLE))
    import download

    sys.path.remove(str(EXAMPLE))
    monkeypatch.setattr(download, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(download, "FILE_BYTES", 50_000)
    streams = []

    def load_dataset(name, config, split, streaming):
        assert (name, config, split, streaming) == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)
        streams.append(Stream(texts))
        return streams[-1]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert download.main(["--output", str(tmp_path), "--gigabytes", "0.00012"]) == 0
    files = sorted(tmp_path.iterdir())
    assert 2 <= len(files) <= 3
    assert streams[0].num_read < len(texts)
    files[-1].unlink()  # as if it had been killed before
    assert download.main(["--output", str(tmp_path)]) == 0
    found = [text for path in sorted(tmp_path.iterdir()) for text in parquet.read_table(path)["text"].to_pylist()]
    assert found == texts
    assert download.main(["--output", str(tmp_path)]) == 0
    assert streams[2].num_read == 0
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert download.main(["--output", str(tmp_path)]) == 64
