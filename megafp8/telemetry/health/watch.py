"""Findings as they come, each tensor's once, and all of them at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megafp8.telemetry.health.rules import AFTER_WARMUP, GROWING, RULES, Finding
from megafp8.telemetry.records import EventRecord, QuantizationRecord

EVENT = "health"
MAX_NAMED = 3


class HealthWatch:
    """Holds the rules against the newest looks.

    Args:
        warmup_steps: of the learning rate; some rules wait for its end.
    """

    def __init__(self, warmup_steps: float = 0):
        self.warmup_steps = warmup_steps
        self.looks: deque[QuantizationRecord] = deque(maxlen=GROWING)
        self.num_looks = 0
        self.first_seen: dict[str, dict[str, int]] = {rule.name: {} for rule in RULES}

    def look(self, record: QuantizationRecord) -> list[EventRecord]:
        """What a look shows for the first time, an event a rule."""
        self.looks.append(record)
        self.num_looks += 1
        events = []
        for rule in RULES:
            looks = [each for each in self.looks if rule.name not in AFTER_WARMUP or each.step > self.warmup_steps]
            seen = self.first_seen[rule.name]
            new = [finding for finding in (rule.find(looks) if looks else ()) if finding.tensor not in seen]
            seen.update((finding.tensor, record.step) for finding in new)
            if new:
                detail = f"{rule.name}: {listed(new)}; try: {rule.mend}"
                events.append(EventRecord(step=record.step, name=EVENT, detail=detail))
        return events

    def summary(self, step: int) -> EventRecord:
        """Everything that was found, in a line."""
        parts = [
            f"{rule} ({len(seen)} tensors, first at step {min(seen.values())})"
            for rule, seen in self.first_seen.items()
            if seen
        ]
        looks = f"{self.num_looks} look{'s' if self.num_looks > 1 else ''} at quantization"
        return EventRecord(step=step, name=EVENT, detail=f"{looks}: {'; '.join(parts) or 'nothing to report'}")


def listed(findings: Sequence[Finding]) -> str:
    """The first findings, and how many more there are."""
    text = "; ".join(f"{finding.tensor}: {finding.what}" for finding in findings[:MAX_NAMED])
    more = len(findings) - MAX_NAMED
    return f"{text}; and {more} more" if more > 0 else text
