"""Long documents without a network: the Python sources of each folder of installed packages as one document.

python benchmarks/long_documents.py FILE.jsonl [--min-bytes 65536] [--folder SITE_PACKAGES]
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path


def main() -> None:
    """Write the corpus and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--min-bytes", type=int, default=65_536, help="shorter documents are left out")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("purelib")))
    options = parser.parse_args()
    lengths = []
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as lines:
        for folder in sorted({path.parent for path in options.folder.rglob("*.py")}):
            texts = (path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))
            text = "\n".join(texts)
            if len(text.encode()) >= options.min_bytes:
                lengths.append(len(text.encode()))
                lines.write(json.dumps({"text": text}) + "\n")
    if not lengths:
        parser.error(f"{options.folder} has no folder with {options.min_bytes} bytes of Python sources")
    print(
        f"{len(lengths)} documents, {sum(lengths) / 1e6:.1f} MB, {sum(lengths) / len(lengths) / 1e3:.0f} kB on average"
    )


if __name__ == "__main__":
    main()
