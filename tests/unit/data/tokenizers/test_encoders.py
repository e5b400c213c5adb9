"""gigatoken gives the ids of the tokenizers' own libraries. Differences are detected."""

import base64
import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer
from megafp8.data.tokenizers.build import AUTO, GIGATOKEN, LIBRARY, Tokenizer, build_tokenizer
from megafp8.data.tokenizers.encoders import (
    SHAPES,
    EncoderMismatchError,
    GigatokenEncoder,
    LibraryEncoder,
    UnsupportedTokenizerError,
    choose_encoder,
    encode_documents,
    probe_texts,
    rejected_texts,
)
from megafp8.errors import CapabilityError, DataError

NULL = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000)


def lists_of(encoded) -> list[list[int]]:
    ids, lengths = encoded
    return [piece.tolist() for piece in np.split(ids, np.cumsum(lengths)[:-1])]


# ---- every encoder
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eod", [None, 1000])
def test_documents_and_their_ends(eod):
    tokens, lengths = encode_documents(
        LibraryEncoder(NULL), ["1 2", "", "3", " "], vocab_size=1001, dtype=np.dtype(np.uint16), eod=eod
    )
    assert (tokens.dtype, lengths.dtype) == (np.uint16, np.int32)
    end = [] if eod is None else [eod]
    assert lists_of((tokens, lengths)) == [[1, 2, *end], [], [3, *end], []]


def test_no_documents():
    tokens, lengths = encode_documents(LibraryEncoder(NULL), [], vocab_size=9, dtype=np.dtype(np.uint16), eod=1)
    assert len(tokens) == len(lengths) == 0


def test_texts_that_are_refused():
    texts = ["1", "2000", "-1", "x", "3", str(2**70)]
    options = {"vocab_size": 1001, "dtype": np.dtype(np.uint16), "eod": None}
    with pytest.raises(DataError):
        encode_documents(LibraryEncoder(NULL), texts, **options)
    reasons = rejected_texts(LibraryEncoder(NULL), texts, **options)
    assert sorted(reasons) == [1, 2, 3, 5]
    assert "token id 2000, but the vocabulary size is 1001" in reasons[1]
    assert "token id -1" in reasons[2]


# ---- gigatoken ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(documents) -> list[str]:
    return [*documents, "It's 12,345.67 o'clock in Z\u00fcrich \u2014 \u4eca\u5929. (?P<s>x) </s> <|endoftext|>"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory, texts) -> DataConfig:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("hf")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


@pytest.fixture(scope="module")
def gpt2(byte_level) -> DataConfig:
    folder = Path(byte_level.tokenizer_model)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    return DataConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


@pytest.fixture(scope="module")
def tiktoken_ranks(tmp_path_factory) -> DataConfig:
    pytest.importorskip("tiktoken")
    merged = [b"  ", b"    ", b"de", b"def", b" x", b"in", b"ing", b"\n\n", b"th", b"the", b" the", b"\xc3\xbc"]
    ranks = [*(bytes([byte]) for byte in range(256)), *merged]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(ranks)
    ]
    path = tmp_path_factory.mktemp("tiktoken") / "ranks.json"
    path.write_text(json.dumps(entries))
    return DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(path))


@pytest.fixture(scope="module", params=["byte-level", "GPT-2", "tiktoken", "SentencePiece"])
def bpe(request, byte_level, gpt2, tiktoken_ranks, tokenizer_config) -> Tokenizer:
    pytest.importorskip("gigatoken")
    configs = {
        "byte-level": byte_level, "GPT-2": gpt2, "tiktoken": tiktoken_ranks, "SentencePiece": tokenizer_config,
    }  # fmt: skip
    return build_tokenizer(configs[request.param], 1000 + 268 if request.param == "tiktoken" else None)


