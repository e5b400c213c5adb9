"""Values derived from the settings."""

import pytest

from megafp8.config import derived
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.config.settings import with_values


def config_of(**changes):
    names = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(RunConfig(), names)


def test_tokenizer_of_gpt2_files():
    assert derived.tokenizer_type(config_of().data) is None
    assert derived.tokenizer_type(config_of(data__vocab_file="v.json").data) == "GPT2BPETokenizer"
    config = config_of(data__vocab_file="v.json", data__tokenizer_type="NullTokenizer")
    assert derived.tokenizer_type(config.data) == "NullTokenizer"


def test_dimensions_are_multiples_for_the_strictest_recipe():
    recipes = {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}
    assert derived.gemm_alignment(PrecisionConfig()) == 1
    assert derived.gemm_alignment(PrecisionConfig(**recipes)) == 16
    assert derived.gemm_alignment(PrecisionConfig(**recipes, precision_map=("output_layer=mxfp8",))) == 32


def test_split():
    assert derived.split(config_of().data) == "969,30,1"
    assert derived.split(config_of(data__split="9,1,0").data) == "9,1,0"
    assert derived.split(config_of(data__train_data_path=("a",)).data) is None


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969,30,1", (969, 30, 1)),
        ("1", (1,)),
        ("99,1", (99, 1)),
        ("0.9,.1,0", (0.9, 0.1, 0)),
        ("'99,1,0'", (99, 1, 0)),
    ],
)
def test_split_shares(text, shares):
    assert derived.split_shares(text) == shares


@pytest.mark.parametrize("text", ["", "a", "1,2,3,4", "1;2", "0,0,0", "-1,2", "1,,2", "90 10", "1e-3,1,0"])
def test_invalid_splits_are_refused(text):
    with pytest.raises(ValueError):
        derived.split_shares(text)


@pytest.mark.parametrize(
    ("changes", "params", "grads"),
    [
        ({}, "fp32", "fp32"),
        ({"precision__bf16": True}, "bf16", "fp32"),
        ({"precision__bf16": True, "precision__grad_reduce_in_bf16": True}, "bf16", "bf16"),
        ({"precision__fp16": True}, "fp16", "fp16"),
        ({"precision__fp16": True, "precision__accumulate_allreduce_grads_in_fp32": True}, "fp16", "fp32"),
    ],
)
def test_number_formats(changes, params, grads):
    precision = config_of(**changes).precision
    assert (derived.params_dtype(precision), derived.grad_dtype(precision)) == (params, grads)


def test_recompute():
    training = config_of(training__recompute_activations=True).training
    assert derived.recompute_granularity(training) == "selective"
    assert derived.recompute_modules(training) == ("core_attn",)
    assert derived.recompute_modules(config_of(training__recompute_granularity="full").training) == ()
    assert derived.recompute_granularity(config_of().training) is None


@pytest.mark.parametrize(
    ("micro", "length", "hidden", "tensor", "context", "expected"),
    [
        (1, 128, 128, 1, 1, 1),
        (4, 128, 128, 1, 1, 1),  # 2^16 elements
        (8, 128, 128, 1, 1, 2),
        (2, 1024, 2048, 1, 1, 64),
        (2, 1024, 2048, 4, 2, 8),
    ],
)
def test_threads_that_have_enough_to_do(micro, length, hidden, tensor, context, expected):
    config = config_of(
        training__micro_batch_size=micro, data__seq_length=length, model__hidden_size=hidden,
        parallel__tensor_model_parallel_size=tensor, parallel__context_parallel_size=context,
    )  # fmt: skip
    assert derived.useful_threads(config) == expected
