"""Where a model came from: its family, special tokens and settings of generation, which no setting of a run holds.

`from-hf` records them as JSON text among the plain values of the checkpoint (`origin`), runs hand them on to their own
checkpoints, and `to-hf` gives them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint.convert.companion_files import read_companion
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.errors import CheckpointError
from megafp8.utils.files import UnreadableFile
from megafp8.utils.strict_json import parse_json

ORIGIN = "origin"
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class Origin:
    """What a model's folder had besides its weights and the settings of its model.

    Attributes:
        model_type: its family.
        num_tokens: size of its vocabulary.
        token_ids: those of `TOKEN_FIELDS` that config.json had.
        generation: content of generation_config.json; None without the file.
        eod: the tokenizer's id of the end of a document; None if megafp8 reads no tokenizer there.
    """

    model_type: str
    num_tokens: int
    token_ids: dict[str, Any]
    generation: Optional[dict[str, Any]]
    eod: Optional[int]

    def text(self) -> str:
        """Return it as JSON text."""
        return json.dumps(asdict(self))

    def ends_documents_with(self, token: int) -> bool:
        """Return whether a token ended its texts."""
        ends = [fields.get("eos_token_id") for fields in (self.token_ids, self.generation or {})]
        return any(token == end or (isinstance(end, list) and token in end) for end in (*ends, self.eod))


def read_token_ids(hf_config: HFConfig) -> dict[str, Any]:
    """Return those of `TOKEN_FIELDS` that config.json has. Values that are no ids become problems."""
    fields = {name: hf_config.fields[name] for name in TOKEN_FIELDS if name in hf_config.fields}
    hf_config.problems += [
        f"{hf_config.name}: {name} is {value!r} and no id of a token, list of ids or null"
        for name, value in fields.items()
        if value is not None and not all(type(each) is int for each in (value if isinstance(value, list) else [value]))
    ]
    return fields


def read_generation(folder: Path) -> Optional[dict[str, Any]]:
    """Return the content of generation_config.json; None without the file.

    Raises:
        CheckpointError: it cannot be read, or is no file of the model.
    """
    path = folder / GENERATION_FILE
    content = read_companion(path)
    try:
        generation = None if content is None else parse_json(content)
    except UnreadableFile as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error.reason}") from error
    if generation is not None and not isinstance(generation, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return generation


def origin_of(common: Mapping[str, Any]) -> Optional[Origin]:
    """Return the origin in the plain values of a checkpoint; None if there is none, as in older ones."""
    text = common.get(ORIGIN)
    return None if text is None else Origin(**parse_json(text))


def generation_of(origin: Origin, ids: dict[str, Any]) -> Optional[dict[str, Any]]:
    """Return the content of generation_config.json, which transformers prefers to config.json; None for no file.

    Args:
        ids: BOS and EOS that stand in for what a model without any EOS lacks.
    """
    if origin.generation is not None:
        return origin.generation
    if origin.token_ids.get("eos_token_id") is not None:
        return origin.token_ids
    known = {name: value for name, value in origin.token_ids.items() if value is not None}
    return None if ids["eos_token_id"] is None else ids | known


def special_tokens(
    origin: Optional[Origin], tokenizer: Optional[Tokenizer], num_tokens: int
) -> tuple[dict[str, Any], Optional[dict[str, Any]], list[str]]:
    """Return special tokens of config.json, the content of generation_config.json (None: no file), and notes.

    They are those of the origin if the run kept its tokens. Otherwise, and where the origin names no EOS, BOS and EOS
    are the run's end of document, since in training each document follows that of the previous one.
    """
    eod = None if tokenizer is None else tokenizer.eod
    ids, notes = {"bos_token_id": eod, "eos_token_id": eod}, []
    if origin is not None:
        if num_tokens == origin.num_tokens and (eod is None or origin.ends_documents_with(eod)):
            return origin.token_ids, generation_of(origin, ids), []
        notes.append(
            f"the tokens are not those of the {origin.model_type} that the model came from ({origin.num_tokens} tokens "
            f"with EOS {origin.token_ids.get('eos_token_id')}; now {num_tokens} with {eod}): its special tokens and "
            f"{GENERATION_FILE} are left out"
        )
    # Some families have a default for padding, which is no row of a smaller embedding.
    return ids | {"pad_token_id": None}, ids, notes
