"""Training of lossless tokenizers: SentencePiece (BPE or unigram, with byte fallback), or byte-level BPE as GPT-2's.

Lossless means that decoding returns the text byte for byte, which code needs. For SentencePiece this means: no
normalization, no leading space, no merged whitespace, and newline and tab as pieces of their own. The exception is
U+2581, which SentencePiece uses for the space: it is decoded as a space.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Optional

import sentencepiece

from megafp8.data.preprocessing.documents import read_texts
from megafp8.data.preprocessing.sources import MAX_DOCUMENT_BYTES, InputSource, find_sources
from megafp8.data.tokenizers.libraries import load_library
from megafp8.errors import DataError
from megafp8.utils.files import LIST_BYTES, UnreadableFile, atomic_write, atomic_write_json, file_sha256
from megafp8.utils.strict_json import read_json

SPACE_MARK = "\u2581"
NUM_FIXED_PIECES = 3 + 2 + 256  # unknown, begin, end; newline, tab; bytes
MAX_LINE_BYTES = 100_000
MAX_LINE_CHARACTERS = MAX_LINE_BYTES // 4  # a character of UTF-8 has at most 4 bytes
NUM_VERIFIED_DOCUMENTS = 200
BYTE_BPE = "byte-bpe"
MODEL_TYPES = ("bpe", "unigram", BYTE_BPE)
END_OF_TEXT = "<|endoftext|>"
NUM_FIXED_BYTE_TOKENS = 256 + 1  # bytes; end of text


@dataclass(frozen=True)
class TrainingSummary:
    """Result of a training. `trained` is False if the same model existed already."""

    model_path: Path
    num_verified_documents: int
    num_lossy_documents: int
    trained: bool


def train_tokenizer(
    inputs: Sequence[str],
    model_prefix: str,
    *,
    vocab_size: int,
    model_type: str = "bpe",
    json_key: str = "text",
    max_text_bytes: Optional[int] = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    num_threads: int = 1,
    overwrite: bool = False,
    on_message: Callable[[str], None] = lambda _: None,
) -> TrainingSummary:
    """Train a tokenizer, check that it is lossless, and write each of its files atomically.

    A SentencePiece model is `PREFIX.model`, with a readable `PREFIX.vocab`. A byte-level BPE is the folder PREFIX, with
    `tokenizer.json` and `tokenizer_config.json` for HuggingFaceTokenizer, and `vocab.json` and `merges.txt` for
    GPT2BPETokenizer, which give the same ids; <|endoftext|> is id 0.

    `PREFIX.json`, or `training.json` in the folder, records settings and inputs. If it shows that the same training was
    done, nothing is done.

    Args:
        inputs: files, folders and glob patterns, see `sources.find_sources`.
        model_prefix: path without suffix, or the folder.
        vocab_size: number of ids, including 261 fixed ones, or 257 of a byte-level BPE.
        model_type: one of MODEL_TYPES.
        json_key: key of the text in JSONL.
        max_text_bytes: train on the documents that begin within so much text. SentencePiece holds them in memory; the
            memory for a byte-level BPE grows with the number of different words.
        max_document_bytes: a longer document is an error.
        num_threads: threads of SentencePiece.
        overwrite: train even if another model exists.
        on_message: called with messages for the user: files that are left out.

    Raises:
        CapabilityError: the library `tokenizers`, which trains a byte-level BPE, is not installed.
        DataError: inputs that cannot be read, too little text for the vocabulary, another model exists, or a text that
            is not decoded exactly.
        OSError: the model cannot be written.
    """
    sources = find_sources(inputs, on_message=on_message, max_document_bytes=max_document_bytes)
    settings = {
        "vocab_size": vocab_size,
        "model_type": model_type,
        "json_key": json_key,
        "max_text_bytes": max_text_bytes,
        "inputs": [{"bytes": source.num_bytes, "sha256": file_sha256(source.path)} for source in sources],
    }
    if model_type == BYTE_BPE:
        start, model_name, record_name = f"{model_prefix}/", "tokenizer.json", "training.json"
        num_fixed, fixed = NUM_FIXED_BYTE_TOKENS, "tokens"
    else:
        start, model_name, record_name = model_prefix, ".model", ".json"
        num_fixed, fixed = NUM_FIXED_PIECES, "pieces"
    model_path, record_path = Path(start + model_name), Path(start + record_name)
    if model_path.exists() and not overwrite:
        return _load_finished(model_path, record_path, settings)
    if vocab_size <= num_fixed:
        raise DataError(f"--vocab-size {vocab_size} must be larger than the number of fixed {fixed}, {num_fixed}.")

    texts = _first_texts(sources, json_key, max_text_bytes)
    if model_type == BYTE_BPE:
        trained = _train_byte_bpe(texts, vocab_size)
    else:
        trained = _train_sentencepiece(texts, vocab_size, model_type, num_threads)
    num_exact, num_lossy = check_lossless(trained.encode, trained.decode, read_texts(sources, json_key))

    record_path.unlink(missing_ok=True)  # it must not describe a model that is not complete
    for name, content in trained.files.items():
        with atomic_write(start + name) as stream:
            stream.write(content)
    record = {
        "settings": settings,
        "model_sha256": file_sha256(model_path),
        "num_verified_documents": num_exact,
        "num_lossy_documents": num_lossy,
    }
    atomic_write_json(record_path, record)
    return TrainingSummary(model_path, num_exact, num_lossy, trained=True)


def check_lossless(
    encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], texts: Iterator[str]
) -> tuple[int, int]:
    """Encode and decode the first 200 texts, and compare.

    Returns:
        Number of texts that were decoded exactly, and of those that were not because they hold U+2581.

    Raises:
        DataError: another text was not decoded exactly; shows where.
    """
    num_exact = num_lossy = 0
    for text in islice(texts, NUM_VERIFIED_DOCUMENTS):
        decoded = decode(encode(text))
        if decoded == text:
            num_exact += 1
        elif SPACE_MARK in text:
            num_lossy += 1
        else:
            start = len(os.path.commonprefix([text, decoded]))
            raise DataError(
                f"The tokenizer is not lossless: {text[start : start + 40]!r} was decoded as "
                f"{decoded[start : start + 40]!r}. No model was written."
            )
    return num_exact, num_lossy


class _Trained(NamedTuple):
    """A tokenizer in memory: its functions, and the content of its files, in the order of writing."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    files: dict[str, bytes]


