"""A script of the project in a forked process: the complete command, without the seconds of its imports.

Each command also has one test that starts it as a user does.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from forked_runs import ROOT, prepare
from ranks import become_child


def run_script(script: str, *arguments: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS` to its end; returns its exit status and its output.

    Args:
        script: its path in the project.

    Raises:
        TimeoutExpired: it did not end in time, and was killed with its children.
    """
    prepare()
    words = [str(ROOT / script), *map(str, arguments)]
    text = functools.partial(tempfile.TemporaryFile, "w+", encoding="utf-8")
    with text() as output, text() as errors:
        process = multiprocessing.get_context("fork").Process(target=be_script, args=(words, output, errors))
        process.start()
        process.join(timeout_s)
        is_late = process.is_alive()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        if is_late:
            raise subprocess.TimeoutExpired(words, timeout_s)
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, process.exitcode or 0, output.read(), errors.read())


def be_script(words: list[str], output: IO[str], errors: IO[str]) -> None:
    """Entry point of the process."""
    become_child()
    for number, stream in ((1, output), (2, errors)):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = output, errors  # pytest has put its own files there
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
