import gzip
from functools import partial
from pathlib import Path

import pytest
import sentencepiece

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.tokenizer_training import check_lossless, train_tokenizer
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError

HARD_TEXTS = [
    "",
    " ",
    "\n",
    "\tif x:\n\t\treturn  12345   \n\n\n",
    "  leading and trailing  ",
    "\u6f22\u5b57 na\u00efve \U0001f600 e\u0301 \u00e9 \ufb01 \u2126 \u00a0 \u200b \ufeff",
    "\r\n \x00 \x7f \x85 \u2028",
    "<s></s><unk><0x41>",
    "\u2047 \u2585",
]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_every_text_is_decoded_exactly(tokenizer_config, text):
    tokenizer = build_tokenizer(tokenizer_config)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod not in ids


def test_digits_are_single_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("in 1849 and 1849 or 1849 came 1849\n" * 50)
    train_tokenizer([str(tmp_path / "a.txt")], str(tmp_path / "t"), vocab_size=280)
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "t.model"))
    assert len(build_tokenizer(data).tokenize("1849")) == 4


def test_a_document_of_one_long_line_is_learned_from(tmp_path):
    """SentencePiece silently skips lines above its limit."""
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog " * 3000)
    train_tokenizer([str(tmp_path / "a.txt")], str(tmp_path / "t"), vocab_size=300)
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "t.model"))
    assert len(build_tokenizer(data).tokenize("the lazy dog")) < len("the lazy dog")


def test_training_again_does_nothing_and_other_settings_are_refused(tmp_path, corpus_file):
    prefix = str(tmp_path / "t")
    assert train_tokenizer([str(corpus_file)], prefix, vocab_size=320).trained
    before = (tmp_path / "t.model").stat().st_mtime_ns
    again = train_tokenizer([str(corpus_file)], prefix, vocab_size=320)
    assert not again.trained
    assert again.num_verified_documents == 60
    with pytest.raises(DataError, match="--overwrite"):
        train_tokenizer([str(corpus_file)], prefix, vocab_size=330)
    assert (tmp_path / "t.model").stat().st_mtime_ns == before
    assert train_tokenizer([str(corpus_file)], prefix, vocab_size=330, overwrite=True).trained
    data = DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=f"{prefix}.model")
    assert build_tokenizer(data).vocab_size == 330


