"""The `python` that forks behaves like the real one: status, streams, folder, environment, and its end."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forked_python import forked_python
from forked_runs import PATIENCE_S

SCRIPT = """
import os, subprocess, sys, time
if sys.argv[1:] == ["sleep"]:
    print(os.getpid(), flush=True)
    time.sleep(600)
print(os.getcwd(), os.environ["WORD"], sys.stdin.read(), "torch" in sys.modules)
print("error", file=sys.stderr)
sys.exit(subprocess.call([sys.executable, "-c", "raise SystemExit(7)"]))
"""


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="python_") as name, forked_python(Path(name)) as found:
        yield found


def test_forked_python_behaves_like_python(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        ["python", "script.py"], env=environment | {"WORD": "word"}, cwd=tmp_path, input="input", capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, f"{tmp_path} word input True\n"), done.stderr
    assert done.stderr == "error\n"
    for words, status in ((["-m", "json.tool", "none"], 2), (["-c", "raise SystemExit(3)"], 3), (["none.py"], 1)):
        assert subprocess.run(["python", *words], env=environment, capture_output=True).returncode == status


def test_forked_python_ends_with_its_client(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    client = subprocess.Popen(
        ["python", "script.py", "sleep"], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    client.kill()
    client.wait()
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
