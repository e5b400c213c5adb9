"""The record of truth: a file that is only ever appended to, one JSON record a line.

A killed run may leave half a line at the end. Nothing is ever rewritten: the next run ends that line and appends,
so half a line can only stand last in the file or directly before a run record. Anywhere else it is damage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Union

from megafp8.errors import DataError
from megafp8.metrics.records import (
    EvalRecord,
    EventRecord,
    QuantizationRecord,
    Record,
    RunRecord,
    StepRecord,
    TornLineError,
    from_json,
    to_json,
)
from megafp8.utils.best_effort import LogFile
from megafp8.utils.files import UnreadableFile, open_regular

OF_STEPS = (StepRecord, QuantizationRecord, EvalRecord)


class JsonlSink:
    """Appends each record as one line.

    A line is with the operating system when `write` returns, so it survives the death of the process. All but the
    frequent step records are also forced to the disk, together with every line before them. While the disk is full or
    gone, records wait in memory (`LogFile`); an event says how many did not fit.
    """

    def __init__(self, path: Union[str, Path]):
        self._file = LogFile(path, "records")

    def write(self, record: Record) -> None:
        num_lost = self._append(record)
        if num_lost:
            detail = f"{num_lost}: their disk could not be written"
            self._append(EventRecord(step=getattr(record, "step", 0), name="records lost", detail=detail))

    def close(self) -> None:
        self._file.close()

    def _append(self, record: Record) -> int:
        line = to_json(record).encode("ascii") + b"\n"
        is_frequent = isinstance(record, StepRecord)
        return self._file.append(line, is_header=isinstance(record, RunRecord), sync=not is_frequent)


def read_records(path: Union[str, Path]) -> list[Record]:
    """Every record of a file in the order written, superseded ones included; `current_records` drops those.

    Raises:
        DataError: a line is damaged that a killed run cannot have left; the text names file and line.
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
    """What counts, after all resumptions: each step once, and no step that a resumption went back behind.

    Run and event records are all kept; they are history, not part of a curve. Of the other records the
    last of each step (and split) is kept, unless a later run record resumed from before it.
    """
    kept: dict[tuple[str, int, str], Record] = {}
    for position, record in enumerate(records):
        if isinstance(record, RunRecord):
            resumed_from_step = record.resumed_from_step or 0
            kept = {
                key: old
                for key, old in kept.items()
                if not (isinstance(old, OF_STEPS) and old.step > resumed_from_step)
            }
        if isinstance(record, OF_STEPS):
            key = (record.kind, record.step, getattr(record, "split", ""))
        else:
            key = (record.kind, position, "")
        kept.pop(key, None)  # so that the newer record takes its place in the order of the file
        kept[key] = record
    return list(kept.values())


def lines_of(path: Union[str, Path]) -> list[bytes]:
    """The lines of a records file, without their ends.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with open_regular(path) as stream:
            return stream.read().split(b"\n")
    except UnreadableFile as error:
        raise DataError(f"{path} cannot be read: {error.reason}") from error
