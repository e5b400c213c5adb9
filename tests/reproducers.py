"""Run the reproducers of docs/dev/upstream.md on libraries without patches: `python tests/reproducers.py NUMBER ...`.

Each block runs in this process, in a namespace of its own. The output is a line of JSON with the name of the error that
each one ended with, or null.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Optional

import torch.distributed as dist

PAGE = Path(__file__).resolve().parents[1] / "docs/dev/upstream.md"
BLOCK = re.compile(r"^```python\n# ([^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def reproducers() -> list[tuple[str, str]]:
    """The blocks of the page: the library with its versions, and the code."""
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def expected_errors(code: str) -> list[Optional[str]]:
    """The names of the errors in the last line of a block, any of which may end it; `[None]` if it ends without."""
    last = code.rstrip().splitlines()[-1]
    return [*last.removeprefix("# ").split(", or ")] if last.startswith("# ") else [None]


def wrong_endings(numbers: list[int]) -> list[str]:
    """Run some of the blocks in a process of their own; what ended otherwise than expected."""
    command = [sys.executable, __file__, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        return [done.stderr]
    blocks, found = reproducers(), json.loads(done.stdout.splitlines()[-1])
    wrong = [
        f"{error}: {blocks[number]}"
        for number, error in zip(numbers, found, strict=True)
        if error not in expected_errors(blocks[number][1])
    ]
    return [*wrong, done.stderr] if wrong else []


def run(code: str) -> Optional[str]:
    """Run a block; the name of its error."""
    try:
        exec(compile(code, str(PAGE), "exec"), {"__name__": "reproducer"})
    except Exception as error:
        return type(error).__name__
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    from megafp8.mcore.cpu_patches import apply_import_patches

    apply_import_patches()  # without them megatron-core 0.19 cannot be imported here
    blocks = reproducers()
    print(json.dumps([run(blocks[int(number)][1]) for number in sys.argv[1:]]))
