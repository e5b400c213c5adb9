"""Tokenizers through tiktoken: Megatron's files of ranks, and the encodings that tiktoken has by name."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

from megafp8.data.tokenizer_files import hashes_of, identifiers_of, load_library, read_json
from megafp8.errors import ConfigError, DataError

# Megatron's splitting patterns (--tiktoken-pattern) and its layout of the vocabulary: so many special tokens first, the
# ranks of the file after them.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
END_OF_DOCUMENT = "</s>"
DEFAULT_NUM_SPECIAL_TOKENS = 1000
DEFAULT_VOCAB_SIZE = 2**17


class TikTokenizer:
    """Text that spells a special token stays text, with either.

    - A file is Megatron's JSON of byte-pair ranks: a list of `rank`, `token_bytes` (in base64) and `token_str`. The
      first 1000 ids (--tiktoken-num-special-tokens) are special tokens, of which `</s>`, id 2, ends a document; rank r
      is id 1000 + r; ranks for which --vocab-size leaves no room are cut off.
    - A name, such as cl100k_base, is an encoding of tiktoken's; `<|endoftext|>` ends a document.

    Args:
        model: file or name.
        pattern: splitting pattern of a file, v1 or v2 (default).
        num_special_tokens: of a file, default 1000.
        vocab_size: of a file, special tokens included, default 2^17.
    """

    def __init__(
        self, model: str, pattern: Optional[str], num_special_tokens: Optional[int], vocab_size: Optional[int]
    ):
        tiktoken = load_library("tiktoken", "TikTokenizer")
        if Path(model).is_file():
            self._from_file(tiktoken, Path(model), pattern, num_special_tokens, vocab_size)
        else:
            self._from_name(tiktoken, model, pattern, num_special_tokens)

    @property
    def library_object(self) -> Any:
        """tiktoken's encoding."""
        return self._encoding

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(token) for token in ids])

    def _from_file(
        self,
        tiktoken: ModuleType,
        path: Path,
        pattern: Optional[str],
        num_special_tokens: Optional[int],
        vocab_size: Optional[int],
    ) -> None:
        pattern = pattern or "v2"
        if pattern not in TIKTOKEN_PATTERNS:
            raise ConfigError(f"--tiktoken-pattern {pattern} is unknown; known are {', '.join(TIKTOKEN_PATTERNS)}.")
        num_special = DEFAULT_NUM_SPECIAL_TOKENS if num_special_tokens is None else num_special_tokens
        if num_special < len(SPECIAL_TOKENS):
            raise ConfigError(
                f"--tiktoken-num-special-tokens {num_special} is less than the {len(SPECIAL_TOKENS)} that there are: "
                f"{' '.join(SPECIAL_TOKENS)}."
            )
        self.vocab_size: int = vocab_size or DEFAULT_VOCAB_SIZE
        num_ranks, ranks = self.vocab_size - num_special, _read_ranks(path)
        if not 256 <= num_ranks <= len(ranks):
            raise DataError(
                f"--tokenizer-model {path} holds {len(ranks)} ranks, but --vocab-size {self.vocab_size} less "
                f"{num_special} special tokens needs {num_ranks} (at least 256)."
            )
        special = [*SPECIAL_TOKENS, *(f"<SPECIAL_{number}>" for number in range(len(SPECIAL_TOKENS), num_special))]
        self._encoding = tiktoken.Encoding(
            name=path.stem,
            pat_str=TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks={token: num_special + rank for rank, token in enumerate(ranks[:num_ranks])},
            special_tokens={token: number for number, token in enumerate(special)},
        )
        self.eod: int = special.index(END_OF_DOCUMENT)
        self.unique_identifiers = identifiers_of(
            self, hashes_of(path), pattern=pattern, num_special_tokens=num_special
        )

    def _from_name(
        self, tiktoken: ModuleType, name: str, pattern: Optional[str], num_special_tokens: Optional[int]
    ) -> None:
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise DataError(
                f"--tokenizer-model {name} is neither a file nor an encoding of tiktoken's: {', '.join(sorted(known))}."
            )
        if pattern is not None or num_special_tokens is not None:
            flag = "--tiktoken-pattern" if pattern is not None else "--tiktoken-num-special-tokens"
            raise ConfigError(f"{flag} is for a file of ranks; the encoding {name} has its own.")
        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:  # requests' errors, tiktoken's own, and those of a plugin
            raise DataError(
                f"tiktoken cannot load the encoding {name}: {error}. It fetches the encoding's file once; without a "
                "network, set TIKTOKEN_CACHE_DIR to a folder in which that was done elsewhere."
            ) from error
        self.vocab_size = self._encoding.n_vocab
        if "<|endoftext|>" not in self._encoding.special_tokens_set:
            raise DataError(f"The encoding {name} has no <|endoftext|>, which marks the end of a document.")
        self.eod = self._encoding.eot_token
        self.unique_identifiers = identifiers_of(self, [_hash_of(self._encoding)], encoding=name)


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens of Megatron's file in the order of their ranks.

    Raises:
        DataError: the file is not one.
    """
    entries = read_json(path)
    try:
        ranks = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        if [entry["rank"] for entry in entries] != list(range(len(ranks))) or len(set(ranks)) != len(ranks):
            raise ValueError("ranks must count from 0, each with another token")
        if ranks[:256] != [bytes([number]) for number in range(256)]:
            raise ValueError("the first 256 ranks must be the bytes")
    except (TypeError, KeyError, ValueError, binascii.Error) as error:
        raise DataError(
            f"--tokenizer-model {path} is not Megatron's list of byte-pair ranks (rank, token_bytes, token_str): "
            f"{error!r}"
        ) from error
    return ranks


def _hash_of(encoding: Any) -> str:
    """SHA-256 of all that decides the ids of an encoding; it has no file of its own to hash."""
    digest = hashlib.sha256(json.dumps([encoding._pat_str, sorted(encoding._special_tokens.items())]).encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d %s\n" % (rank, base64.b64encode(token)))
    return digest.hexdigest()
