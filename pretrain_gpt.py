"""Pretrain a GPT: `python pretrain_gpt.py FLAGS`, or on N devices `torchrun --nproc-per-node N pretrain_gpt.py FLAGS`.

Parse, check, assemble, train. `--help` lists the flags, `--dry-run` shows what a run would be and stops.
Exit statuses: 0 done, 64 wrong flags, 65 numbers that are not finite, 66 wrong data, 74 wrong checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megafp8.config import flags, rules
from megafp8.errors import ConfigError, Megafp8Error


def main(argv: Sequence[str]) -> int:
    """Run and return the exit status. torch is imported only once the flags are right."""
    try:
        invocation = flags.parse(argv)
        world_size = invocation.world_size or int(os.environ.get("WORLD_SIZE", 1))
        problems = rules.problems(invocation.config, world_size)
        if invocation.world_size is not None and not invocation.dry_run:
            problems.append("--world-size stands in for ranks that are not there: it goes with --dry-run only")
        from megafp8.device import capability

        target = capability.TARGETS[invocation.target] if invocation.target else capability.detect_target()
        problems += capability.problems(invocation.config, target)
        if problems:
            raise ConfigError(problems)
        implementation = capability.resolve_implementation(invocation.config.precision, target)
        from megafp8.device import mcore_cpu

        mcore_cpu.install()
        if invocation.dry_run:
            from megafp8.training.dry_run import describe_run

            print(describe_run(invocation, target, implementation, world_size))
            return 0
        from megafp8.training.main import run_training

        run_training(invocation, implementation)
        return 0
    except Megafp8Error as error:
        # Every rank sees wrong flags and bad numbers alike: one of them says so. Others may fail alone.
        if os.environ.get("RANK", "0") == "0" or error.exit_status not in (64, 65):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_status


def entry_point() -> None:
    """The installed command `pretrain-gpt`."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry_point()
