"""Tokenizer implementations, each through the library made for it. `build.build_tokenizer` selects one."""

from __future__ import annotations

import base64
import binascii
import importlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

from megafp8.data.tokenizers.library_calls import NoEndOfDocument, library_call, library_failures, read_tokenizer_file
from megafp8.errors import CapabilityError, ConfigError, DataError
from megafp8.utils import strict_json
from megafp8.utils.files import UnreadableFile, file_sha256
from megafp8.utils.suggestions import hub_hint

# Megatron's splitting patterns (--tiktoken-pattern).
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
# Megatron's layout of the vocabulary: special tokens first, then the ranks of the file.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
END_OF_DOCUMENT = "</s>"
DEFAULT_NUM_SPECIAL_TOKENS = 1000
DEFAULT_VOCAB_SIZE = 2**17


class _BaseTokenizer:
    """Common part of the tokenizers; see `build.Tokenizer`.

    Attributes:
        library_tokenizer: the library's own tokenizer, if there is a library.
        origin: where it comes from, for messages: a flag with its file.
        unknown_id: id of text that the vocabulary lacks, if there is one.
        warnings: what was turned off, for the user.
    """

    vocab_size: int
    eod: int
    origin: str
    unknown_id: Optional[int] = None
    warnings: tuple[str, ...] = ()
    unique_identifiers: "OrderedDict[str, Any]"
    library_tokenizer: Any = None

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    @library_call
    def detokenize(self, ids: Sequence[int]) -> str:
        return self.library_tokenizer.decode([int(token) for token in ids])

    def _set_identifiers(self, hashes: Sequence[str] = (), **options: Any) -> None:
        """Collect everything that decides the ids: `hashes` of the files' contents, and options of this class."""
        self.unique_identifiers = OrderedDict(
            {
                "class": type(self).__name__,
                "sha256": list(hashes),
                "vocab_size": self.vocab_size,
                "eod": self.eod,
                **options,
            }
        )


class SentencePieceTokenizer(_BaseTokenizer):
    """A `.model` file through sentencepiece; the end of a document is the model's end-of-sentence piece."""

    def __init__(self, model_file: str):
        sentencepiece = load_library("sentencepiece", "SentencePieceTokenizer")
        self.origin = f"--tokenizer-model {model_file}"
        if (Path(model_file) / "tokenizer.json").is_file() or Path(model_file).suffix == ".json":
            raise DataError(
                f"{self.origin} looks like a Hugging Face tokenizer, not a SentencePiece model: use --tokenizer-type "
                "HuggingFaceTokenizer"
            )
        model = read_tokenizer_file(Path(model_file), "--tokenizer-model")
        with library_failures(f"{self.origin} is not a SentencePiece model ({len(model)} bytes)"):
            if not model:  # the library takes no content for no argument
                raise ValueError("the file is empty")
            self.library_tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size = self.library_tokenizer.get_piece_size()
            self.eod, self.unknown_id = self.library_tokenizer.eos_id(), self.library_tokenizer.unk_id()
        if self.eod < 0:
            raise NoEndOfDocument(
                f"{self.origin} has no end-of-sentence piece, which is needed as the end-of-document token. "
                "Train the tokenizer with an eos piece, as megafp8 train-tokenizer does."
            )
        self._set_identifiers([sha256(model).hexdigest()])

    @library_call
    def tokenize(self, text: str) -> list[int]:
        return self.library_tokenizer.encode(text)

    @library_call
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.library_tokenizer.encode(list(texts), num_threads=1)