def test_gigatoken_gives_the_librarys_ids(bpe, texts):
    encoder = GigatokenEncoder(bpe)
    rng = random.Random(0)
    everything = [chr(number) for number in range(0x20000) if not 0xD800 <= number < 0xE000]
    wild = ["".join(rng.choices(everything, k=50)) for _ in range(300)]
    mixed = ["".join(rng.choices([*"ab1 \t\n'<s>.", "\u00fc", "\u4eca", " the"], k=80)) for _ in range(300)]
    all_texts = [*texts, *SHAPES, *probe_texts(), *wild, *mixed]
    assert lists_of(encoder.encode(all_texts)) == [bpe.tokenize(text) for text in all_texts]
    # A second call, with words that are in its cache.
    assert lists_of(encoder.encode(all_texts)) == bpe.tokenize_batch(all_texts)


def test_merges_do_not_create_control_pieces(tmp_path, tokenizer_config):
    """A model in which < and s> are pieces, and <s> starts a sentence. Text must not produce it."""
    pytest.importorskip("gigatoken")
    protos = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = protos.ModelProto()
    model.ParseFromString(Path(tokenizer_config.tokenizer_model).read_bytes())
    for piece, score in (("<", -900.0), (">", -901.0), ("s>", -902.0)):
        if piece not in {known.piece for known in model.pieces}:
            model.pieces.add(piece=piece, score=score)
    path = tmp_path / "edited.model"
    path.write_bytes(model.SerializeToString())
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path)))
    text = "a<s>b </s> <<s>>"
    assert lists_of(GigatokenEncoder(tokenizer).encode([text, text])) == tokenizer.tokenize_batch([text, text])
    assert not {1, 2} & set(tokenizer.tokenize(text))


def test_gigatoken_without_awkward_gives_the_same(bpe, texts, monkeypatch):
    """It returns a list of arrays then."""
    encoder = GigatokenEncoder(bpe)
    backend = encoder._backend

    class WithoutAwkward:
        def encode_batch(self, batch, parallel):
            return [np.asarray(row) for row in backend.encode_batch(batch, parallel=parallel)]

    monkeypatch.setattr(encoder, "_backend", WithoutAwkward())
    assert lists_of(encoder.encode([*texts, ""])) == [*bpe.tokenize_batch(texts), []]


def test_gigatoken_accepts_no_texts_and_empty_texts(bpe):
    encoder = GigatokenEncoder(bpe)
    assert [len(array) for array in encoder.encode([])] == [0, 0]
    assert lists_of(encoder.encode(["", "a", ""])) == [[], bpe.tokenize("a"), []]


def test_gigatoken_restarts_when_its_cache_is_full(bpe, texts, monkeypatch):
    encoder = GigatokenEncoder(bpe)
    expected = lists_of(encoder.encode(texts))
    first = encoder._backend
    monkeypatch.setattr(encoder, "_memory_limit", 0)
    assert lists_of(encoder.encode(texts)) == expected
    assert encoder._backend is not first
    second = encoder._backend
    encoder.encode(texts)
    assert encoder._backend is second


def test_gigatoken_is_chosen_where_it_agrees(bpe, texts):
    choice = choose_encoder(bpe, AUTO, texts)
    assert isinstance(choice.encoder, GigatokenEncoder)
    assert f"on {len(texts)} texts of this input" in choice.reason
    assert isinstance(choose_encoder(bpe, LIBRARY, texts).encoder, LibraryEncoder)


class _Other:
    """A tokenizer that differs from the one whose files gigatoken read, for texts with a certain word."""

    def __init__(self, tokenizer: Tokenizer, word: str):
        self.__class__ = type(type(tokenizer).__name__, (type(tokenizer),), {"tokenize": self._differ})
        self.__dict__.update(tokenizer.__dict__)
        self._word, self._honest = word, tokenizer

    def _differ(self, text: str) -> list[int]:
        ids = self._honest.tokenize(text)
        return [*ids, 0] if self._word in text else ids


