"""Run the reproducers of docs/upstream.md on libraries without patches: `python tests/reproducers.py NUMBER ...`.

Each block runs in this process, in a namespace of its own. The output is a line of JSON with the name of the error that
each one ended with, or null.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Optional

PAGE = Path(__file__).resolve().parents[1] / "docs" / "upstream.md"
BLOCK = re.compile(r"^```python\n# ([^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def reproducers() -> list[tuple[str, str]]:
    """The blocks of the page: the library with its versions, and the code."""
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def expected_error(code: str) -> Optional[str]:
    """The name of the error in the last line of a block, if it ends with one."""
    last = code.rstrip().splitlines()[-1]
    return last.removeprefix("# ") if last.startswith("# ") else None


def run(code: str) -> Optional[str]:
    """Run a block; the name of its error."""
    try:
        exec(compile(code, str(PAGE), "exec"), {"__name__": "reproducer"})
    except Exception as error:
        return type(error).__name__
    return None


if __name__ == "__main__":
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    warnings.simplefilter("ignore")
    from megafp8.mcore.cpu_patches import patch_triton_import

    patch_triton_import()  # without it megatron-core 0.19 cannot be imported here
    blocks = reproducers()
    print(json.dumps([run(blocks[int(number)][1]) for number in sys.argv[1:]]))
