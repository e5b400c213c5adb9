"""The progress of a long job: fraction, speeds of this run only, and remaining time."""

import io

import pytest

from megafp8.cli import progress_display
from megafp8.cli.progress_display import ProgressDisplay
from megafp8.data.preprocessing.preprocess import PreprocessProgress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    return now


def progress(share, documents, tokens=0, skipped=0):
    return PreprocessProgress(int(share * 1e9), 10**9, documents, tokens, skipped)


def test_a_line_every_ten_seconds_and_the_speeds_of_this_run(clock):
    stream = io.StringIO()
    display = ProgressDisplay(stream=stream)
    display(progress(0.5, 1000, 50_000))
    assert stream.getvalue() == "going on after 1,000 documents of an earlier run\n"
    clock[0] += 9
    display(progress(0.51, 1100, 60_000))
    clock[0] += 1
    display(progress(0.6, 3000, 150_000, 7))
    display(progress(0.61, 3001, 150_000, 7))
    display.close()
    assert stream.getvalue().splitlines()[1:] == [
        " 60.0% of 1,000.0 MB, 3,000 documents, 200 documents/s, 10,000 tokens/s, 10.0 MB/s of input, "
        "7 records skipped, 0:00:40 left"
    ]


def test_a_line_every_so_many_documents(clock):
    stream = io.StringIO()
    display = ProgressDisplay(log_interval=100, stream=stream)
    for documents in range(0, 1001, 30):
        clock[0] += 0.1
        display(progress(documents / 1000, documents))
    assert len(stream.getvalue().splitlines()) == 8  # at 120, 240, ... 960


def test_a_progress_bar_on_a_terminal(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    display = ProgressDisplay(stream=stream)
    display(progress(0, 0))
    clock[0] += 10
    display(progress(1, 500, 1000))
    display.close()
    assert "100%" in stream.getvalue()
    assert "50 documents/s, 100 tokens/s, 100.0 MB/s" in stream.getvalue()


def test_no_work_does_not_divide_by_zero(clock):
    display = ProgressDisplay(stream=io.StringIO())
    display(progress(1, 10))
    assert "0 documents/s" in display.describe(progress(1, 10))
