"""datatrove's tokenizer, for comparison: as many tasks as workers, each on its own files, without shuffling.

pip install datatrove
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process per core

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="folder of JSON lines, at least a file a worker")
    parser.add_argument("--output-prefix", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--tokenizer-type", choices=("HuggingFaceTokenizer",))
    parser.add_argument("--tokenizer-model", type=Path, required=True, help="folder with tokenizer.json")
    options = parser.parse_args()
    shutil.rmtree(options.output_prefix, ignore_errors=True)
    tokens = DocumentTokenizer(
        str(options.output_prefix / "tokens"), str(options.tokenizer_model / "tokenizer.json"),
        eos_token="<|endoftext|>", shuffle_documents=False,
    )  # fmt: skip
    # CPU time counts processes that this one waits for, which are not those of a fork server.
    LocalPipelineExecutor(
        [JsonlReader(options.input), tokens], tasks=options.workers, workers=options.workers,
        logging_dir=str(options.output_prefix / "logs"), start_method="fork",
    ).run()  # fmt: skip


if __name__ == "__main__":
    main()
