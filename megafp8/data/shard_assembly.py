"""Parts into shards, in the order of the input, each as soon as it and all before it are there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from megafp8.data.part_files import PartFolder, PartRecord, ShardJoiner
from megafp8.data.preprocess_plan import Part, Unit
from megafp8.data.readers import Source
from megafp8.data.shards import ShardTotals
from megafp8.utils.strict_json import parse_json


def skipped_path(output_prefix: str) -> Path:
    """Return the path of the list of records that a job skipped."""
    return Path(f"{output_prefix}.skipped.jsonl")


class ShardAssembly:
    """Takes parts in any order and joins them in that of the input; use as a context manager.

    Args:
        units: the division of the input.
        sources: the input.
        folder: of the parts.
    """

    def __init__(self, units: Sequence[Unit], sources: Sequence[Source], folder: PartFolder):
        self._units, self._sources, self._folder = units, sources, folder
        self._joiners = [ShardJoiner(folder, key) for key in range(folder.num_keys)]
        self._skipped = open(folder.path / "joined.skipped", "wb")  # noqa: SIM115  __exit__ closes it
        self._records: dict[str, PartRecord] = {}
        self._num_parts: dict[str, int] = {}
        self._unit = self._block = 0
        self._records_before = [0] * len(sources)
        self.num_skipped = 0
        self.num_tokens = 0

    def __enter__(self) -> "ShardAssembly":
        return self

    def add(self, name: str, record: PartRecord) -> None:
        """Take a part, and join what can be joined."""
        self._records[name] = record
        while (ready := self._next_name()) in self._records:
            self._join(ready, self._records.pop(ready))
            self._block += 1

    def end_stream(self, name: str, num_parts: int) -> None:
        """Take the number of parts of a stream."""
        self._num_parts[name] = num_parts

    def publish(self, output_prefix: str, prefixes: Sequence[str]) -> list[ShardTotals]:
        """Write the shards, one a key, and the list of what was skipped, if anything was."""
        assert self._next_name() is None and not self._records
        self._skipped.close()
        if self.num_skipped:
            os.replace(self._skipped.name, skipped_path(output_prefix))
        else:
            skipped_path(output_prefix).unlink(missing_ok=True)
        return [joiner.publish(prefix) for joiner, prefix in zip(self._joiners, prefixes, strict=True)]

    def __exit__(self, *_: object) -> None:
        self._skipped.close()
        for joiner in self._joiners:
            joiner.close()

    def _next_name(self) -> Optional[str]:
        """The part that comes next; None at the end."""
        while self._unit < len(self._units):
            unit = self._units[self._unit]
            if isinstance(unit, Part):
                if self._block == 0:
                    return unit.name
            elif self._block < self._num_parts.get(unit.name, self._block + 1):
                return unit.part_name(self._block)
            self._unit, self._block = self._unit + 1, 0
        return None

    def _join(self, name: str, record: PartRecord) -> None:
        for joiner in self._joiners:
            joiner.add(name)
        if record.num_skipped:
            self._list_skipped(name)
        for source, count in record.num_records:
            self._records_before[source] += count
        self.num_skipped += record.num_skipped
        self.num_tokens += sum(record.num_tokens)

    def _list_skipped(self, name: str) -> None:
        lines = self._folder.skipped_path(name).read_text(encoding="utf-8").splitlines()
        for number, place, reason in sorted(map(parse_json, lines)):
            source = self._sources[number]
            found = {"path": source.path, source.record_name: self._records_before[number] + place + 1}
            line = json.dumps(found | {"reason": reason}, ensure_ascii=False)
            self._skipped.write(line.encode("utf-8", errors="replace") + b"\n")
