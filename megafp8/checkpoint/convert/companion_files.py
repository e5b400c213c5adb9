"""Small files beside a model's weights that are copied as they are: a tokenizer's, and settings of generation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

from megafp8.errors import CheckpointError
from megafp8.utils.files import LIST_BYTES, UnreadableFile, read_bytes


def read_companion(path: Path, follows_links: bool = False) -> Optional[bytes]:
    """Return the content of a file; None if there is none.

    A model's folder of the hub cache consists of links to the folder `blobs` of its cache. A link to any other place
    may be to a file that nobody wants to copy, such as a key.

    Args:
        follows_links: also to other places, for a file whose content was checked.

    Raises:
        CheckpointError: it is not a regular file of at most 256 MiB, or a link to another place.
    """
    if not os.path.lexists(path):
        return None
    target = Path(os.path.realpath(path))
    cache, folder = target.parent, Path(os.path.realpath(path.parent))
    is_in_cache = cache.name == "blobs" and cache.parent.name.startswith("models--")
    if not (follows_links or is_in_cache or target.is_relative_to(folder)):
        raise CheckpointError(
            f"{path} is a link to {target}, outside of the model's folder and of a cache of the hub; copy the file if "
            "it belongs to the model, or delete the link"
        )
    try:
        return read_bytes(path, LIST_BYTES)
    except UnreadableFile as error:
        raise CheckpointError(f"{path} cannot be copied: {error.reason}") from error
