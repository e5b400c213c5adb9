"""The kinds of tokenizers but for tiktoken's, each through the library made for it; see `tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megafp8.data.tokenizer_files import existing_file, hashes_of, identifiers_of, load_library, read_json
from megafp8.errors import DataError


class SentencePieceTokenizer:
    """A `.model` file through sentencepiece; the end of a document is the model's end-of-sentence piece."""

    def __init__(self, model_file: str):
        sentencepiece = load_library("sentencepiece", "SentencePieceTokenizer")
        path = existing_file(model_file, "--tokenizer-model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"--tokenizer-model {path} is not a SentencePiece model ({path.stat().st_size} bytes): {error}"
            ) from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise DataError(
                f"--tokenizer-model {path} has no end-of-sentence piece, which marks the end of a document. "
                "Train it with an eos piece (tools/train_tokenizer.py does)."
            )
        self.unique_identifiers = identifiers_of(self, hashes_of(path))

    @property
    def library_object(self) -> Any:
        """sentencepiece's processor."""
        return self._processor

    def tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in ids])


class _OfTokenizers:
    """What tokenizers through `tokenizers` have in common; `_tokenizer` is the library's."""

    _tokenizer: Any

    @property
    def library_object(self) -> Any:
        """The library's tokenizer."""
        return self._tokenizer

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


class HuggingFaceTokenizer(_OfTokenizers):
    """A `tokenizer.json`, or a folder with one, through `tokenizers`.

    The end of a document is `eos_token` of `tokenizer_config.json` or `special_tokens_map.json` in the same folder.
    Special tokens of the library's post-processor (a leading <s>) are not added. Text that spells a special token is
    that token, as with the library.
    """

    def __init__(self, model: str):
        tokenizers = load_library("tokenizers", "HuggingFaceTokenizer")
        path = Path(model)
        if not path.exists():
            raise DataError(
                f"--tokenizer-model {model} is neither a tokenizer.json nor a folder with one. A tokenizer of the "
                f"Hugging Face hub is fetched first: hf download {model} tokenizer.json tokenizer_config.json "
                "--local-dir FOLDER"
            )
        path = existing_file(str(path / "tokenizer.json" if path.is_dir() else path), "--tokenizer-model")
        self._tokenizer = _load_tokenizers_file(tokenizers, path)
        # The file may hold the settings of a fine-tuning, which would cut documents short or lengthen them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = _number_of_ids(self._tokenizer)
        self.eod: int = self._eos_id(path.parent)
        self.unique_identifiers = identifiers_of(self, hashes_of(path))

    def _eos_id(self, folder: Path) -> int:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = read_json(folder / name).get("eos_token") if (folder / name).is_file() else None
            text = token.get("content") if isinstance(token, dict) else token
            if text is None:
                continue
            token_id = self._tokenizer.token_to_id(text)
            if token_id is None:
                raise DataError(f"{folder / name} names the eos_token {text!r}, which the tokenizer does not have.")
            return token_id
        raise DataError(
            f"No eos_token, which marks the end of a document, for the tokenizer in {folder}: put the model's "
            "tokenizer_config.json beside tokenizer.json."
        )


class GPT2BPETokenizer(_OfTokenizers):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`, through `tokenizers`.

    Text that spells <|endoftext|> stays text.
    """

    END_OF_TEXT = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str):
        tokenizers = load_library("tokenizers", "GPT2BPETokenizer")
        vocab_path = existing_file(vocab_file, "--vocab-file")
        merge_path = existing_file(merge_file, "--merge-file")
        try:
            model = tokenizers.models.BPE.from_file(str(vocab_path), str(merge_path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise DataError(
                f"--vocab-file {vocab_path} and --merge-file {merge_path} are not a GPT-2 vocabulary: {error}"
            ) from error
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size: int = _number_of_ids(self._tokenizer)
        end_of_text = self._tokenizer.token_to_id(self.END_OF_TEXT)
        if end_of_text is None:
            raise DataError(f"--vocab-file {vocab_path} has no {self.END_OF_TEXT}, which marks the end of a document.")
        self.eod: int = end_of_text
        self.unique_identifiers = identifiers_of(self, hashes_of(vocab_path, merge_path))


class ByteLevelTokenizer:
    """The bytes of the text in UTF-8, as megatron-core's class of that name: 512 ids, and id 0 ends a document.

    So a text with the character U+0000 cannot be told from two documents, and is refused.
    """

    def __init__(self) -> None:
        self.vocab_size: int = 512
        self.eod: int = 0
        self.unique_identifiers = identifiers_of(self, [])

    def tokenize(self, text: str) -> list[int]:
        if "\0" in text:
            raise DataError(
                f"ByteLevelTokenizer takes no text with U+0000 (character {text.index(chr(0))}): the byte 0 ends a "
                "document"
            )
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", errors="replace")


class NullTokenizer:
    """Text that is token ids already, separated by spaces. --vocab-size N: ids 0 to N-1, and N ends a document."""

    def __init__(self, vocab_size: int):
        self.vocab_size: int = vocab_size + 1
        self.eod: int = vocab_size
        self.unique_identifiers = identifiers_of(self, [])

    def tokenize(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer takes text that is token ids separated by spaces: {error}") from error

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)


def _number_of_ids(tokenizer: Any) -> int:
    """Largest id of a tokenizer of the library `tokenizers`, plus 1: ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _load_tokenizers_file(tokenizers: ModuleType, path: Path) -> Any:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise DataError(f"--tokenizer-model {path} is not a tokenizer.json: {error}") from error
