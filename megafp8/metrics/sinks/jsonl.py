"""records.jsonl: an append-only file with one JSON record per line, the source of all reports.

A killed run may leave a partial line at the end. The file is never rewritten: the next run terminates that line and
appends. So a partial line is valid only at the end of the file or directly before a run record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Union

from megafp8.errors import DataError
from megafp8.metrics.records import (
    EvalRecord,
    EventRecord,
    ExpertRecord,
    GuardRecord,
    QuantizationRecord,
    Record,
    RunRecord,
    SampleRecord,
    StepRecord,
    TornLineError,
    from_json,
    to_json,
)
from megafp8.utils.best_effort import LogFile
from megafp8.utils.files import UnreadableFile, open_regular

STEP_RECORDS = (StepRecord, QuantizationRecord, GuardRecord, EvalRecord, ExpertRecord, SampleRecord)


class JsonlSink:
    """Appends each record as one line.

    The operating system has the line when `write` returns, so it survives the process. Records other than those
    of many steps are also synced to the disk, together with all lines before them: a sync may take as long as a step.
    While the disk is full or missing, records are kept in memory (`LogFile`); an event reports how many were lost.
    """

    def __init__(self, path: Union[str, Path]):
        self._file = LogFile(path, "records")

    def write(self, record: Record) -> None:
        num_lost = self._append(record)
        if num_lost:
            detail = f"{num_lost} records could not be written to disk"
            self._append(EventRecord(step=getattr(record, "step", 0), name="records lost", detail=detail))

    def close(self) -> None:
        self._file.close()

    def _append(self, record: Record) -> int:
        line = to_json(record).encode("ascii") + b"\n"
        is_frequent = isinstance(record, (StepRecord, ExpertRecord, GuardRecord))
        return self._file.append(line, is_header=isinstance(record, RunRecord), sync=not is_frequent)


def read_records(path: Union[str, Path]) -> list[Record]:
    """All records of a file in file order, with superseded ones, which `current_records` removes.

    Raises:
        DataError: a line is damaged, other than by a killed run; the text names file and line.
    """
    records: list[Record] = []
    torn: Optional[DataError] = None
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            record = from_json(line.decode("utf-8", errors="replace"))
        except TornLineError as error:
            torn = torn or DataError(f"{path}, line {number}: {error}")
            continue
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if torn is not None and not isinstance(record, RunRecord):
            raise torn
        torn = None
        records.append(record)
    return records


def current_records(records: list[Record]) -> list[Record]:
    """The records that are valid after all resumptions.

    All run and event records are kept. Of the others, the last one of each step (and split or prompt) is kept, unless a
    later run record resumed from an earlier step.
    """
    current: dict[tuple[str, int, str], Record] = {}
    for position, record in enumerate(records):
        if isinstance(record, RunRecord):
            resumed_from_step = record.resumed_from_step or 0
            current = {
                key: old
                for key, old in current.items()
                if not (isinstance(old, STEP_RECORDS) and old.step > resumed_from_step)
            }
        if isinstance(record, STEP_RECORDS):
            part = record.prompt if isinstance(record, SampleRecord) else getattr(record, "split", "")
            key = (record.kind, record.step, part)
        else:
            key = (record.kind, position, "")
        current.pop(key, None)  # the newer record has its own place in the file order
        current[key] = record
    return list(current.values())


def lines_of(path: Union[str, Path]) -> list[bytes]:
    """The lines of a records file, without line feeds.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_regular(path) as stream:
            return stream.read().split(b"\n")
    except UnreadableFile as error:
        raise DataError(f"{path} cannot be read: {error.reason}") from error
