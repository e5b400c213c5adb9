"""Values derived from the settings."""

import pytest

from megafp8.config import derived, lr_schedule, stages
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError


def config_of(**changes):
    names = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(RunConfig(), names)


def test_tokenizer_of_gpt2_files():
    assert derived.tokenizer_type(config_of().data) is None
    assert derived.tokenizer_type(config_of(data__vocab_file="v.json").data) == "GPT2BPETokenizer"
    config = config_of(data__vocab_file="v.json", data__tokenizer_type="NullTokenizer")
    assert derived.tokenizer_type(config.data) == "NullTokenizer"


def test_batch():
    config = config_of(training__micro_batch_size=2, data__seq_length=8)
    assert derived.global_batch_size(config, 4) == 8
    assert derived.num_microbatches(config, 4) == 1
    config = with_values(config, {"training.global_batch_size": 32})
    assert derived.num_microbatches(config, 4) == 4
    assert derived.tokens_per_step(config, 4) == 256
    with pytest.raises(ConfigError, match="global batch 32"):
        derived.num_microbatches(config, 5)


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, None),
        ({"parallel__num_layers_per_virtual_pipeline_stage": 2}, 3),
        ({"parallel__num_layers_per_virtual_pipeline_stage": 6}, None),
        ({"parallel__num_virtual_stages_per_pipeline_rank": 2}, 2),
        ({"parallel__num_virtual_stages_per_pipeline_rank": 1}, None),
    ],
)
def test_virtual_stages(changes, chunks):
    config = config_of(model__num_layers=12, parallel__pipeline_model_parallel_size=2, **changes)
    assert stages.virtual_pipeline_size(config) == chunks


def test_mlp_width_is_megatrons():
    assert derived.ffn_hidden_size(config_of(model__hidden_size=768).model) == 3072
    assert derived.ffn_hidden_size(config_of(model__hidden_size=768, model__swiglu=True).model) == 2048
    assert derived.ffn_hidden_size(config_of(model__hidden_size=2048, model__swiglu=True).model) == 5440
    assert derived.ffn_hidden_size(config_of(model__hidden_size=8, model__ffn_hidden_size=5).model) == 5


def test_attention_heads():
    model = config_of(model__hidden_size=64, model__num_attention_heads=4, model__num_query_groups=2).model
    assert derived.num_query_groups(model) == 4  # not grouped without the switch
    grouped = config_of(
        model__hidden_size=64,
        model__num_attention_heads=4,
        model__num_query_groups=2,
        model__group_query_attention=True,
    ).model
    assert (derived.num_query_groups(grouped), derived.kv_projection_size(grouped)) == (2, 32)


@pytest.mark.parametrize(
    ("changes", "vocab", "padded"),
    [
        ({}, 50_257, 50_304),
        ({}, 50_304, 50_304),
        ({"parallel__tensor_model_parallel_size": 8}, 50_257, 51_200),
        ({"model__make_vocab_size_divisible_by": 1}, 257, 257),
        ({"model__make_vocab_size_divisible_by": 1, "precision__fp8_format": "e4m3"}, 257, 272),
        (
            {
                "model__make_vocab_size_divisible_by": 3,
                "precision__fp8_format": "e4m3",
                "precision__fp8_recipe": "mxfp8",
                "parallel__tensor_model_parallel_size": 2,
            },
            100,
            192,
        ),
    ],
)
def test_padded_vocabulary(changes, vocab, padded):
    config = config_of(**changes)
    assert derived.padded_vocab_size(config, vocab) == padded
    assert padded % config.parallel.tensor_model_parallel_size == 0


def test_dimensions_are_multiples_for_the_strictest_recipe():
    recipes = {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}
    assert derived.gemm_alignment(PrecisionConfig()) == 1
    assert derived.gemm_alignment(PrecisionConfig(**recipes)) == 16
    assert derived.gemm_alignment(PrecisionConfig(**recipes, precision_map=("output_layer=mxfp8",))) == 32


def test_schedule_in_steps():
    config = config_of(
        training__train_iters=100,
        training__global_batch_size=8,
        optimizer__lr_warmup_iters=10,
        optimizer__lr_wsd_decay_iters=20,
    )
    assert derived.train_samples(config, 1) == 800
    assert lr_schedule.lr_decay_samples(config, 1) == 800
    assert lr_schedule.lr_warmup_samples(config, 1) == 80
    assert lr_schedule.lr_wsd_decay_samples(config, 1) == 160
    shorter = with_values(config, {"optimizer.lr_decay_iters": 50, "optimizer.lr_warmup_fraction": 0.1})
    assert lr_schedule.lr_decay_samples(shorter, 1) == 400
    assert lr_schedule.lr_warmup_samples(shorter, 1) == 40
    assert lr_schedule.weight_decay_samples(shorter, 1) == 800


def test_schedule_in_samples():
    config = config_of(
        training__train_samples=805,
        training__global_batch_size=8,
        optimizer__lr_warmup_samples=13,
        optimizer__lr_wsd_decay_samples=100,
    )
    assert derived.train_iters(config, 1) == 100
    assert derived.train_samples(config, 1) == 805
    assert lr_schedule.lr_decay_samples(config, 1) == 805
    assert lr_schedule.lr_warmup_samples(config, 1) == 13
    assert lr_schedule.lr_wsd_decay_samples(config, 1) == 100


def test_samples_of_the_three_datasets():
    config = config_of(training__train_iters=100, training__global_batch_size=4, training__eval_iters=5)
    assert derived.dataset_samples(config, 1) == (400, 20, 20)
    # Every validation reads the same samples.
    config = with_values(config, {"training.eval_interval": 25})
    assert derived.dataset_samples(config, 1) == (400, 20, 20)


def test_split():
    assert derived.split(config_of()) == "969,30,1"
    assert derived.split(config_of(data__split="9,1,0")) == "9,1,0"
    assert derived.split(config_of(data__train_data_path=("a",))) is None


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


def test_weight_decay_range():
    assert lr_schedule.weight_decay_range(config_of(optimizer__weight_decay=0.1).optimizer) == (0.1, 0.1)
    changing = config_of(
        optimizer__weight_decay_incr_style="linear", optimizer__start_weight_decay=0.0, optimizer__end_weight_decay=0.2
    )
    assert lr_schedule.weight_decay_range(changing.optimizer) == (0.0, 0.2)


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
