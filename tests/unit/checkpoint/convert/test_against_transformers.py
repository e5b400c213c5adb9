"""transformers' own models: their names and shapes, their logits, and how their loaders read our files.

Skipped where the library is not installed. Parts of it that may start threads run in a forked rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hf_folders import GPT2, LLAMA, MODELS, TIED_LLAMA, random_weights, weights_in, write_hf_folder
from model_logits import TOKENS, in_a_rank, our_logits, their_logits
from saved_run import configure, save_initial
from sentencepiece import SentencePieceTrainer
from tolerances import TRANSFORMERS_LOGITS
from torch import Tensor

from megafp8.checkpoint.convert.from_huggingface import plan_import
from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export
from megafp8.checkpoint.convert.tokenizer import (
    differences_from_llama,
    find_tokenizer,
    tokenizer_notes,
    write_tokenizer,
)
from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer
from megafp8.data.tokenizers.build import build_tokenizer

ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """The library, with everything imported that forked ranks need."""
    library = importlib.import_module("transformers")
    assert library.LlamaForCausalLM and library.GPT2LMHeadModel and library.AutoTokenizer
    return library


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(transformers: ModuleType, name: str, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "theirs", MODELS[name], random_weights(MODELS[name], torch.float32))
    plan_import(folder).write(tmp_path / "ours", tmp_path / "ours", lambda line: None)
    theirs, ours = in_a_rank(their_logits, transformers, folder), in_a_rank(our_logits, tmp_path / "ours")
    assert theirs.std() > 0.1
    difference = (theirs - ours[..., : theirs.shape[-1]]).abs().max() / theirs.abs().max()
    assert difference < TRANSFORMERS_LOGITS, difference


@pytest.mark.parametrize(
    "text",
    [
        "--model-preset tiny --vocab-size 130 --tensor-model-parallel-size 2",
        "--model-preset tiny-gpt2 --vocab-size 130 --pipeline-model-parallel-size 2",
        "--model-preset tiny --vocab-size 130 --qk-layernorm --norm-placement post --qk-layernorm-across-heads "
        "--tensor-model-parallel-size 2",
        "--model-preset tiny-moe --vocab-size 130 --expert-model-parallel-size 2",
        # The model of examples/quickstart.sh, with a smaller vocabulary.
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
        "--ffn-hidden-size 704 --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm "
        "--swiglu --qk-layernorm --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 130 "
        "--tensor-model-parallel-size 2",
    ],
    ids=["llama", "gpt2", "olmo2", "mixtral", "quickstart"],
)
def test_an_export_has_equal_logits_in_transformers(transformers: ModuleType, text: str, tmp_path: Path) -> None:
    save_initial(tmp_path / "run", configure(text), world_size=2)
    export = plan_export(tmp_path / "run", ExportOptions())
    (tmp_path / "theirs").mkdir()
    export.write(tmp_path / "theirs", 100_000, lambda line: None)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    theirs, ours = in_a_rank(their_logits, transformers, tmp_path / "theirs"), in_a_rank(our_logits, tmp_path / "run")
    assert theirs.shape[-1] == 131
    difference = (theirs - ours[..., :131]).abs().max() / theirs.abs().max()
    assert difference < TRANSFORMERS_LOGITS, difference


@pytest.mark.parametrize("fields", [LLAMA, TIED_LLAMA, GPT2], ids=MODELS)
def test_names_and_shapes_equal_transformers(transformers: ModuleType, fields: dict[str, Any]) -> None:
    kind = transformers.LlamaForCausalLM if fields["model_type"] == "llama" else transformers.GPT2LMHeadModel
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**deepcopy(fields)))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: tuple(weight.shape) for name, weight in random_weights(fields, torch.float32).items()} == theirs


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_fp8_weights_decode_equally_in_transformers(transformers: ModuleType, recipe: str, tmp_path: Path) -> None:
    for library in ("accelerate", "compressed_tensors"):
        pytest.importorskip(library)
    fields = LLAMA | {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1}
    # Its loaders multiply in the model's type, after rounding the scales to it if they are not of a block.
    dtype = torch.bfloat16 if recipe == "blockwise" else torch.float32
    folder = write_hf_folder(tmp_path / "theirs", fields, random_weights(fields, dtype))
    for name in ("fp8", "plain"):
        plan_import(folder).write(tmp_path / "ours", tmp_path / "ours", lambda line: None)
        options = ExportOptions(quantizes=name == "fp8", fp8_recipe=recipe)
        folder = tmp_path / name
        folder.mkdir()
        plan_export(tmp_path / "ours", options).write(folder, 1 << 30, lambda line: None)
        shutil.rmtree(tmp_path / "ours")
    assert sum(weight.dtype == torch.float8_e4m3fn for weight in weights_in(tmp_path / "fp8").values()) == 7

    def loaded() -> dict[str, Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=dtype)
        model(TOKENS)  # decompresses
        return model.state_dict()

    theirs = in_a_rank(loaded)
    for name, weight in weights_in(tmp_path / "plain").items():
        assert theirs[name].dtype == weight.dtype and torch.equal(theirs[name], weight), name


TEXTS = ("def main(a, b):\n\treturn  a + b  # Grüße, 世界 🙂\n", "", " first  a space ", "\n\n\tclass x:\r\n")


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer"])
def test_a_tokenizer_gives_equal_ids_in_transformers(transformers: ModuleType, kind: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": Path(__file__).read_text(encoding="utf-8")}) + "\n", encoding="utf-8")
    if kind == "SentencePieceTokenizer":
        model = train_tokenizer([str(corpus)], str(tmp_path / "model"), vocab_size=350).model_path
        data = DataConfig(tokenizer_type=kind, tokenizer_model=str(model))
    else:
        model = train_tokenizer(
            [str(corpus)], str(tmp_path / "model"), vocab_size=300, model_type="byte-bpe"
        ).model_path
        files = {"vocab_file": str(model.parent / "vocab.json"), "merge_file": str(model.parent / "merges.txt")}
        files = files if kind == "GPT2BPETokenizer" else {"tokenizer_model": str(model)}
        data = DataConfig(tokenizer_type=kind, **files)
    ours, folder = build_tokenizer(data), tmp_path / "theirs"
    folder.mkdir()
    write_tokenizer(data, folder)
    assert tokenizer_notes(data) == []

    def theirs() -> list[Any]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return [tokenizer.eos_token_id, *(tokenizer(text)["input_ids"] for text in TEXTS)]

    assert in_a_rank(theirs) == [ours.eod, *(ours.tokenize(text) for text in TEXTS)]
    found = find_tokenizer(folder)
    assert found is not None and found.settings["tokenizer_type"] == kind
    assert found.tokenizer.unique_identifiers == ours.unique_identifiers


def test_the_model_of_the_quickstart_loads_with_its_tokenizer(transformers: ModuleType, tmp_path: Path) -> None:
    script = (ROOT / "examples/quickstart.sh").read_text(encoding="utf-8")
    model = re.search(r"^model=\((.*?)\)", script, re.M | re.S)
    assert model is not None
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": Path(__file__).read_text(encoding="utf-8")}) + "\n")
    tokenizer_model = train_tokenizer(
        [str(tmp_path / "corpus.jsonl")], str(tmp_path / "model"), vocab_size=350
    ).model_path
    save_initial(tmp_path / "run", configure(model[1], tokenizer_model))
    export, folder = plan_export(tmp_path / "run", ExportOptions()), tmp_path / "theirs"
    folder.mkdir()
    export.write(folder, 1 << 30, lambda line: None)
    assert export.fields["model_type"] == "qwen3"

    def theirs() -> tuple[Tensor, list[list[int]]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return their_logits(transformers, folder), [tokenizer(text)["input_ids"] for text in TEXTS]

    logits, ids = in_a_rank(theirs)
    assert export.tokenizer is not None and ids == [export.tokenizer.tokenize(text) for text in TEXTS]
    ours = in_a_rank(our_logits, tmp_path / "run")[..., : logits.shape[-1]]
    assert (logits - ours).abs().max() / logits.abs().max() < TRANSFORMERS_LOGITS


def test_an_unsupported_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    texts = Path(__file__).read_text(encoding="utf-8").splitlines()
    with open(path, "wb") as stream:
        SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=stream, vocab_size=200, model_type="unigram", num_threads=1,
            minloglevel=2,
        )  # fmt: skip
    assert len(differences_from_llama(path)) == 4
    (note, *_) = tokenizer_notes(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path)))
    assert "makes other ids of it: it is no BPE" in note
