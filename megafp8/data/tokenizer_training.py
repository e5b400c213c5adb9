"""Training of a lossless SentencePiece tokenizer.

Lossless means that decoding gives back the text to the byte, which code needs: no normalization, no space put in front,
no whitespace merged, newline and tab as pieces of their own, bytes for whatever the vocabulary lacks. One character is
beyond SentencePiece: U+2581, with which it writes the space, comes back as a space.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece

from megafp8.data.atomic import atomic_write, atomic_write_json, file_sha256
from megafp8.data.readers import expand_inputs, parse_texts, read_batches
from megafp8.errors import DataError

SPACE_MARK = "\u2581"
NUM_FIXED_PIECES = 3 + 2 + 256  # unknown, begin, end; newline, tab; bytes
MAX_LINE_BYTES = 100_000
NUM_VERIFIED_DOCUMENTS = 200
MODEL_TYPES = ("bpe", "unigram")


@dataclass(frozen=True)
class TrainingSummary:
    """What a training made. `trained` is False when the same model was there already."""

    model_path: Path
    num_verified_documents: int
    num_lossy_documents: int
    trained: bool


def train_sentencepiece(
    inputs: Sequence[str],
    model_prefix: str,
    *,
    vocab_size: int,
    model_type: str = "bpe",
    json_key: str = "text",
    num_threads: int = 1,
    overwrite: bool = False,
) -> TrainingSummary:
    """Train `PREFIX.model` (and `PREFIX.vocab`, for people), check that it is lossless, write it whole or not at all.

    `PREFIX.json` records settings and inputs; when it says that the same training was done, nothing is done again.

    Args:
        inputs: JSONL or text files, or glob patterns.
        model_prefix: path without suffix.
        vocab_size: pieces in all, 261 fixed ones among them.
        model_type: bpe or unigram.
        json_key: where the text is, in JSONL.
        num_threads: threads of the trainer.
        overwrite: train although another model is there.

    Raises:
        DataError: inputs that cannot be read, too little text for the vocabulary, another model is there, or a text
            that does not come back.
        OSError: the model cannot be written.
    """
    files = expand_inputs(inputs)
    settings = {
        "vocab_size": vocab_size,
        "model_type": model_type,
        "json_key": json_key,
        "inputs": [{"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in files],
    }
    model_path, record_path = Path(f"{model_prefix}.model"), Path(f"{model_prefix}.json")
    if model_path.exists() and not overwrite:
        return _finished_before(model_path, record_path, settings)
    if vocab_size <= NUM_FIXED_PIECES:
        raise DataError(f"--vocab-size {vocab_size} leaves no room beside the {NUM_FIXED_PIECES} fixed pieces.")

    model = _train(_texts(files, json_key), vocab_size, model_type, num_threads)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    num_verified, num_lossy = check_lossless(processor, _texts(files, json_key), limit=NUM_VERIFIED_DOCUMENTS)

    record_path.unlink(missing_ok=True)  # it must not vouch for the new model before that is complete
    with atomic_write(model_path) as stream:
        stream.write(model)
    with atomic_write(Path(f"{model_prefix}.vocab")) as stream:
        for piece in range(processor.get_piece_size()):
            text = processor.id_to_piece(piece).replace("\n", "\\n").replace("\t", "\\t")
            stream.write(f"{text}\t{processor.get_score(piece):g}\n".encode())
    record = {
        "settings": settings,
        "model_sha256": file_sha256(model_path),
        "num_verified_documents": num_verified,
        "num_lossy_documents": num_lossy,
    }
    atomic_write_json(record_path, record)
    return TrainingSummary(model_path, num_verified, num_lossy, trained=True)


def check_lossless(
    processor: sentencepiece.SentencePieceProcessor, texts: Iterator[str], *, limit: int
) -> tuple[int, int]:
    """Encode and decode up to `limit` texts and compare.

    Returns:
        Number of texts that came back exactly, and of those that hold U+2581 and so cannot.

    Raises:
        DataError: another text did not come back; shows where.
    """
    num_exact = num_lossy = 0
    for text in islice(texts, limit):
        decoded = processor.decode(processor.encode(text))
        if decoded == text:
            num_exact += 1
        elif SPACE_MARK in text:
            num_lossy += 1
        else:
            place = len(os.path.commonprefix([text, decoded]))
            raise DataError(
                f"The tokenizer is not lossless: {text[place : place + 40]!r} came back as "
                f"{decoded[place : place + 40]!r}. No model was written."
            )
    return num_exact, num_lossy


def _train(texts: Iterator[str], vocab_size: int, model_type: str, num_threads: int) -> bytes:
    """Run the trainer on the lines of `texts`; return the bytes of the model."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split("\n") if line),
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
        raise DataError(
            f"SentencePiece could not train {vocab_size} pieces ({model_type}) on this text: {error} "
            "Give it more text or another --vocab-size."
        ) from error
    return model.getvalue()


def _texts(files: Sequence[Path], json_key: str) -> Iterator[str]:
    for path in files:
        for batch in read_batches(path):
            for (text,) in parse_texts(batch, (json_key,)):
                yield text


def _finished_before(model_path: Path, record_path: Path, settings: dict[str, Any]) -> TrainingSummary:
    """Accept the model that is there if its record says that it came from the same settings and inputs."""
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    if record.get("settings") != settings or record.get("model_sha256") != file_sha256(model_path):
        raise DataError(
            f"{model_path} is there already, but not from these settings and inputs (its record is {record_path}). "
            "Choose another --model-prefix, or --overwrite."
        )
    return TrainingSummary(model_path, record["num_verified_documents"], record["num_lossy_documents"], trained=False)
