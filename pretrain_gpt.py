"""Pretrain a GPT: `python pretrain_gpt.py FLAGS`, or on N devices `torchrun --nproc-per-node N pretrain_gpt.py FLAGS`.

Parse, check, assemble, train. `--help` lists the flags, `--dry-run` shows what a run would be and stops.
Exit statuses: 0 done, 64 wrong flags, 65 numbers that are not finite, 66 wrong data, 70 an error within, 71 hung,
73 folder in use, 74 wrong checkpoint, 75 ended by a signal, to be continued.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from megafp8.errors import INTERNAL, CheckpointError, Megafp8Error
from megafp8.utils.process import end_with_torchrun


def main(argv: Sequence[str]) -> int:
    """Run and return the exit status. torch is imported only after `--help` has had its chance."""
    try:
        from megafp8.config import flags

        invocation, problems = flags.read(argv)
        from megafp8.training.checks import check

        checked = check(invocation, problems)
        if invocation.dry_run:
            from megafp8.training.dry_run import describe_run

            print(describe_run(checked))
        else:
            from megafp8.training.pretrain import run_training
            from megafp8.utils.best_effort import best_effort

            # From here on a full disk or a terminal that was closed takes output, but does not end training.
            sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)
            return run_training(checked)
        return 0
    except Megafp8Error as error:
        if not is_said_elsewhere(error):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, ModuleNotFoundError):
            print(f"{sys.executable} lacks it: another environment? See python tools/doctor.py", file=sys.stderr)
        return INTERNAL


def is_said_elsewhere(error: Megafp8Error) -> bool:
    """The ranks of a machine see wrong flags and paths, bad numbers and a folder in use alike: its first one says so.

    Another machine may lack a path that this one has. A checkpoint may fail on all ranks or on one, and otherwise a
    rank may fail alone.
    """
    if isinstance(error, CheckpointError):
        from megafp8.device.platform import is_said_by_first_rank

        return is_said_by_first_rank(str(error))
    return os.environ.get("LOCAL_RANK", "0") != "0" and error.exit_status in (64, 65, 73)


def entry_point() -> None:
    """The installed command `pretrain-gpt`."""
    end_with_torchrun()  # before the imports in `main`
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry_point()
