import pytest
import sentencepiece

from megafp8.config.schema import DataConfig
from megafp8.data.tokenizer import build_tokenizer
from megafp8.data.tokenizer_training import check_lossless, train_sentencepiece
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
def test_every_text_comes_back_exactly(tokenizer_config, text):
    tokenizer = build_tokenizer(tokenizer_config)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod not in ids


def test_digits_stand_alone(tmp_path):
    (tmp_path / "a.txt").write_text("in 1849 and 1849 or 1849 came 1849\n" * 50)
    train_sentencepiece([str(tmp_path / "a.txt")], str(tmp_path / "t"), vocab_size=280)
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "t.model"))
    assert len(build_tokenizer(data).tokenize("1849")) == 4


def test_training_again_does_nothing_and_other_settings_are_refused(tmp_path, corpus_file):
    prefix = str(tmp_path / "t")
    assert train_sentencepiece([str(corpus_file)], prefix, vocab_size=320).trained
    before = (tmp_path / "t.model").stat().st_mtime_ns
    again = train_sentencepiece([str(corpus_file)], prefix, vocab_size=320)
    assert not again.trained
    assert again.num_verified_documents == 60
    with pytest.raises(DataError, match="--overwrite"):
        train_sentencepiece([str(corpus_file)], prefix, vocab_size=330)
    assert (tmp_path / "t.model").stat().st_mtime_ns == before
    assert train_sentencepiece([str(corpus_file)], prefix, vocab_size=330, overwrite=True).trained
    data = DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=f"{prefix}.model")
    assert build_tokenizer(data).vocab_size == 330


def test_training_is_deterministic(tmp_path, corpus_file):
    for name in "ab":
        train_sentencepiece([str(corpus_file)], str(tmp_path / name), vocab_size=320, num_threads=2)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


@pytest.mark.parametrize("vocab_size", [100, 100_000])
def test_impossible_vocabulary_is_an_error_and_leaves_nothing(tmp_path, corpus_file, vocab_size):
    with pytest.raises(DataError, match="--vocab-size"):
        train_sentencepiece([str(corpus_file)], str(tmp_path / "t"), vocab_size=vocab_size)
    assert not list(tmp_path.iterdir())


def test_unigram_is_lossless_too(tmp_path, corpus_file):
    train_sentencepiece([str(corpus_file)], str(tmp_path / "t"), vocab_size=302, model_type="unigram")
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
        check_lossless(processor, iter(["some  words"]), limit=1)


def test_the_one_known_loss_is_counted(tokenizer_config):
    processor = sentencepiece.SentencePieceProcessor(model_file=tokenizer_config.tokenizer_model)
    assert check_lossless(processor, iter(["a", "b \u2581 c"]), limit=9) == (1, 1)
