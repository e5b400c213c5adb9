"""A `python` that forks, for shell scripts and commands that start others: it saves the seconds of their imports.

A server process, forked from this one with all imports done, listens on a socket. The program `python` in its folder
passes its arguments, folder, environment and streams to the server, and exits with the status of the process that the
server forks. Anything other than a script or a module (`python -c`, `python -S`) runs in a new interpreter.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path

from forked_runs import ROOT, prepare
from ranks import become_child

HEAD_BYTES = 8
CLIENT = """#!{python} -IS
import json, os, socket, sys
words = sys.argv[2:] if sys.argv[1:2] == ["-u"] else sys.argv[1:]
if not words or not (words[0] == "-m" or words[0].endswith(".py")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [len(request).to_bytes({head_bytes}, "big")], [0, 1, 2])
server.sendall(request)
sys.exit((server.recv(1) or b"\\x01")[0])
"""
TORCHRUN = '#!/bin/sh\nexec python -m torch.distributed.run "$@"\n'


@contextlib.contextmanager
def forked_python(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `python` and `torchrun` fork. No process started by them outlives the block.

    Args:
        folder: for the two programs. Its path is short (a socket's name has 108 bytes at most).
    """
    prepare()
    address, python = folder / "socket", folder / "python"
    for path, text in (
        (python, CLIENT.format(python=sys.executable, address=str(address), head_bytes=HEAD_BYTES)),
        (folder / "torchrun", TORCHRUN),
    ):
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, str(python)))
        server.start()
    try:
        yield os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(python), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
    finally:
        server.kill()  # and with it every process that it forked
        server.join()


def serve(listener: socket.socket, python: str) -> None:
    """Main loop of the server: a process for each request, which answers it."""
    become_child()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    while True:
        connection, _ = listener.accept()
        multiprocessing.get_context("fork").Process(target=handle, args=(listener, connection, python)).start()
        connection.close()


def handle(listener: socket.socket, connection: socket.socket, python: str) -> None:
    """Entry point of the process that answers one client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    become_child()
    with contextlib.suppress(OSError):  # the client is gone
        answer(connection, python)


def answer(connection: socket.socket, python: str) -> None:
    """Run what a client requests, and end it when the client is killed."""
    head, streams, _, _ = socket.recv_fds(connection, HEAD_BYTES, 3)
    with connection.makefile("rb") as stream:
        words, folder, environment = json.loads(stream.read(int.from_bytes(head, "big")))
    arguments = (words, folder, environment, streams, python)
    process = multiprocessing.get_context("fork").Process(target=be_python, args=arguments)
    process.start()
    for number in streams:
        os.close(number)
    wait([process.sentinel, connection])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    status = process.exitcode or 0
    connection.send(bytes([status if status >= 0 else 128 - status]))


def be_python(words: list[str], folder: str, environment: Mapping[str, str], streams: list[int], python: str) -> None:
    """Entry point of a forked interpreter."""
    become_child()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = python
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, folder)  # as a new interpreter does
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.stdout.flush()
