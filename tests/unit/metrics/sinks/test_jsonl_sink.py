import shutil

import pytest

from megafp8.errors import DataError
from megafp8.metrics.records import EventRecord, ExpertRecord, GuardRecord, StepRecord, to_json
from megafp8.metrics.sinks.jsonl import JsonlSink, current_records, read_records
from megafp8.utils import best_effort


def write_all(path, records) -> None:
    sink = JsonlSink(path)
    for record in records:
        sink.write(record)
    sink.close()


def test_written_records_read_back(tmp_path, make_run, make_step, make_eval) -> None:
    records = [make_run(), make_step(1), make_eval(1), EventRecord(step=1, name="checkpoint saved")]
    write_all(tmp_path / "deep" / "records.jsonl", records)
    assert read_records(tmp_path / "deep" / "records.jsonl") == records


def test_a_line_is_in_the_file_before_the_next_is_written(tmp_path, make_run, make_step) -> None:
    path = tmp_path / "records.jsonl"
    sink = JsonlSink(path)
    sink.write(make_run())
    sink.write(make_step(1))
    assert len(read_records(path)) == 2  # the sink is still open: a kill here loses nothing
    sink.close()
    sink.close()


def test_records_of_steps_do_not_wait_for_the_disk(tmp_path, make_run, make_step, monkeypatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(best_effort.os, "fsync", synced.append)
    sink = JsonlSink(tmp_path / "records.jsonl")
    for record in (make_step(1), ExpertRecord(step=1, layers={}), GuardRecord(step=1, statistics={})):
        sink.write(record)
    assert synced == []
    for record in (make_run(), EventRecord(step=1, name="checkpoint saved")):
        sink.write(record)
    assert len(synced) == 2
    sink.close()


@pytest.mark.parametrize("num_lost_bytes", [1, 2, 60])
def test_a_resumed_run_appends_after_a_torn_line(tmp_path, make_run, make_step, num_lost_bytes: int) -> None:
    path = tmp_path / "records.jsonl"
    write_all(path, [make_run(), make_step(1), make_step(2)])
    torn = path.read_bytes()[:-num_lost_bytes]
    path.write_bytes(torn)
    write_all(path, [make_run(resumed_from_step=1), make_step(2, loss=2.0)])
    assert path.read_bytes().startswith(torn), "history is never rewritten"
    steps = [record for record in current_records(read_records(path)) if isinstance(record, StepRecord)]
    assert [(record.step, record.loss) for record in steps] == [(1, 4.0), (2, 2.0)]


def test_a_torn_line_at_the_end_is_ignored(tmp_path, make_run, make_step) -> None:
    path = tmp_path / "records.jsonl"
    write_all(path, [make_run(), make_step(1)])
    path.write_bytes(path.read_bytes() + to_json(make_step(2)).encode()[:30])
    assert read_records(path) == read_records(path)[:2]
    JsonlSink(path).close()  # a run that was killed before it wrote anything
    assert len(read_records(path)) == 2


def test_damage_in_the_middle_is_an_error(tmp_path, make_run, make_step) -> None:
    path = tmp_path / "records.jsonl"
    write_all(path, [make_run(), make_step(1), make_step(2)])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], lines[1][:20], lines[2]]) + b"\n")
    with pytest.raises(DataError, match=r"records.jsonl, line 2: not valid JSON"):
        read_records(path)


def test_a_complete_invalid_line_is_an_error_even_at_the_end(tmp_path, make_run) -> None:
    path = tmp_path / "records.jsonl"
    write_all(path, [make_run()])
    path.write_bytes(path.read_bytes() + b'{"kind": "dance"}\n')
    with pytest.raises(DataError, match=r"line 2: unknown kind"):
        read_records(path)


def test_repeated_steps_count_once_and_rolled_back_steps_do_not_count(make_run, make_step, make_eval) -> None:
    first = [make_run(), *(make_step(i) for i in range(1, 6)), make_eval(2), make_eval(4)]
    event = EventRecord(step=5, name="exit", detail="killed")
    second = [make_run(resumed_from_step=3), make_step(4, loss=1.0)]
    current = current_records([*first, event, *second])
    steps = {record.step: record.loss for record in current if record.kind == "step"}
    assert steps == {1: 4.0, 2: 4.0, 3: 4.0, 4: 1.0}
    assert [record.step for record in current if record.kind == "eval"] == [2]
    assert event in current
    assert sum(record.kind == "run" for record in current) == 2


def test_a_restart_in_the_same_file_supersedes_all_steps(make_run, make_step) -> None:
    current = current_records([make_run(), make_step(1), make_step(2), make_run(), make_step(1, loss=9.0)])
    assert [record.loss for record in current if record.kind == "step"] == [9.0]


def test_of_two_evaluations_of_a_step_the_last_counts_for_each_split(make_run, make_eval) -> None:
    records = [make_run(), make_eval(2, 3.0), make_eval(2, 3.5, split="test"), make_eval(2, 2.5)]
    losses = {record.split: record.loss for record in current_records(records) if record.kind == "eval"}
    assert losses == {"valid": 2.5, "test": 3.5}


def test_rolled_back_statistics_do_not_count(make_run, make_statistics) -> None:
    records = [
        make_run(),
        make_statistics(2),
        make_statistics(4),
        make_run(resumed_from_step=2),
        make_statistics(4, recipe="again"),
    ]
    current = [record for record in current_records(records) if record.kind == "quantization"]
    assert [(record.step, record.recipe) for record in current] == [(2, "tensorwise"), (4, "again")]
    records.insert(4, make_statistics(6))
    assert [record.step for record in current_records(records[:4]) if record.kind == "quantization"] == [2]


def test_records_lost_on_a_full_disk_are_an_event(tmp_path, make_run, make_step, monkeypatch, capsys) -> None:
    """The run record is never lost: without it the run is unknown."""
    monkeypatch.setattr(best_effort, "BACKLOG_BYTES", 4 * len(to_json(make_step(10))))
    path = tmp_path / "records.jsonl"
    path.symlink_to("/dev/full")
    sink, run = JsonlSink(path), make_run()
    sink.write(run)
    for step in range(10, 20):
        sink.write(make_step(step))
    path.unlink()
    sink.write(make_step(20))
    sink.close()
    records = read_records(path)
    assert records[0] == run
    steps = [record.step for record in records if record.kind == "step"]
    assert steps == list(range(steps[0], 21)) and steps[0] > 10
    (event,) = [record for record in records if record.kind == "event"]
    assert (event.name, event.detail) == ("records lost", f"{steps[0] - 10} records could not be written to disk")
    warnings = capsys.readouterr().out.splitlines()
    assert len(warnings) == 3 and "the disk is full" in warnings[0]


def test_a_removed_run_folder_gets_records_that_reports_can_read(tmp_path, make_run, make_step) -> None:
    sink, run = JsonlSink(tmp_path / "run/records.jsonl"), make_run()
    sink.write(run)
    sink.write(make_step(1))
    shutil.rmtree(tmp_path / "run")
    sink.write(make_step(2))
    sink.close()
    assert read_records(tmp_path / "run/records.jsonl") == [run, make_step(2)]
