"""A checked configuration becomes a run on this process's device."""

from __future__ import annotations

import logging

from megafp8.device.platform import detect_platform, leave_ranks, rank
from megafp8.training.assemble import assemble
from megafp8.training.check import Checked
from megafp8.training.describe import recipe_lines
from megafp8.training.loop import train


def run_training(checked: Checked) -> None:
    """Train from start to end; all ranks call it."""
    config = checked.invocation.config
    if config.logging.logging_level is not None:
        # Without a handler of its own the root logger shows warnings and worse only, whatever its level.
        logging.basicConfig(level=config.logging.logging_level, force=True)
    if rank() == 0:
        for notice in checked.notices:
            print(f"notice: {notice}", flush=True)
        for line in recipe_lines(config, checked.implementation):
            print(line, flush=True)
    platform = detect_platform(config.parallel.distributed_backend)
    run = assemble(config, platform, checked.implementation)
    train(run)
    leave_ranks()
