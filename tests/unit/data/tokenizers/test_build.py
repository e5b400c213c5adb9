import base64
import dataclasses
import json
import sys
from pathlib import Path

import pytest

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer
from megafp8.data.tokenizers.build import SENTENCEPIECE_TYPES, build_tokenizer, tokenizer_settings
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
    """The contract of every tokenizer."""
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

    train_tokenizer([str(corpus_file)], str(tmp_path / "t"), vocab_size=320)
    before = build_tokenizer(data).unique_identifiers
    assert build_tokenizer(data).unique_identifiers == before
    train_tokenizer([str(some)], str(tmp_path / "t"), vocab_size=320, overwrite=True)
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
    assert tokenizer.tokenize(" a")[0] == gpt2_vocabulary()["\u0120"]  # no space added in front, none dropped


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


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_truncation_and_padding_settings_are_ignored(tokenizer_json, setting):
    content = json.loads((tokenizer_json / "tokenizer.json").read_text())
    content |= {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 7,
            "pad_type_id": 0, "pad_token": "!",
        },
    }  # fmt: skip
    content |= {name: None for name in ("truncation", "padding") if name != setting}
    (tokenizer_json / "tokenizer.json").write_text(json.dumps(content))
    check_contract(
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer_json)))
    )


def test_bytes_are_megatron_cores():
    libraries = pytest.importorskip("megatron.core.tokenizers.text.libraries")
    tokenizer, theirs = build_tokenizer(DataConfig(tokenizer_type="ByteLevelTokenizer")), libraries.ByteLevelTokenizer()
    check_contract(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (theirs.vocab_size, theirs.eod) == (512, 0)
    for text in TEXTS:
        assert tokenizer.tokenize(text) == theirs.text_to_ids(text)
    assert tokenizer.detokenize([104, 195, 0, 511]) == "h\ufffd\0"
    with pytest.raises(DataError, match=r"U\+0000 in a text \(character 2\)"):
        tokenizer.tokenize_batch(["a", "ab\0"])


RANKS = [bytes([n]) for n in range(256)] + [b"re", b"ret", b" x", b"cut off"]


def write_ranks(path, ranks=RANKS):
    entries = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": ""} for n, token in enumerate(ranks)
    ]
    path.write_text(json.dumps(entries))
    return entries


@pytest.mark.parametrize("num_special", [None, 7, 100])
def test_tiktoken_file_is_megatron_cores(tmp_path, num_special):
    pytest.importorskip("tiktoken")
    libraries = pytest.importorskip("megatron.core.tokenizers.text.libraries")
    write_ranks(tmp_path / "ranks.json")
    path, offset = str(tmp_path / "ranks.json"), num_special or 1000
    data = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=path, tiktoken_num_special_tokens=num_special)
    tokenizer = build_tokenizer(data, vocab_size=offset + 259)
    theirs = libraries.TikTokenTokenizer(path, num_special_tokens=offset, vocab_size=offset + 259)
    check_contract(tokenizer)
    for text in TEXTS:
        assert tokenizer.tokenize(text) == theirs.text_to_ids(text)
    assert (tokenizer.vocab_size, tokenizer.eod) == (theirs.vocab_size, theirs.eod)
    assert tokenizer.tokenize("ret") == [offset + 257]
    assert tokenizer.eod not in tokenizer.tokenize("</s>")
    with pytest.raises(DataError, match=f"260 ranks.*needs {2**17 - offset}"):
        build_tokenizer(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entries: {"a": 1},
        lambda entries: [1, 2],
        lambda entries: entries[1:],
        lambda entries: [*entries[:-1], entries[0] | {"rank": 259}],
        lambda entries: [*entries[:-1], entries[-1] | {"token_bytes": "not base64!"}],
        lambda entries: [entries[1] | {"rank": 0}, entries[0] | {"rank": 1}, *entries[2:]],
        lambda entries: [{"rank": 0}],
    ],
)
def test_broken_ranks_are_named(tmp_path, damage):
    pytest.importorskip("tiktoken")
    entries = write_ranks(tmp_path / "ranks.json")
    (tmp_path / "ranks.json").write_text(json.dumps(damage(entries)))
    with pytest.raises(DataError, match="not a list of byte-pair ranks"):
        build_tokenizer(DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "ranks.json")), 1300)


@pytest.fixture
def small_encoding(monkeypatch):
    """An encoding that tiktoken knows by the name `small`, as a plugin would add it."""
    registry = pytest.importorskip("tiktoken.registry")
    definition = {
        "name": "small",
        "pat_str": r"\p{L}+|[^\p{L}]",
        "mergeable_ranks": {token: rank for rank, token in enumerate(RANKS)},
        "special_tokens": {"<|endoftext|>": 261},
    }
    registry.list_encoding_names()  # fills the table
    monkeypatch.setitem(registry.ENCODING_CONSTRUCTORS, "small", lambda: definition)
    monkeypatch.delitem(registry.ENCODINGS, "small", raising=False)
    yield definition
    registry.ENCODINGS.pop("small", None)


