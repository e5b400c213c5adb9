"""The tokenizer of a run whose flags name none: that of its shards' manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from megafp8.config.data_blend import parse_blend
from megafp8.config.rules.base import shards_by_flag
from megafp8.config.schema import DataConfig
from megafp8.config.settings import settings_by_name
from megafp8.errors import DataError


def tokenizer_of_shards(
    data: DataConfig, vocab_size: Optional[int], warnings: list[str], problems: list[str]
) -> dict[str, Any]:
    """The settings of the tokenizer of the first shard's manifest, by name; empty if the flags name one.

    The loader compares the tokenizer with the manifests of all shards, as it does for one that flags name.

    Args:
        warnings: to which the flags that it stands for are added.
        problems: to which a tokenizer that is not here is added.
    """
    # numpy, which they import, must come after torch: where memory is lacking, OpenBLAS would end the process.
    from megafp8.data.shards import load_manifest, manifest_path
    from megafp8.data.tokenizers.build import TOKENIZER_PATHS, TOKENIZER_SETTINGS

    if any(getattr(data, name) is not None for name in ("tokenizer_type", *TOKENIZER_PATHS)):
        return {}
    try:
        prefix = next(each for _, words in shards_by_flag(data) if words for each in parse_blend(words).prefixes)
        manifest = load_manifest(prefix)
    except (StopIteration, ValueError, DataError):
        return {}  # no shards, or reported when they are read
    settings = {} if manifest is None else manifest.tokenizer_settings
    values = {f"data.{name}": settings[name] for name in TOKENIZER_SETTINGS if name in settings}
    if "data.tokenizer_type" not in values:
        return {}
    if vocab_size is None and "vocab_size" in settings:
        values["model.vocab_size"] = settings["vocab_size"]
    flags = " ".join(settings_by_name()[name].as_flag(value) for name, value in values.items())
    paths = [values[f"data.{name}"] for name in TOKENIZER_PATHS if f"data.{name}" in values]
    if not all(Path(path).exists() for path in paths):
        problems.append(
            f"--tokenizer-type is missing: {manifest_path(prefix)} names {flags}, but that file is not here: give "
            "these flags with its present path"
        )
        return {}
    warnings.append(f"tokenizer of {manifest_path(prefix)}: {flags}")
    return values
