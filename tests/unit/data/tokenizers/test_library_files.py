"""Files of tokenizers that are too large, of the wrong shape, or made for something else than shards."""

import json

import pytest

from megafp8.config.schema import DataConfig
from megafp8.data.shards import token_dtype
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.data.tokenizers.library_calls import library_failures
from megafp8.errors import DataError


@pytest.fixture
def tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return tmp_path


def hugging_face(folder, **changes):
    """The tokenizer of a folder, with keys of its tokenizer.json changed."""
    content = json.loads((folder / "tokenizer.json").read_text()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))


def model_of(folder, **changes):
    return json.loads((folder / "tokenizer.json").read_text())["model"] | changes


def test_dropout_is_turned_off_and_said(tokenizer_json):
    tokenizer = hugging_face(tokenizer_json, model=model_of(tokenizer_json, dropout=0.5))
    assert {tuple(tokenizer.tokenize("abc")) for _ in range(50)} == {(4,)}
    (warning,) = tokenizer.warnings
    assert f"{tokenizer_json / 'tokenizer.json'}: dropout 0.5 is turned off" in warning
    assert hugging_face(tokenizer_json, model=model_of(tokenizer_json, dropout=None)).warnings == ()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token": 5}', "eos_token 5 is not text"),
        ('{"eos_token": ["a"]}', "is not text"),
        ('{"eos_token": true}', "eos_token True is not text"),
        ('{"eos_token": {"content": 5}}', "is not text"),
        ("[1]", "is not an object of JSON, but a list"),
        ('"a"', "is not an object of JSON, but a str"),
    ],
)
def test_settings_of_the_wrong_shape_are_named(tokenizer_json, name, content, message):
    (tokenizer_json / "tokenizer_config.json").unlink()
    (tokenizer_json / name).write_text(content)
    with pytest.raises(DataError, match=f"{tokenizer_json / name}.*{message}"):
        hugging_face(tokenizer_json)


def test_panics_of_the_library_name_the_file(tokenizer_json):
    """They do not derive from Exception."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = hugging_face(tokenizer_json, pre_tokenizer=split)
    for encode in (tokenizer.tokenize, lambda text: tokenizer.tokenize_batch([text])):
        with pytest.raises(DataError, match=f"{tokenizer_json / 'tokenizer.json'} fails on this text: Onig"):
            encode("a" * 40 + "b")
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(DataError, match=f"{tokenizer_json / 'tokenizer.json'} is not a tokenizer.json: Precompiled"):
        hugging_face(tokenizer_json, normalizer=charsmap)


def test_ids_beyond_a_shard_are_refused(tokenizer_json):
    model = model_of(tokenizer_json)
    model["vocab"]["ab"] = 2**31
    with pytest.raises(DataError, match="tokenizer.json has the token id 2147483648; shards hold ids up to 2.31 - 1"):
        hugging_face(tokenizer_json, model=model)
    assert token_dtype(2**31) == "int32"
    with pytest.raises(DataError, match="token id 2147483648; shards hold ids up to 2.31 - 1"):
        token_dtype(2**31 + 1)


def test_a_tokenizer_without_tokens_is_refused(tokenizer_json):
    model = model_of(tokenizer_json, vocab={}, merges=[])
    with pytest.raises(DataError, match="tokenizer.json has no tokens"):
        hugging_face(tokenizer_json, added_tokens=[], post_processor=None, model=model)


@pytest.mark.parametrize(
    ("kind", "field", "name"),
    [
        ("SentencePieceTokenizer", "tokenizer_model", "t.model"),
        ("HuggingFaceTokenizer", "tokenizer_model", "tokenizer.json"),
        ("GPT2BPETokenizer", "vocab_file", "vocab.json"),
        ("GPT2BPETokenizer", "merge_file", "merges.txt"),
        ("TikTokenizer", "tokenizer_model", "ranks.json"),
    ],
)
def test_files_have_a_limit_of_size(tmp_path, kind, field, name):
    """A sparse file of a terabyte; a library would read all of it."""
    pytest.importorskip({"SentencePieceTokenizer": "sentencepiece", "TikTokenizer": "tiktoken"}.get(kind, "tokenizers"))
    with open(tmp_path / name, "wb") as stream:
        stream.truncate(1 << 40)
    (tmp_path / "other").touch()
    files = {"vocab_file": str(tmp_path / "other"), "merge_file": str(tmp_path / "other"), field: str(tmp_path / name)}
    with pytest.raises(DataError, match=f"{tmp_path / name}.* cannot be read.* it has more than [0-9,]+ bytes"):
        build_tokenizer(DataConfig(tokenizer_type=kind, **files))


def test_a_lack_of_memory_is_no_fault_of_the_text():
    with pytest.raises(MemoryError), library_failures("the tokenizer fails on this text"):
        raise MemoryError
