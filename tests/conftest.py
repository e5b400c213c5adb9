"""Common setup of all tests: one thread, no compilation, and GPU tests only with a GPU.

This folder is on the import path of all tests: `ranks`, `small_run`, `tolerances`.
"""

from __future__ import annotations

import gc
import os
import signal

gc.disable()  # until all tests are imported: collections would take a tenth of that time
# Before torch is imported: a process that has started thread pools cannot be forked safely (see ranks.py).
os.environ["OMP_NUM_THREADS"] = "1"

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist

from megafp8.mcore.cpu_patches import KNOWN_WARNINGS, apply_import_patches

torch.set_num_threads(1)
apply_import_patches()  # before megatron-core is imported, whichever test does it first
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup SIGHUP is ignored, also by child processes

# Emitted at import by torch.jit and by megatron-core itself.
IMPORT_WARNINGS = (
    (DeprecationWarning, r"`torch\.jit\.script.*` is deprecated", r"torch\.jit\..*"),
    (DeprecationWarning, r"The following imports from `dynamic_context.py`", r"megatron\.core\..*"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Leave the warnings that megatron-core emits on every run out of the summary (pytest overrides the process's
    filters)."""
    for category, message, module in (*KNOWN_WARNINGS, *IMPORT_WARNINGS):
        config.addinivalue_line("filterwarnings", f"ignore:{message}:{category.__name__}:{module}")


@pytest.fixture(autouse=True, scope="session")
def no_gloo_in_this_process() -> Iterator[None]:
    """gloo's threads do not survive a fork: after one gloo group here, every later test on forked ranks would hang."""
    test_process, plain = os.getpid(), dist.init_process_group

    def init_elsewhere(backend: Optional[str] = None, *args: Any, **kwargs: Any) -> None:
        if os.getpid() == test_process and backend == "gloo":
            pytest.fail("a test joined a gloo group in the test process itself; run it with ranks.run_ranks(1, ...)")
        plain(backend, *args, **kwargs)

    dist.init_process_group = init_elsewhere
    yield
    dist.init_process_group = plain


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for more tests and for the snapshots of generated files."""
    parser.addoption("--all-cases", action="store_true", help="also run the cases of tests/more_cases.txt")
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes, and --all-cases")
    parser.addoption("--write-snapshots", action="store_true", help="take the scripts that come out for right")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the long tests without their option, and GPU tests on a machine without a GPU."""
    is_long, all_cases = (config.getoption(option) for option in ("--long", "--all-cases"))
    more = set((Path(__file__).parent / "more_cases.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.get_closest_marker("long") and not is_long:
            item.add_marker(pytest.mark.skip(reason="takes minutes: --long"))
        if item.nodeid in more and not (is_long or all_cases):
            item.add_marker(pytest.mark.skip(reason="repeats another case: --all-cases"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage again, but never look at what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what a successful run did not test, at the end. Programs and machines may be missing."""
    reasons = Counter(skipped.longrepr[2] for skipped in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"NOT TESTED ({count}): {reason.removeprefix('Skipped: ')}")
