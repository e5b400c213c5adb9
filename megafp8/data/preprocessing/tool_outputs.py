"""What tokenizers and preprocessing write, by its names: it may lie in a folder of text, and is none."""

from __future__ import annotations

from pathlib import Path

# A tokenizer of Hugging Face's library; GPT-2's own files have a word and a hyphen before theirs.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",
)  # fmt: skip
GPT2_SUFFIXES = ("-vocab.json", "-merges.txt")
# Beside a shard, and of the documents that a job passed over.
SHARD_SUFFIXES = (".manifest.json", ".skipped.jsonl")
PARTS_SUFFIX = ".parts"


def is_tool_output(path: Path) -> bool:
    """Whether a file's name, or what lies beside it, says that a tokenizer or a preprocessing job wrote it."""
    return (
        path.name in TOKENIZER_FILES
        or path.name.endswith(GPT2_SUFFIXES + SHARD_SUFFIXES)
        or path.parent.suffix == PARTS_SUFFIX
        or is_training_record(path)
    )


def is_training_record(path: Path) -> bool:
    """Whether it is the record that `tokenizer_training` keeps: PREFIX.json, or training.json in the folder."""
    is_of_folder = path.name == "training.json" and path.with_name("tokenizer.json").exists()
    return is_of_folder or (path.suffix == ".json" and path.with_suffix(".model").exists())