class _TokenizersTokenizer(_BaseTokenizer):
    """Common part of the tokenizers through Hugging Face's library `tokenizers`."""

    @library_call
    def tokenize(self, text: str) -> list[int]:
        return self.library_tokenizer.encode(text, add_special_tokens=False).ids

    @library_call
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids for encoding in self.library_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    @library_call
    def detokenize(self, ids: Sequence[int]) -> str:
        return self.library_tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def _read_vocabulary(self) -> None:
        """Set `vocab_size`, the largest id + 1 (ids may have gaps), and `unknown_id`."""
        largest = max(self.library_tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest < 0:
            raise DataError(f"{self.origin} has no tokens.")
        if largest >= 1 << 31:
            raise DataError(f"{self.origin} has the token id {largest}; shards hold ids up to 2^31 - 1.")
        self.vocab_size = largest + 1
        unknown = getattr(self.library_tokenizer.model, "unk_token", None)
        self.unknown_id = None if unknown is None else self.library_tokenizer.token_to_id(unknown)


class HuggingFaceTokenizer(_TokenizersTokenizer):
    """A `tokenizer.json`, or a folder with one, through `tokenizers`.

    The end of a document is `eos_token` of `tokenizer_config.json` or `special_tokens_map.json` in the same folder.
    Special tokens of the library's post-processor, such as a leading <s>, are not added. As with the library, text
    that spells a special token is encoded as that token.
    """

    def __init__(self, model: str):
        tokenizers = load_library("tokenizers", "HuggingFaceTokenizer")
        path = Path(model)
        if not path.exists():
            hint = hub_hint(model, "tokenizer.json", "tokenizer_config.json")
            raise DataError(f"--tokenizer-model {model} is neither a tokenizer.json nor a folder with one{hint}")
        only_sentencepiece = (path / "tokenizer.model").is_file() and not (path / "tokenizer.json").exists()
        path = path / ("tokenizer.model" if only_sentencepiece else "tokenizer.json") if path.is_dir() else path
        self.origin = f"--tokenizer-model {path}"
        content = read_tokenizer_file(path, "--tokenizer-model")
        if path.suffix == ".model" and not content.lstrip().startswith(b"{"):
            raise DataError(
                f"{self.origin} looks like a SentencePiece model, not a tokenizer.json: use --tokenizer-type "
                f"SentencePieceTokenizer --tokenizer-model {path}"
            )
        with library_failures(f"{self.origin} is not a tokenizer.json"):
            self.library_tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # The file may hold the settings of a fine-tuning, which would truncate, pad or randomize documents.
        self.library_tokenizer.no_truncation()
        self.library_tokenizer.no_padding()
        library_model = self.library_tokenizer.model
        if getattr(library_model, "dropout", None):
            self.warnings = (
                f"{self.origin}: dropout {library_model.dropout:g} is turned off, because it makes ids random",
            )
            library_model.dropout = None
        self._read_vocabulary()
        self.eod = self._eos_id(path.parent)
        self._set_identifiers([sha256(content).hexdigest()])

    def _eos_id(self, folder: Path) -> int:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            content = _read_json(folder / name) if (folder / name).is_file() else {}
            if not isinstance(content, dict):
                raise DataError(f"{folder / name} is not an object of JSON, but a {type(content).__name__}.")
            token = content.get("eos_token")
            text = token.get("content") if isinstance(token, dict) else token
            if text is None:
                continue
            if not isinstance(text, str):
                raise DataError(f"{folder / name}: eos_token {token!r} is not text.")
            token_id = self.library_tokenizer.token_to_id(text)
            if token_id is None:
                raise DataError(f"{folder / name} names the eos_token {text!r}, which the tokenizer does not have.")
            return token_id
        raise NoEndOfDocument(
            f"The tokenizer in {folder} has no eos_token, which is needed as the end-of-document token: copy the "
            "model's tokenizer_config.json to the folder of tokenizer.json."
        )


class GPT2BPETokenizer(_TokenizersTokenizer):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`, through `tokenizers`.

    Text that spells <|endoftext|> stays text.
    """

    END_OF_TEXT = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str):
        tokenizers = load_library("tokenizers", "GPT2BPETokenizer")
        self.origin = f"--vocab-file {vocab_file} and --merge-file {merge_file}"
        vocab = read_tokenizer_file(Path(vocab_file), "--vocab-file")
        merges = read_tokenizer_file(Path(merge_file), "--merge-file")
        with library_failures(f"{self.origin} are not a GPT-2 vocabulary"):
            model = tokenizers.models.BPE.from_file(vocab_file, merge_file)
        tokenizer = self.library_tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._read_vocabulary()
        end_of_text = tokenizer.token_to_id(self.END_OF_TEXT)
        if end_of_text is None:
            raise NoEndOfDocument(
                f"--vocab-file {vocab_file} has no {self.END_OF_TEXT}, which is needed as the end-of-document token."
            )
        self.eod = end_of_text
        self._set_identifiers([sha256(vocab).hexdigest(), sha256(merges).hexdigest()])


class ByteLevelTokenizer(_BaseTokenizer):
    """The UTF-8 bytes of the text, as megatron-core's class of that name: 512 ids, of which 0 ends a document.

    A text with U+0000 is an error, since it could not be distinguished from two documents.
    """

    def __init__(self) -> None:
        self.vocab_size, self.eod = 512, 0
        self._set_identifiers()

    def tokenize(self, text: str) -> list[int]:
        if "\0" in text:
            raise DataError(
                f"ByteLevelTokenizer does not support U+0000 in a text (character {text.index(chr(0))}): byte 0 is the "
                "end-of-document token"
            )
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", errors="replace")


class NullTokenizer(_BaseTokenizer):
    """Text that is token ids separated by spaces. With --vocab-size N: ids 0 to N-1, and N ends a document."""

    def __init__(self, vocab_size: int):
        self.vocab_size, self.eod = vocab_size + 1, vocab_size
        self._set_identifiers()

    def tokenize(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer expects token ids separated by spaces: {error}") from error

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)


class TikTokenizer(_BaseTokenizer):
    """A tokenizer through tiktoken, from a file or by name. Text that spells a special token stays text.

    - A file is Megatron's JSON of byte-pair ranks: a list of `rank`, `token_bytes` (in base64) and `token_str`. The
      first 1000 ids (--tiktoken-num-special-tokens) are special tokens, of which `</s>`, id 2, ends a document. Rank r
      is id 1000 + r. Ranks beyond --vocab-size are cut off.
    - A name, such as cl100k_base, is an encoding of tiktoken's; `<|endoftext|>` ends a document.

    Args:
        model: file or name.
        pattern: splitting pattern of a file, v1 or v2 (default).
        num_special_tokens: special tokens of a file, default 1000.
        vocab_size: vocabulary of a file, special tokens included, default 2^17.
    """

    def __init__(
        self, model: str, pattern: Optional[str], num_special_tokens: Optional[int], vocab_size: Optional[int]
    ):
        tiktoken = load_library("tiktoken", "TikTokenizer")
        self.origin = f"--tokenizer-model {model}"
        if Path(model).is_file():
            self._from_file(tiktoken, Path(model), pattern or "v2", num_special_tokens, vocab_size)
        else:
            self._from_name(tiktoken, model, pattern, num_special_tokens)

    @library_call
    def tokenize(self, text: str) -> list[int]:
        return self.library_tokenizer.encode_ordinary(text)

    def _from_file(
        self, tiktoken: ModuleType, path: Path, pattern: str, num_special: Optional[int], vocab_size: Optional[int]
    ) -> None:
        if pattern not in TIKTOKEN_PATTERNS:
            raise ConfigError(f"--tiktoken-pattern {pattern} is unknown; choose from {', '.join(TIKTOKEN_PATTERNS)}.")
        num_special = DEFAULT_NUM_SPECIAL_TOKENS if num_special is None else num_special
        if num_special < len(SPECIAL_TOKENS):
            raise ConfigError(
                f"--tiktoken-num-special-tokens {num_special} is less than the number of special tokens, "
                f"{len(SPECIAL_TOKENS)}: {' '.join(SPECIAL_TOKENS)}."
            )
        self.vocab_size = vocab_size or DEFAULT_VOCAB_SIZE
        num_ranks, ranks = self.vocab_size - num_special, _read_ranks(path)
        if not 256 <= num_ranks <= len(ranks):
            raise DataError(
                f"--tokenizer-model {path} has {len(ranks)} ranks, but --vocab-size {self.vocab_size} minus "
                f"{num_special} special tokens needs {num_ranks} (at least 256)."
            )
        special = [*SPECIAL_TOKENS, *(f"<SPECIAL_{number}>" for number in range(len(SPECIAL_TOKENS), num_special))]
        self.library_tokenizer = tiktoken.Encoding(
            name=path.stem,
            pat_str=TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks={token: num_special + rank for rank, token in enumerate(ranks[:num_ranks])},
            special_tokens={token: number for number, token in enumerate(special)},
        )
        self.eod = special.index(END_OF_DOCUMENT)
        self._set_identifiers([file_sha256(path)], pattern=pattern, num_special_tokens=num_special)

    def _from_name(
        self, tiktoken: ModuleType, name: str, pattern: Optional[str], num_special_tokens: Optional[int]
    ) -> None:
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise DataError(
                f"--tokenizer-model {name} is neither a file nor a tiktoken encoding: {', '.join(sorted(known))}."
            )
        if pattern is not None or num_special_tokens is not None:
            flag = "--tiktoken-pattern" if pattern is not None else "--tiktoken-num-special-tokens"
            raise ConfigError(f"{flag} is only for a file of ranks; the encoding {name} defines its own.")
        try:
            encoding = self.library_tokenizer = tiktoken.get_encoding(name)
        except Exception as error:  # errors of requests, of tiktoken itself, and of plugins
            raise DataError(
                f"tiktoken cannot load the encoding {name}: {error}. tiktoken downloads the encoding once; without a "
                "network, set TIKTOKEN_CACHE_DIR to a cache folder filled on another machine."
            ) from error
        self.vocab_size = encoding.n_vocab
        if "<|endoftext|>" not in encoding.special_tokens_set:
            raise DataError(f"The encoding {name} has no <|endoftext|>, which is needed as the end-of-document token.")
        self.eod = encoding.eot_token
        self._set_identifiers([_hash_encoding(encoding)], encoding=name)


def load_library(name: str, kind: str) -> ModuleType:
    """Import the library of a kind of tokenizer.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CapabilityError(
            f"--tokenizer-type {kind} needs the package {name}, which cannot be imported ({error}). Install it: pip "
            f"install {name}"
        ) from error


def _read_json(path: Path) -> Any:
    try:
        return strict_json.read_json(path)
    except UnreadableFile as error:
        raise DataError(f"{path} cannot be read: {error.reason}") from error


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens of Megatron's file in the order of their ranks.

    Raises:
        DataError: the file is not one.
    """
    entries = _read_json(path)
    try:
        ranks = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        if [entry["rank"] for entry in entries] != list(range(len(ranks))) or len(set(ranks)) != len(ranks):
            raise ValueError("ranks must be 0, 1, 2, ..., each with a different token")
        if ranks[:256] != [bytes([number]) for number in range(256)]:
            raise ValueError("the first 256 ranks must be the bytes")
    except (TypeError, KeyError, ValueError, binascii.Error) as error:
        raise DataError(
            f"--tokenizer-model {path} is not a list of byte-pair ranks in Megatron-LM's format (rank, token_bytes, "
            f"token_str): {error!r}"
        ) from error
    return ranks


def _hash_encoding(encoding: Any) -> str:
    """SHA-256 of everything that decides the ids of an encoding, which has no file of its own to hash."""
    digest = sha256(json.dumps([encoding._pat_str, sorted(encoding._special_tokens.items())]).encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d %s\n" % (rank, base64.b64encode(token)))
    return digest.hexdigest()
