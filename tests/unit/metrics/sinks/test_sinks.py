import io

import pytest

from megafp8.config.schema import LoggingConfig
from megafp8.metrics.sinks import Sinks, build_sinks, read_records


class ListSink:
    def __init__(self, log: list, name: str, *, fails: bool = False):
        self.log, self.name, self.fails = log, name, fails

    def write(self, record) -> None:
        self.log.append((self.name, record))

    def close(self) -> None:
        self.log.append((self.name, "closed"))
        if self.fails:
            raise OSError("disk full")


def test_every_sink_gets_every_record_in_order(make_step) -> None:
    log: list = []
    record = make_step(1)
    with Sinks([ListSink(log, "a"), ListSink(log, "b")]) as sinks:
        sinks.write(record)
    assert log == [("a", record), ("b", record), ("a", "closed"), ("b", "closed")]


def test_deferred_records_are_made_later_and_keep_their_place(make_step) -> None:
    log: list = []
    first, second, third, last = (make_step(step) for step in range(1, 5))

    def make() -> list:
        log.append(("a", "made"))
        return [first, second]

    with Sinks([ListSink(log, "a")]) as sinks:
        sinks.defer(make)
        assert not log
        sinks.write(third)
        sinks.flush()
        sinks.defer(lambda: [last])
    assert log == [
        ("a", "made"), ("a", first), ("a", second), ("a", third), ("a", last), ("a", "closed")
    ]  # fmt: skip


def test_an_error_of_one_that_makes_records_loses_no_other(make_step) -> None:
    log: list = []
    sinks, first, second = Sinks([ListSink(log, "a")]), make_step(1), make_step(2)

    def fail() -> list:
        raise ArithmeticError

    sinks.defer(fail)
    sinks.defer(lambda: [first])
    with pytest.raises(ArithmeticError):
        sinks.write(second)
    sinks.close()
    assert log == [("a", second), ("a", first), ("a", "closed")]


def test_one_that_fails_to_close_does_not_keep_the_others_open() -> None:
    log: list = []
    with pytest.raises(OSError, match="disk full"):
        Sinks([ListSink(log, "a", fails=True), ListSink(log, "b")]).close()
    assert log == [("a", "closed"), ("b", "closed")]


def test_a_run_folder_gets_records_and_tensorboard(tmp_path, make_run) -> None:
    record = make_run()
    with build_sinks(LoggingConfig(), run_folder=str(tmp_path), total_steps=1, stream=io.StringIO()) as sinks:
        sinks.write(record)
    assert read_records(tmp_path / "records.jsonl") == [record]
    assert any((tmp_path / "tensorboard").iterdir())


def test_without_a_run_folder_only_sinks_with_their_own_path_write(tmp_path, make_run) -> None:
    stream = io.StringIO()
    logging = LoggingConfig(tensorboard_dir=str(tmp_path / "boards"))
    with build_sinks(logging, run_folder=None, total_steps=1, stream=stream) as sinks:
        sinks.write(make_run())
    assert [path.name for path in tmp_path.iterdir()] == ["boards"]
    assert "run 01234567" in stream.getvalue()