def test_every_kind_of_input_gives_the_same_model(tmp_path, corpus_file, documents):
    """The file types of preprocessing; the documents are distributed over files of each type."""
    parquet, zstd = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("backports.zstd")
    pyarrow = pytest.importorskip("pyarrow")
    half, lines = len(documents) // 2, corpus_file.read_bytes().splitlines(keepends=True)
    parquet.write_table(pyarrow.table({"id": range(half), "text": documents[:half]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.zst").write_bytes(zstd.compress(b"".join(lines[half:])))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[half:])))
    train_tokenizer([str(corpus_file)], str(tmp_path / "plain"), vocab_size=320)
    for name in ("b.jsonl.zst", "c.jsonl.gz"):
        inputs = [str(tmp_path / "a.parquet"), str(tmp_path / name)]
        train_tokenizer(inputs, str(tmp_path / "other"), vocab_size=320, overwrite=True)
        assert (tmp_path / "other.model").read_bytes() == (tmp_path / "plain.model").read_bytes()


def test_training_is_deterministic(tmp_path, corpus_file):
    for name in "ab":
        train_tokenizer([str(corpus_file)], str(tmp_path / name), vocab_size=320, num_threads=2)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


@pytest.mark.parametrize("vocab_size", [100, 100_000])
def test_impossible_vocabulary_is_an_error_and_leaves_nothing(tmp_path, corpus_file, vocab_size):
    with pytest.raises(DataError, match="--vocab-size"):
        train_tokenizer([str(corpus_file)], str(tmp_path / "t"), vocab_size=vocab_size)
    assert not list(tmp_path.iterdir())


def test_unigram_is_lossless_too(tmp_path, corpus_file):
    train_tokenizer([str(corpus_file)], str(tmp_path / "t"), vocab_size=302, model_type="unigram")
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "t.model"))
    tokenizer = build_tokenizer(data)
    for text in HARD_TEXTS:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_the_check_finds_a_lossy_model(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to learn from"] * 9),
        model_prefix=str(tmp_path / "lossy"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "lossy.model"))
    with pytest.raises(DataError, match="not lossless"):
        check_lossless(processor.encode, processor.decode, iter(["some  words"]))


def test_the_one_known_loss_is_counted(tokenizer_config):
    processor = sentencepiece.SentencePieceProcessor(model_file=tokenizer_config.tokenizer_model)
    assert check_lossless(processor.encode, processor.decode, iter(["a", "b \u2581 c"])) == (1, 1)


@pytest.fixture(scope="module")
def byte_bpe(tmp_path_factory, corpus_file):
    """A folder with a byte-level BPE of 400 ids."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("byte_bpe") / "b"
    assert train_tokenizer([str(corpus_file)], str(folder), vocab_size=400, model_type="byte-bpe").trained
    return folder


def kinds_of(folder):
    """The tokenizer in a folder, as either type reads it."""
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return (
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))),
        build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", **files)),
    )


def test_byte_bpe_is_lossless_as_either_tokenizer_type(byte_bpe, documents):
    hugging_face, gpt2 = kinds_of(byte_bpe)
    assert (hugging_face.vocab_size, hugging_face.eod) == (gpt2.vocab_size, gpt2.eod) == (400, 0)
    for text in (*HARD_TEXTS, *documents):
        ids = gpt2.tokenize(text)
        assert ids == hugging_face.tokenize(text)
        assert gpt2.detokenize(ids) == hugging_face.detokenize(ids) == text
        assert len(ids) <= len(text.encode("utf-8"))
    assert len(gpt2.tokenize(documents[0])) < 0.6 * len(documents[0])


def test_training_byte_bpe_again_does_nothing_and_other_settings_are_refused(tmp_path, corpus_file, byte_bpe):
    folder = str(tmp_path / "b")
    for vocab_size in (400, 300):
        train_tokenizer([str(corpus_file)], folder, vocab_size=vocab_size, overwrite=True, model_type="byte-bpe")
    assert kinds_of(tmp_path / "b")[0].vocab_size == 300
    again = train_tokenizer([str(corpus_file)], folder, vocab_size=300, model_type="byte-bpe")
    assert (again.trained, again.num_verified_documents) == (False, 60)
    with pytest.raises(DataError, match="--overwrite"):
        train_tokenizer([str(corpus_file)], folder, vocab_size=400, model_type="byte-bpe")
    train_tokenizer([str(corpus_file)], folder, vocab_size=400, overwrite=True, model_type="byte-bpe")
    for path in byte_bpe.iterdir():  # training is deterministic
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "message"), [(257, "fixed tokens, 257"), (100_000, "Only .* tokens could be learned")]
)
def test_byte_bpe_of_an_impossible_size_leaves_nothing(tmp_path, corpus_file, vocab_size, message):
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=message):
        train_tokenizer([str(corpus_file)], str(tmp_path / "b"), vocab_size=vocab_size, model_type="byte-bpe")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "vocab_size"), [("bpe", 310), ("byte-bpe", 280)])
def test_limited_text_gives_the_model_of_a_file_with_it(tmp_path, corpus_file, documents, kind, vocab_size):
    pytest.importorskip("tokenizers")
    (tmp_path / "some.jsonl").write_bytes(b"".join(corpus_file.read_bytes().splitlines(keepends=True)[:5]))
    before_the_last = sum(len(text.encode()) for text in documents[:4])
    train = partial(train_tokenizer, vocab_size=vocab_size, model_type=kind)
    train([str(tmp_path / "some.jsonl")], str(tmp_path / "a"))
    train([str(corpus_file)], str(tmp_path / "b"), max_text_bytes=before_the_last + 1)
    train([str(corpus_file)], str(tmp_path / "c"), max_text_bytes=before_the_last)
    suffix = "/merges.txt" if kind == "byte-bpe" else ".vocab"
    models = [Path(f"{tmp_path}/{name}{suffix}").read_text() for name in "abc"]
    assert models[0] == models[1] != models[2]