def test_a_difference_is_detected_before_and_during_the_job(bpe, texts):
    other = _Other(bpe, "Thing7")
    choice = choose_encoder(other, AUTO, texts)
    assert isinstance(choice.encoder, LibraryEncoder)
    assert "gigatoken is not used: near " in choice.reason
    with pytest.raises(CapabilityError, match="--encoder gigatoken cannot be used: near"):
        choose_encoder(other, GIGATOKEN, texts)
    with pytest.raises(EncoderMismatchError, match="its ids are"):
        GigatokenEncoder(other).encode(["Thing7"])
    # Letters beyond ASCII first: they are checked everywhere in the batch.
    with pytest.raises(EncoderMismatchError):
        GigatokenEncoder(_Other(bpe, "\u00e9")).encode([*["plain"] * 50, "caf\u00e9", *["plain"] * 9])


def test_a_library_that_rejects_a_probe_is_used_alone(bpe, texts, monkeypatch):
    def reject(self, text):
        if text in probes:
            raise DataError("the tokenizer fails on this text")
        return honest(self, text)

    probes, honest = probe_texts(), type(bpe).tokenize
    monkeypatch.setattr(type(bpe), "tokenize", reject)
    choice = choose_encoder(bpe, AUTO, texts)
    assert isinstance(choice.encoder, LibraryEncoder)
    assert choice.reason == "gigatoken is not used: the tokenizer fails on this text"


def test_a_failure_of_gigatoken_is_a_difference(bpe, texts, monkeypatch):
    class PanicException(BaseException):
        pass

    class Backend:
        def encode_batch(self, texts, parallel):
            raise PanicException("index out of bounds")

    encoder = GigatokenEncoder(bpe)
    monkeypatch.setattr(encoder, "_backend", Backend())
    with pytest.raises(EncoderMismatchError, match="it failed: index out of bounds"):
        encoder.encode(texts)


def test_unsupported_tokenizers_use_the_library(tmp_path, corpus_file, tiktoken_ranks):
    pytest.importorskip("gigatoken")
    train_tokenizer([str(corpus_file)], str(tmp_path / "unigram"), vocab_size=301, model_type="unigram")
    unigram = DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(tmp_path / "unigram.model"))
    v1 = DataConfig(
        tokenizer_type="TikTokenizer", tokenizer_model=tiktoken_ranks.tokenizer_model, tiktoken_pattern="v1"
    )
    for config, vocab_size, reason in (
        (unigram, None, "unigram"),
        (v1, 1268, "does not support the splitting pattern"),
        (DataConfig(tokenizer_type="NullTokenizer"), 1000, "does not support NullTokenizer"),
    ):
        tokenizer = build_tokenizer(config, vocab_size)
        with pytest.raises(UnsupportedTokenizerError, match=reason):
            GigatokenEncoder(tokenizer)
        choice = choose_encoder(tokenizer, AUTO, [])
        assert isinstance(choice.encoder, LibraryEncoder)
        assert reason in choice.reason


def test_without_gigatoken(bpe, texts, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    choice = choose_encoder(bpe, AUTO, texts)
    assert isinstance(choice.encoder, LibraryEncoder)
    assert "pip install -e '.[data]'" in choice.reason
    with pytest.raises(CapabilityError, match="cannot be imported"):
        choose_encoder(bpe, GIGATOKEN, texts)


def test_modules_import_without_gigatoken_and_orjson():
    code = (
        "import sys; sys.modules['gigatoken'] = sys.modules['orjson'] = sys.modules['pyarrow'] = None\n"
        "import megafp8.data.preprocessing.preprocess\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_the_probe_text_has_all_kinds_of_characters():
    characters = set("".join(probe_texts()))
    kinds = {unicodedata.category(character) for character in characters}
    everything = {unicodedata.category(chr(number)) for number in range(0x20000)} - {"Cs"}
    assert kinds >= everything
