"""Findings as they come, each tensor's once, and all of them at the end."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from megafp8.config.fp8_schedule import is_quantized_at
from megafp8.config.schema import RunConfig
from megafp8.telemetry.health.advice import Case, Problems, advice
from megafp8.telemetry.health.rules import AFTER_WARMUP, GROWING, RULES, Finding, operands
from megafp8.telemetry.records import EventRecord, QuantizationRecord

EVENT = "health"
MAX_NAMED = 3
ONLY_TRIED = ", in high precision, asked for numbers that are not finite alone (other rules are about a run's recipe)"


class HealthWatch:
    """Holds the rules against the newest looks.

    Args:
        config, world_size: of the run.
        of_machine: see `advice.Case`.
        warmup_steps: of the learning rate; some rules wait for its end.
    """

    def __init__(
        self, config: RunConfig, world_size: int = 1, warmup_steps: float = 0,
        of_machine: Problems = lambda config: [],
    ):  # fmt: skip
        self.config, self.world_size, self.warmup_steps = config, world_size, warmup_steps
        self.of_machine = of_machine
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
                case = Case(self.config, self.world_size, linear_of(new[0].tensor), self.of_machine)
                tried = advice(case, rule.remedies)
                detail = f"{rule.name}: {listed(new)}" + (f"; try: {tried}" if tried else "")
                events.append(EventRecord(step=record.step, name=EVENT, detail=detail))
        return events

    def summary(self, first_step: int, last_step: int) -> EventRecord:
        """Everything that was found, in a line, and what it was found in.

        Args:
            first_step, last_step: the steps that were made.
        """
        if not self.num_looks:
            why = self.why_no_look(first_step, last_step)
            return EventRecord(step=last_step, name=EVENT, detail=f"no look at quantization: {why}")
        parts = [
            f"{rule} ({len(seen)} tensors, first at step {min(seen.values())})"
            for rule, seen in self.first_seen.items()
            if seen
        ]
        looks = f"{self.num_looks} look{'s' if self.num_looks > 1 else ''} at quantization"
        tensors = f"{len(operands(self.looks[-1]))} tensors{'' if self.looks[-1].tensors else ONLY_TRIED}"
        detail = f"{looks}, {tensors}: {'; '.join(parts) or 'nothing to report'}"
        return EventRecord(step=last_step, name=EVENT, detail=detail)

    def why_no_look(self, first_step: int, last_step: int) -> str:
        """Why no step was looked at."""
        interval, precision = self.config.logging.fp8_log_interval, self.config.precision
        assert interval is not None
        steps = f"steps {first_step} to {last_step}"
        if not any(step % interval == 0 for step in range(first_step, last_step + 1)):
            return f"none of the {steps} is a multiple of --fp8-log-interval {interval}; give a shorter one"
        if not any(is_quantized_at(precision, step) for step in range(first_step, last_step + 1)):
            return f"--fp8-schedule {precision.fp8_schedule} has the {steps} in high precision"
        return (
            f"--fp8-schedule {precision.fp8_schedule} has those of the {steps} in high precision that are multiples of "
            f"--fp8-log-interval {interval}; give a shorter one"
        )


def linear_of(tensor: str) -> str:
    """`layers.3.linear_fc1` of `layers.3.linear_fc1.input.row`."""
    return re.split(r"\.(?:input|weight|grad_output)\b", tensor)[0]


def listed(findings: Sequence[Finding]) -> str:
    """The first findings, and how many more there are."""
    text = "; ".join(f"{finding.tensor}: {finding.what}" for finding in findings[:MAX_NAMED])
    more = len(findings) - MAX_NAMED
    return f"{text}; and {more} more" if more > 0 else text
