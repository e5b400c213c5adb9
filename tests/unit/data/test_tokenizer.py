import base64
import json
import sys

import pytest

from megafp8.config.schema import DataConfig
from megafp8.data.tokenizer import SENTENCEPIECE_TYPES, build_tokenizer
from megafp8.data.tokenizer_training import train_sentencepiece
from megafp8.errors import CapabilityError, ConfigError, DataError

TEXTS = ["def f(x):\n\treturn  x+12  # h\u00e9llo \u6f22\u5b57\n", "", "plain words"]
GPT2_BYTES = {**{b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}}
GPT2_BYTES |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in GPT2_BYTES)}


def gpt2_vocabulary():
    vocab = {symbol: n for n, symbol in enumerate(GPT2_BYTES.values())}
    vocab |= {"re": 256, "ret": 257, "<|endoftext|>": 258}
    return vocab


@pytest.fixture
def gpt2_files(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(gpt2_vocabulary()), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nr e\nre t\n", encoding="utf-8")
    return {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}


@pytest.fixture
def tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(gpt2_vocabulary(), [("r", "e"), ("re", "t")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|begin|>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 259)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    return tmp_path


def check_contract(tokenizer):
    """What every tokenizer promises."""
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert tokenizer.eod not in ids
    assert tokenizer.tokenize_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    json.dumps(tokenizer.unique_identifiers)
    assert not hasattr(tokenizer, "pad")


@pytest.mark.parametrize("kind", SENTENCEPIECE_TYPES)
def test_sentencepiece(tokenizer_config, kind):
    tokenizer = build_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=tokenizer_config.tokenizer_model))
    check_contract(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (320, 2)


def test_sentencepiece_gives_megatron_cores_ids(tokenizer_config):
    MegatronTokenizer = pytest.importorskip("megatron.core.tokenizers").MegatronTokenizer
    theirs = MegatronTokenizer.from_pretrained(
        tokenizer_config.tokenizer_model, metadata_path={"library": "sentencepiece", "model_type": "gpt"}
    )
    ours = build_tokenizer(tokenizer_config)
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.tokenize(text)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)


def test_retraining_under_the_same_path_is_noticed(tmp_path, corpus_file):
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "t.model"))
    some = tmp_path / "some.jsonl"
    some.write_bytes(b"".join(corpus_file.read_bytes().splitlines(keepends=True)[:40]))

    train_sentencepiece([str(corpus_file)], str(tmp_path / "t"), vocab_size=320)
    before = build_tokenizer(data).unique_identifiers
    assert build_tokenizer(data).unique_identifiers == before
    train_sentencepiece([str(some)], str(tmp_path / "t"), vocab_size=320, overwrite=True)
    assert build_tokenizer(data).unique_identifiers != before


def test_null_is_megatrons():
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), vocab_size=100)
    assert tokenizer.tokenize("1 2 99") == [1, 2, 99]
    assert tokenizer.detokenize([5, 6]) == "5 6"
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    with pytest.raises(DataError, match="one"):
        tokenizer.tokenize("one")


def test_gpt2_bpe(gpt2_files):
    pytest.importorskip("tokenizers")
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", **gpt2_files))
    check_contract(tokenizer)
    assert tokenizer.tokenize("ret") == [257]
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
    assert tokenizer.tokenize(" a")[0] == gpt2_vocabulary()["\u0120"]  # no space put in front, none swallowed


@pytest.mark.parametrize("as_folder", [True, False])
def test_hugging_face(tokenizer_json, as_folder):
    model = tokenizer_json if as_folder else tokenizer_json / "tokenizer.json"
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model)))
    check_contract(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (260, 258)
    assert tokenizer.tokenize("ret") == [257]  # without the begin token that the file's post-processor adds


def test_hugging_face_needs_to_know_the_end_of_a_document(tokenizer_json):
    (tokenizer_json / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="eos_token"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer_json)))


def test_tiktoken(tmp_path):
    pytest.importorskip("tiktoken")
    tokens = [bytes([n]) for n in range(256)] + [b"re", b"ret", b"cut off"]
    ranks = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": ""} for n, token in enumerate(tokens)
    ]
    (tmp_path / "ranks.json").write_text(json.dumps(ranks))
    data = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "ranks.json"))
    tokenizer = build_tokenizer(data, vocab_size=1258)
    check_contract(tokenizer)
    assert tokenizer.tokenize("ret") == [1257]
    assert tokenizer.eod == 2
    assert tokenizer.eod not in tokenizer.tokenize("</s>")
    with pytest.raises(DataError, match="259 ranks.*needs 130072"):
        build_tokenizer(data)


@pytest.mark.parametrize(
    ("data", "flag"),
    [
        (DataConfig(), "--tokenizer-type"),
        (DataConfig(tokenizer_type="Llama2Tokenizer"), "--tokenizer-model"),
        (DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="v"), "--merge-file"),
        (DataConfig(tokenizer_type="NullTokenizer"), "--vocab-size"),
    ],
)
def test_missing_flags_are_named(data, flag):
    with pytest.raises(ConfigError, match=flag):
        build_tokenizer(data)


def test_missing_and_broken_models_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(tmp_path / "none.model")))
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="11 bytes"):
        build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(tmp_path / "bad.model")))


def test_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CapabilityError, match="pip install tokenizers"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
