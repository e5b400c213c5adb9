"""Pretrain a GPT: `megafp8 pretrain FLAGS`, on N devices `torchrun --nproc-per-node N -m megafp8.cli.pretrain FLAGS`.

`--help` shows the common flags, `--dry-run` prints what a run would be and stops. `errors.py` has the exit statuses;
a dry run with `--strict` that does not fit has 1.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

from megafp8.errors import INTERNAL, CapabilityError, CheckpointError, Megafp8Error, OutOfMemory
from megafp8.utils import memory
from megafp8.utils.object_store import url_of
from megafp8.utils.process import die_with_torchrun

if TYPE_CHECKING:
    from megafp8.training.checks import ValidatedRun


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run and return the exit status. torch is imported only after `--help` has had its chance.

    Args:
        argv: None: the process's arguments; the process then ends when the torchrun that started it does, and without
            returning when memory is lacking.
    """
    try:
        if argv is None:
            die_with_torchrun()  # before the imports, which take seconds
            gc.disable()  # collections would take a tenth of them, and find nothing
        validated = check_command_line(sys.argv[1:] if argv is None else argv)
        if validated.invocation.dry_run:
            from megafp8.device.platform import rank
            from megafp8.planning.dry_run import describe_run

            if rank() == 0:
                run = describe_run(validated)
                print(run.text)
                return int(validated.invocation.strict and not run.fits)
        else:
            from megafp8.training.extensions.memory_snapshots import early_requests_ignored
            from megafp8.training.pretrain import run_training
            from megafp8.utils.best_effort import best_effort

            # From here on a full disk or a closed terminal loses output, but does not end training.
            sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)
            if argv is None:
                gc.freeze()  # modules stay: no later collection looks at them, nor copies them in forked processes
                gc.enable()
            with early_requests_ignored(validated.invocation.config):
                return run_training(validated)
        return 0
    except Exception as raised:
        error = memory.without_settings(raised) or raised
        if isinstance(error, OutOfMemory) and argv is None:
            memory.end_process(error)
        if isinstance(error, Megafp8Error):
            if not is_reported_elsewhere(error):
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return error.exit_status
        traceback.print_exc()
        if isinstance(error, ModuleNotFoundError):
            print(how_to_install(error.name), file=sys.stderr)
        return INTERNAL


def check_command_line(argv: Sequence[str]) -> ValidatedRun:
    """Parse a command line, which needs no package, and check it.

    Raises:
        Megafp8Error: every problem. Without a package of the checks: the problems of the flags, and what to install.
    """
    from megafp8.config import flags
    from megafp8.training import checkpoint_settings

    try:
        parsed, problems = checkpoint_settings.parse(argv)
        from megafp8.training.checks import check
    except ModuleNotFoundError as error:
        _, problems = flags.parse_with_problems(argv)
        raise CapabilityError([*problems, how_to_install(error.name)]) from error
    validated, checkpoint = check(parsed, problems), parsed.config.checkpoint
    if parsed.dry_run or not any(map(url_of, filter(None, (checkpoint.load, checkpoint.pretrained_checkpoint)))):
        return validated
    # After the checks that need no checkpoint, since a download takes time; then those that read it.
    from megafp8.training.uploads import download_checkpoints

    notes = download_checkpoints(checkpoint)
    return check(dataclasses.replace(parsed, warnings=(*parsed.warnings, *notes)), problems)


def how_to_install(package: Optional[str]) -> str:
    """The line that says how to get a package that this Python does not have."""
    return (
        f"{sys.executable} has no {package}: `{sys.executable} -m pip install -e .` in the checkout installs what is "
        "missing. Is it the right environment? See megafp8 doctor"
    )


def is_reported_elsewhere(error: Megafp8Error) -> bool:
    """Whether another rank prints this error.

    The ranks of a machine see the same wrong flags and paths, non-finite numbers and folder in use: local rank 0
    reports them, since another machine may lack a path that this one has. A checkpoint may fail on all ranks or on one.
    Any other error may be one rank's alone.
    """
    if isinstance(error, CheckpointError):
        from megafp8.device.platform import is_reported_by_first_rank

        return is_reported_by_first_rank(str(error))
    return os.environ.get("LOCAL_RANK", "0") != "0" and error.exit_status in (64, 65, 73)


if __name__ == "__main__":
    sys.exit(main())