def test_tiktoken_encoding_by_name(small_encoding):
    data = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model="small")
    tokenizer = build_tokenizer(data, vocab_size=5000)  # the encoding has its own size
    check_contract(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (262, 261)
    assert tokenizer.tokenize("ret") == [257]
    assert tokenizer.eod not in tokenizer.tokenize("<|endoftext|>")


def test_every_part_of_an_encoding_identifies_it(small_encoding, monkeypatch):
    from tiktoken import registry

    def identifiers():
        registry.ENCODINGS.pop("small", None)
        data = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model="small")
        return json.dumps(build_tokenizer(data).unique_identifiers)

    seen = {identifiers(), identifiers()}
    assert len(seen) == 1
    for change in (
        {"pat_str": r"\p{L}+|[^\p{L}]+"},
        {"mergeable_ranks": {token: rank for rank, token in enumerate([*RANKS[:256], b"ret", b"re", *RANKS[258:]])}},
        {"special_tokens": {"<|endoftext|>": 261, "<|more|>": 262}},
    ):
        monkeypatch.setattr(registry, "ENCODING_CONSTRUCTORS", {"small": lambda change=change: small_encoding | change})
        seen.add(identifiers())
    assert len(seen) == 4


def test_encodings_that_tiktoken_cannot_load_are_an_error(small_encoding, monkeypatch):
    from tiktoken import registry

    def no_network():
        raise OSError("Name resolution failed")

    monkeypatch.setitem(registry.ENCODING_CONSTRUCTORS, "small", no_network)
    data = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model="small")
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR"):
        build_tokenizer(data)
    with pytest.raises(ConfigError, match="--tiktoken-pattern is only for a file"):
        build_tokenizer(dataclasses.replace(data, tiktoken_pattern="v1"))
    with pytest.raises(DataError, match="neither a file nor a tiktoken encoding.*cl100k_base"):
        build_tokenizer(dataclasses.replace(data, tokenizer_model="smal"))


@pytest.fixture
def trained_bpe(tmp_path, documents):
    """A byte-level BPE of 400 ids, as `tokenizers` trains and saves it: vocab.json, merges.txt and tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(documents, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(tmp_path))
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return tmp_path


def test_gpt2_and_hugging_face_give_the_ids_of_another_library(trained_bpe, documents):
    """tiktoken merges by ranks, with GPT-2's pattern: nothing is shared with `tokenizers`."""
    tiktoken = pytest.importorskip("tiktoken")
    vocab = json.loads((trained_bpe / "vocab.json").read_text())
    byte_of = {symbol: byte for byte, symbol in GPT2_BYTES.items()}
    ranks = {bytes(byte_of[s] for s in token): n for token, n in vocab.items() if token != "<|endoftext|>"}
    theirs = tiktoken.Encoding(
        "gpt2 in small", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": vocab["<|endoftext|>"]},
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    )  # fmt: skip
    files = {"vocab_file": str(trained_bpe / "vocab.json"), "merge_file": str(trained_bpe / "merges.txt")}
    gpt2 = build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", **files))
    hugging_face = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(trained_bpe)))
    for tokenizer in (gpt2, hugging_face):
        check_contract(tokenizer)
        assert (tokenizer.vocab_size, tokenizer.eod) == (400, vocab["<|endoftext|>"])
        for text in (*TEXTS, *documents, "don't  we'll\r\n\t 12 3\u00bd \U0001f600 e\u0301"):
            assert tokenizer.tokenize(text) == theirs.encode_ordinary(text)
    assert gpt2.eod not in gpt2.tokenize("<|endoftext|>")
    assert hugging_face.tokenize("<|endoftext|>") == [hugging_face.eod]


def test_settings_of_the_manifest_build_the_same_tokenizer(tokenizer_config, gpt2_files, monkeypatch):
    folder = Path(gpt2_files["vocab_file"]).parent
    monkeypatch.chdir(folder)
    relative = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="vocab.json", merge_file="./merges.txt")
    for data, vocab_size in (
        (tokenizer_config, None), (relative, None), (DataConfig(tokenizer_type="NullTokenizer"), 77),
    ):  # fmt: skip
        monkeypatch.chdir(folder)
        expected = build_tokenizer(data, vocab_size).unique_identifiers
        settings = json.loads(json.dumps(tokenizer_settings(data, vocab_size)))
        monkeypatch.chdir("/")
        again = build_tokenizer(DataConfig(**{k: v for k, v in settings.items() if k != "vocab_size"}), vocab_size)
        assert settings.get("vocab_size") == vocab_size
        assert again.unique_identifiers == expected


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
