"""Traces as torch's profiler writes them, from a few events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def event(name: str, start_us: float, duration_us: float, category: str = "kernel", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us, "tid": thread}


def write(path: Path, *events: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": list(events)}))
    return path


STEPS = [event(f"ProfilerStep#{number}", 1000 * number, 1000, "user_annotation") for number in (3, 4)]