def _train_sentencepiece(texts: Iterator[str], vocab_size: int, model_type: str, num_threads: int) -> _Trained:
    """Run the trainer on the lines of `texts`."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_split_lines(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            character_coverage=0.9999,  # the rarest characters are left to the bytes
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=num_threads,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        if largest := re.search(r"set it to a value <= (\d+)", str(error)):
            raise DataError(
                f"--vocab-size {vocab_size} is too large for this text: use at most {largest[1]}, or more text."
            ) from error
        raise DataError(
            f"SentencePiece could not train {vocab_size} pieces ({model_type}) on this text: {error} Use more text or "
            "another --vocab-size."
        ) from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    lines = []
    for piece in range(processor.get_piece_size()):
        text = processor.id_to_piece(piece).replace("\n", "\\n").replace("\t", "\\t")
        lines.append(f"{text}\t{processor.get_score(piece):g}\n")
    files = {".model": model.getvalue(), ".vocab": "".join(lines).encode()}
    return _Trained(processor.encode, processor.decode, files)


def _train_byte_bpe(texts: Iterator[str], vocab_size: int) -> _Trained:
    tokenizers = load_library("tokenizers", "HuggingFaceTokenizer")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"Only {tokenizer.get_vocab_size()} tokens could be learned from this text. Use more text, or a smaller "
            f"--vocab-size than {vocab_size}."
        )
    with tempfile.TemporaryDirectory() as temporary:
        try:
            tokenizer.model.save(temporary)
        except Exception as error:
            if type(error) is not Exception:  # the library has no class of its own for a failed write
                raise
            raise OSError(errno.EIO, str(error), temporary) from error
        files = {name: Path(temporary, name).read_bytes() for name in ("vocab.json", "merges.txt")}
    files["tokenizer_config.json"] = (json.dumps({"eos_token": END_OF_TEXT}, indent=2) + "\n").encode()
    files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
    return _Trained(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        files,
    )


def _split_lines(texts: Iterator[str]) -> Iterator[str]:
    """The lines of texts. Long ones are cut, because the trainer silently skips lines above its limit."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_LINE_CHARACTERS):
                yield line[start : start + MAX_LINE_CHARACTERS]


def _first_texts(sources: Sequence[InputSource], json_key: str, max_bytes: Optional[int]) -> Iterator[str]:
    """The texts that begin within the first `max_bytes` bytes of all."""
    num_bytes = 0
    for text in read_texts(sources, json_key):
        if max_bytes is not None and num_bytes >= max_bytes:
            return
        num_bytes += len(text.encode("utf-8"))
        yield text


def _load_finished(model_path: Path, record_path: Path, settings: dict[str, Any]) -> TrainingSummary:
    """Accept an existing model if its record has the same settings and inputs."""
    try:
        record = read_json(record_path, LIST_BYTES)
        counts = record["num_verified_documents"], record["num_lossy_documents"]
        is_same = record["settings"] == settings and record["model_sha256"] == file_sha256(model_path)
    except (UnreadableFile, TypeError, KeyError):
        is_same = False
    if not is_same:
        raise DataError(
            f"{model_path} already exists, with different settings or inputs (see {record_path}). Choose another "
            "--model-prefix, or use --overwrite."
        )
    return TrainingSummary(model_path, *counts, trained=False)
