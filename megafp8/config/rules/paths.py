"""Rules about files and folders on this machine."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from megafp8.config.data_blend import parse_blend
from megafp8.config.rules.base import shards_by_flag
from megafp8.config.schema import RunConfig
from megafp8.utils.object_store import ObjectError, is_url, listed_folder, url_of
from megafp8.utils.suggestions import hub_hint


def shards_are_there(config: RunConfig, world_size: int) -> Iterator[str]:
    """A shard consists of two files, PREFIX.bin and PREFIX.idx."""
    for flag, words in shards_by_flag(config.data):
        try:
            prefixes = parse_blend(words).prefixes
        except ValueError:  # `blends_are_pairs` reports it
            continue
        for prefix in prefixes:
            if is_url(prefix):
                yield from (f"{flag} {problem}" for problem in _object_problems(prefix))
                continue
            missing = [prefix + suffix for suffix in (".bin", ".idx") if not os.path.isfile(prefix + suffix)]
            if missing:
                yield f"{flag} {prefix}: {_shard_problem(prefix, missing)}"


def _object_problems(prefix: str) -> Iterator[str]:
    """What is wrong with a shard in object storage."""
    try:
        parent, _, name = prefix.rpartition("/")
        found = listed_folder(parent)[1]
        missing = [suffix for suffix in (".bin", ".idx") if name + suffix not in found]
    except ObjectError as error:
        yield str(error)
        return
    if missing:
        yield f"{prefix}: no such object: {', '.join(prefix + suffix for suffix in missing)}{_prefix_hint(prefix)}"


TEXT_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt", ".parquet", ".gz", ".zst")


def _shard_problem(prefix: str, missing: list[str]) -> str:
    if os.path.isfile(prefix) and prefix.endswith(TEXT_SUFFIXES):
        name = Path(prefix).name.partition(".")[0]
        return (
            f"that is text: run megafp8 preprocess --input {prefix} --output-prefix {name} with the flags of the "
            f"tokenizer, then give {name}_text_document"
        )
    return f"no such file: {', '.join(missing)}{_prefix_hint(prefix)}"


def _prefix_hint(prefix: str) -> str:
    """A hint for a prefix without files, which is often the --output-prefix of megafp8 preprocess."""
    if prefix.endswith((".bin", ".idx")):
        return " (give the prefix, without .bin or .idx)"
    shards = [path.removesuffix(".idx") for path in sorted(glob.glob(f"{glob.escape(prefix)}_*_document.idx"))]
    return f"; did you mean {' or '.join(shards)}?" if shards else ""


def tokenizer_files_are_there(config: RunConfig, world_size: int) -> Iterator[str]:
    """The tokenizer's files exist and can be read."""
    data = config.data
    for flag, path in (
        ("--tokenizer-model", data.tokenizer_model),
        ("--vocab-file", data.vocab_file),
        ("--merge-file", data.merge_file),
    ):
        if path is None or data.tokenizer_type in ("NullTokenizer", "ByteLevelTokenizer"):
            continue
        if data.tokenizer_type == "TikTokenizer" and path.isidentifier():
            continue  # may be the name of a tiktoken encoding
        if not os.path.exists(path):
            yield f"{flag} {path}: no such file{hub_hint(path, 'tokenizer.json', 'tokenizer_config.json')}"
        elif not os.access(path, os.R_OK):
            yield f"{flag} {path}: permission denied"


def prompts_are_there(config: RunConfig, world_size: int) -> Iterator[str]:
    """The file of --sample-prompts can be read."""
    path = config.logging.sample_prompts
    if path is not None and not os.path.isfile(path):
        yield f"--sample-prompts {path}: no such file; give a text file with a prompt a line, or --sample-prompt TEXT"


def task_files_are_there(config: RunConfig, world_size: int) -> Iterator[str]:
    """The files of --eval-tasks can be read."""
    for path in config.training.eval_tasks:
        if not os.path.isfile(path):
            yield f"--eval-tasks {path}: no such file; give a file of JSON lines, a question a line"


def checkpoints_to_load_are_there(config: RunConfig, world_size: int) -> Iterator[str]:
    """The folder to load from exists, unless it is the one that the run saves to and will resume from."""
    checkpoint = config.checkpoint
    if checkpoint.load is not None and not _is_there(checkpoint.load):
        if checkpoint.exit_on_missing_checkpoint or checkpoint.save is None:
            yield f"--load {checkpoint.load}: no such folder{_model_hint(checkpoint.load)}"
        elif os.path.abspath(checkpoint.load) != os.path.abspath(checkpoint.save):
            yield (
                f"--load {checkpoint.load}: no such folder{_model_hint(checkpoint.load)}, and it differs from --save "
                f"{checkpoint.save}; give a folder with a checkpoint, or --load {checkpoint.save} to resume from what "
                "the run saves"
            )
    if checkpoint.pretrained_checkpoint is not None and not _is_there(checkpoint.pretrained_checkpoint):
        path = checkpoint.pretrained_checkpoint
        yield f"--pretrained-checkpoint {path}: no such folder{_model_hint(path)}"


def _is_there(folder: str) -> bool:
    """Whether a folder exists, or is a copy of one in object storage that is downloaded later."""
    return os.path.isdir(folder) or url_of(folder) is not None


def _model_hint(name: str) -> str:
    hint, folder = hub_hint(name), Path(name).name
    return hint and f"{hint}, then megafp8 convert from-hf {folder} models/{folder}"


def outputs_can_be_written(config: RunConfig, world_size: int) -> Iterator[str]:
    """Output folders exist or can be created."""
    for flag, path in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--wandb-save-dir", config.logging.wandb_save_dir or None),
    ):
        problem = None if path is None else write_problem(path)
        if problem:
            yield f"{flag} {path}: {problem}; choose another folder"
    cache = config.data.data_cache_path
    # An existing cache may hold every index that the run needs, so it need not be writable.
    if cache is not None and not os.path.isdir(cache) and (problem := write_problem(cache)):
        yield f"--data-cache-path {cache}: {problem}; choose another folder"


def write_problem(path: str) -> str:
    """Why no file can be created in the folder `path` or its nearest existing parent; empty if one can."""
    if not path:
        return "the name is empty"
    if "://" in path:
        return "only folders in a local or mounted file system are supported"
    absolute = Path(path).absolute()
    nearest = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"no write permission for {nearest}"
    return ""
