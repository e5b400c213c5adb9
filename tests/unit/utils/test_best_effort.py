"""Logs on disks that are full or vanish: what is reported, what is lost, and the content of the file afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megafp8.utils.best_effort import LogFile, optional_write

FULL = "cannot be written: the disk is full; training continues, lines wait in memory"


@pytest.fixture
def reports() -> list[str]:
    return []


def log_file(path: Path, reports: list[str], **options) -> LogFile:
    return LogFile(path, "lines", report=reports.append, **options)


def fill(path: Path) -> None:
    """Put the path on a full disk, from now on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/full")


def test_a_temporarily_full_disk_loses_nothing(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "deep/log"
    fill(path)
    log = log_file(path, reports)
    for number in range(5):
        assert log.append(b"%d\n" % number) == 0
    assert reports == [f"{path} {FULL}"], "one warning, not five"
    path.unlink()
    log.append(b"5\n")
    log.append(b"6\n")
    log.close()
    assert path.read_text() == "0\n1\n2\n3\n4\n5\n6\n"
    assert reports[-1] == f"{path} can be written again; nothing was lost"


def test_a_second_outage_is_reported_again(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "log"
    log = log_file(path, reports)
    for _ in range(2):
        fill(path)
        log.append(b"a\n")
        path.unlink()
        log.append(b"b\n")
    assert [text.endswith(FULL) for text in reports] == [True, False, True, False]


def test_the_backlog_is_bounded_and_the_oldest_lines_are_lost_but_not_headers(
    tmp_path: Path, reports: list[str]
) -> None:
    path = tmp_path / "log"
    fill(path)
    log = log_file(path, reports, most_bytes=10)
    log.append(b"head\n", is_header=True)
    for number in range(7):
        assert log.append(b"%d\n" % number) == 0
    path.unlink()
    assert log.append(b"7\n") == 5, "lost in the outage that has just ended"
    assert log.append(b"8\n") == 0
    log.close()
    assert path.read_text() == "head\n5\n6\n7\n8\n"
    assert reports[1:] == [f"{path} can be written again; 5 lines were lost", f"{path}: 5 lines were lost in all"]


def test_unwritten_lines_at_the_end_are_counted(tmp_path: Path, reports: list[str]) -> None:
    fill(tmp_path / "log")
    log = log_file(tmp_path / "log", reports)
    for _ in range(3):
        log.append(b"a\n")
    log.close()
    log.close()
    assert reports[1:] == [f"{tmp_path / 'log'}: 3 lines were lost in all"]


def test_a_removed_folder_is_created_again_with_the_headers(tmp_path: Path, reports: list[str]) -> None:
    """Without a check of the path, everything would be written to a deleted file."""
    path = tmp_path / "folder/log"
    log = log_file(path, reports)
    log.append(b"head 1\n", is_header=True)
    log.append(b"a\n")
    log.append(b"head 2\n", is_header=True)
    shutil.rmtree(path.parent)
    log.append(b"b\n")
    log.append(b"c\n")
    assert path.read_text() == "head 1\nhead 2\nb\nc\n"
    assert reports == [f"{path}: the folder is gone, and what was in it; it is created again"]


def test_a_folder_that_becomes_a_file_and_a_folder_again(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "folder/log"
    log = log_file(path, reports)
    log.append(b"head\n", is_header=True)
    shutil.rmtree(path.parent)
    path.parent.write_text("")
    log.append(b"a\n")
    path.parent.unlink()
    log.append(b"b\n")
    assert path.read_text() == "head\na\nb\n"
    assert "cannot be written: the folder is gone, a file has its name;" in reports[0]
    assert len(reports) == 2


def test_a_file_that_reappears_gets_no_second_header(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "folder/log"
    log = log_file(path, reports)
    log.append(b"head\n", is_header=True)
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.write_text("")
    log.append(b"a\n")
    path.parent.unlink()
    (tmp_path / "elsewhere").rename(path.parent)
    log.append(b"b\n")
    assert path.read_text() == "head\na\nb\n"


def test_a_partial_line_is_terminated_except_in_binary_files(tmp_path: Path, reports: list[str]) -> None:
    for name, is_text, content in ("text", True, "half\nb\n"), ("binary", False, "halfb\n"):
        (tmp_path / name).write_text("half")
        log = log_file(tmp_path / name, reports, is_text=is_text)
        log.append(b"b\n")
        assert (tmp_path / name).read_text() == content


def test_a_partially_written_line_is_completed_later(tmp_path: Path, reports: list[str]) -> None:
    """A file size limit simulates a disk with a few bytes left: the write is short, the next one fails."""
    path = tmp_path / "log"
    program = (
        "import resource, sys\n"
        "from megafp8.utils.best_effort import LogFile\n"
        "log = LogFile(sys.argv[1], 'lines')\n"
        "log.append(b'12345678\\n')\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12, hard))\n"
        "log.append(b'abcdefgh\\n')\n"
        "print(open(sys.argv[1]).read().encode())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "log.append(b'ABCDEFGH\\n')\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert "the limit of a file's size is reached" in ended.stdout
    assert "b'12345678\\n'" in ended.stdout, "no partial line while the disk is full"
    assert path.read_text() == "12345678\nabcdefgh\nABCDEFGH\n"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 KiB.

    A mount needs rights that a user does not have.
    """
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
    ) if shutil.which("mount") else None  # fmt: skip
    if mounted is None or mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_real_disk_that_fills_and_is_unmounted(tmp_path: Path, reports: list[str]) -> None:
    line = b"x" * 999 + b"\n"
    with small_disk(tmp_path / "disk") as disk:
        log = log_file(disk / "log", reports)
        (disk / "other").write_bytes(b"o" * (56 << 10))
        for _ in range(20):
            log.append(line)
        assert [text.endswith(FULL) for text in reports] == [True]
        assert set((disk / "log").read_bytes().splitlines(keepends=True)) <= {line}
        (disk / "other").unlink()
        log.append(line, sync=True)
        assert (disk / "log").read_bytes() == line * 21
    log.append(line)
    assert (disk / "log").read_bytes() == line, "the folder under the mount"
    assert [text.endswith("it is created again") for text in reports] == [False, False, True]


def test_an_optional_file(capsys: pytest.CaptureFixture) -> None:
    with optional_write("/dev/full"):
        Path("/dev/full").write_text("a")
    assert capsys.readouterr().out == "warning: /dev/full cannot be written: the disk is full; training continues\n"


OUTPUT = """
import sys
from megafp8.utils.best_effort import best_effort
sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(best_effort(sys.stderr))
print("a" * 100_000, flush=True)
print("b", file=sys.stderr)
"""


@pytest.mark.parametrize("target", ["/dev/full", "a pipe that nobody reads"])
def test_lost_output_does_not_change_the_exit_status(target: str) -> None:
    """Python ends with status 120 when it cannot flush its output at the end."""
    if target == "/dev/full":
        output = os.open(target, os.O_WRONLY)
    else:
        unread, output = os.pipe()
        os.close(unread)
    try:
        assert subprocess.run([sys.executable, "-c", OUTPUT], stdout=output, stderr=output).returncode == 0
    finally:
        os.close(output)
