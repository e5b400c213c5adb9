"""Training runs with a planted fault (`benchmarks/layer_faults.py`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.layer_faults import Fault, PlantedFault
from megafp8.checkpoint.progress import Progress
from megafp8.training import pretrain
from megafp8.training.extensions import build_extensions
from megafp8.training.run import Run


def train_with(run: Run, fault: Optional[Fault]) -> Progress:
    """Train, with a fault if there is one. It is that of all later runs of the process, so call it in forked ranks."""
    planted = [PlantedFault(fault)] if fault is not None else []
    pretrain.build_extensions = lambda: [*planted, *build_extensions()]
    return pretrain.train(run)
