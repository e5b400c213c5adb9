"""Warnings for settings without effect and for surprising recipes, and only for those."""

import dataclasses

import pytest

from megafp8.config import flags, rules
from megafp8.config.layer_backends import EMULATED, LAYER_BACKENDS, TRANSFORMER_ENGINE
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values

BF16 = {"precision.bf16": True}
DOCUMENTS = {"data.reset_attention_mask": True, "data.eod_mask_loss": True}
TINY = ["--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3"]

CASES = (
    ({"parallel.sequence_parallel": True}, "emulated", "--sequence-parallel"),
    (
        {
            "model.num_experts": 4,
            "model.moe_router_load_balancing_type": ("none",),
            "model.moe_aux_loss_coeff": (0.01,),
        },
        "emulated",
        "--moe-aux-loss-coeff 0.01 has no effect with",
    ),
    (
        {"model.num_experts": 4, "model.moe_router_enable_expert_bias": True, "model.moe_expert_capacity_factor": 1.25},
        "emulated",
        "--moe-router-enable-expert-bias with --moe-expert-capacity-factor 1.25: ",
    ),
    (
        {
            "model.num_experts": 4,
            "model.moe_router_enable_expert_bias": True,
            "model.moe_expert_capacity_factor": 1.25,
            "model.moe_pad_expert_input_to_capacity": True,
        },
        "emulated",
        "--moe-router-enable-expert-bias has no effect with --moe-pad-expert-input-to-capacity: ",
    ),
    ({"checkpoint.save_interval": 10}, "emulated", "--save-interval 10"),
    ({"data.tiktoken_pattern": "v2", "data.tokenizer_type": "NullTokenizer"}, "emulated", "--tiktoken-pattern v2"),
    (
        {"data.tiktoken_num_special_tokens": 9, "data.tokenizer_type": "NullTokenizer"},
        "emulated",
        "--tiktoken-num-special-tokens 9",
    ),
    ({"parallel.cp_comm_type": "a2a", "parallel.context_parallel_size": 2}, "emulated", "--cp-comm-type a2a"),
    (
        {"parallel.context_parallel_size": 2} | DOCUMENTS,
        "transformer_engine",
        "--cp-comm-type p2p with --reset-attention-mask: a ring would need padded documents",
    ),
    ({"optimizer.initial_loss_scale": 65536.0, "precision.bf16": True}, "emulated", "--initial-loss-scale 65536"),
    (
        {"optimizer.loss_scale": 8.0, "optimizer.hysteresis": 1, "precision.fp16": True},
        "emulated",
        "--hysteresis 1 has no effect: --loss-scale 8 is fixed",
    ),
)


@pytest.mark.parametrize(("values", "implementation", "flag"), CASES)
def test_a_setting_without_effect_gives_a_warning(values: dict, implementation: str, flag: str) -> None:
    (warning,) = rules.warnings(with_values(RunConfig(), values), LAYER_BACKENDS[implementation], 1)
    assert warning.startswith(flag)


@pytest.mark.parametrize(
    ("values", "implementation"),
    [
        ({}, "emulated"),
        ({"parallel.sequence_parallel": True, "parallel.tensor_model_parallel_size": 2}, "emulated"),
        ({"data.tiktoken_pattern": "v2", "data.tokenizer_type": "TikTokenizer"}, "emulated"),
        ({"optimizer.initial_loss_scale": 65536.0, "precision.fp16": True}, "emulated"),
        ({"parallel.cp_comm_type": "a2a", "parallel.context_parallel_size": 2}, "transformer_engine"),
        ({"parallel.cp_comm_type": "a2a", "parallel.context_parallel_size": 2} | DOCUMENTS, "transformer_engine"),
        ({"parallel.context_parallel_size": 2} | DOCUMENTS, "emulated"),
        (DOCUMENTS, "transformer_engine"),
    ],
)
def test_an_effective_setting_gives_no_warning(values: dict, implementation: str) -> None:
    assert rules.warnings(with_values(RunConfig(), values), LAYER_BACKENDS[implementation], 1) == []


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_e5m2_gradients_of_a_block_recipe_give_a_warning(recipe: str) -> None:
    values = {**BF16, "precision.fp8_format": "hybrid", "precision.fp8_recipe": recipe}
    (warning,) = rules.warnings(with_values(RunConfig(), values), EMULATED, 1)
    assert warning.startswith(f"--fp8-format hybrid quantizes gradients to E5M2; --fp8-recipe {recipe}")


def test_a_short_amax_history_gives_a_warning() -> None:
    values = {**BF16, "precision.fp8_format": "hybrid", "precision.fp8_recipe": "delayed"}
    (warning,) = rules.warnings(with_values(RunConfig(), values), EMULATED, 1)
    assert "--recipe delayed has the tested ones: --fp8-amax-history-len 1024 --fp8-amax-compute-algo max" in warning


@pytest.mark.parametrize("values", [
    {"precision.fp8_format": "e4m3", "precision.fp8_recipe": "mxfp8"},
    {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "tensorwise"},
    {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "delayed", "precision.fp8_amax_history_len": 16},
])  # fmt: skip
def test_a_usual_recipe_gives_no_warning(values: dict) -> None:
    assert rules.warnings(with_values(RunConfig(), values | BF16), EMULATED, 1) == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", "--fp8-recipe tensorwise"),
        ("--fp4-format e2m1", "--fp4-recipe nvfp4"),
        ("--precision *.linear_fc2=mxfp8/e4m3", "--precision"),
    ],
)
def test_fp8_on_fp32_weights_gives_a_warning(words: str, flag: str) -> None:
    (warning,) = rules.warnings(flags.parse(words.split()).config, EMULATED, 1)
    assert flag in warning and "without --bf16" in warning and "FP32" in warning and "add --bf16" in warning
    assert rules.warnings(flags.parse([*words.split(), "--bf16"]).config, EMULATED, 1) == []


@pytest.mark.parametrize("recipe", ["--fp8-recipe delayed", "--fp8-recipe tensorwise --precision output_layer=delayed"])
def test_a_negative_margin_saturates(recipe: str) -> None:
    """The scale is 2^2 times the one that maps the largest value to the format's largest number."""
    words = f"--bf16 --fp8-format hybrid --fp8-amax-history-len 16 {recipe} --fp8-margin".split()
    (warning,) = rules.warnings(flags.parse([*words, "-2"]).config, EMULATED, 1)
    assert warning.startswith("--fp8-margin -2") and "above 1/4 of the amax saturate" in warning
    assert rules.warnings(flags.parse([*words, "1"]).config, EMULATED, 1) == []


@pytest.mark.parametrize(
    ("length", "warmup", "steps", "rate"),
    [
        # Megatron-LM's smoke tests: the first steps of a long schedule. Step n has n - 1 steps of warm-up behind it.
        ("--train-iters 50 --lr-decay-iters 320000", "--lr-warmup-fraction .01", "3200 steps", 1e-3 * 49 / 3200),
        ("--train-samples 80 --lr-decay-samples 8000", "--lr-warmup-samples 80", "10 steps", 1e-3 * 9 / 10),
    ],
)
def test_a_run_within_its_warmup_is_trained(length: str, warmup: str, steps: str, rate: float) -> None:
    config = flags.parse([*TINY, *length.split(), *warmup.split()]).config
    assert [text for text in rules.setting_problems(config, 1) if "warmup" in text] == []
    (warning,) = rules.warnings(config, EMULATED, 1)
    assert f"the warmup of {steps}" in warning and f"{rate:.3g}, below --lr 0.001" in warning


def test_a_warmup_beyond_the_schedule_is_refused() -> None:
    config = flags.parse([*TINY, "--train-iters", "50", "--lr-warmup-iters", "50"]).config
    assert any("not shorter than the schedule" in text for text in rules.setting_problems(config, 1))
    assert rules.warnings(config, EMULATED, 1) == []


def test_none_resets_a_setting_of_a_file(tmp_path) -> None:
    from megafp8.config import flags, settings

    config = with_values(RunConfig(), {"precision.fp8_format": "hybrid", "training.exit_interval": 5})
    path = tmp_path / "config.json"
    path.write_text(settings.to_json(config), encoding="utf-8")
    taken_back = flags.parse(["--config", str(path), "--fp8-format", "none", "--exit-interval", "none"]).config
    assert taken_back == dataclasses.replace(RunConfig())


@pytest.mark.parametrize(
    ("words", "world_size"),
    [
        ("--moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input", 1),
        ("--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", 1),
        ("--expert-model-parallel-size 2", 2),
    ],
)
def test_a_graph_of_experts_whose_tokens_the_host_counts_is_refused(words: str, world_size: int) -> None:
    mixture = "--bf16 --model-preset tiny-moe --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
    config = flags.parse([*TINY, *mixture.split(), *words.split(), "--cuda-graph-impl", "local"]).config
    found = [text for text in rules.problems(config, world_size) if "--cuda-graph-impl local" in text]
    assert len(found) == 1 and "the host reads how many tokens" in found[0]


PADDING = {"model.num_experts": 4, "model.moe_router_padding_for_quantization": True, "precision.fp8_format": "e4m3"}


@pytest.mark.parametrize(
    ("changes", "implementation", "text"),
    [
        (
            {
                "model.num_experts": 4,
                "model.moe_router_pre_softmax": True,
                "model.moe_router_score_function": "sigmoid",
            },
            "emulated",
            "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid",
        ),
        (PADDING, "emulated", "has no effect with --transformer-impl emulated"),
        (PADDING, "local", "has no effect with --transformer-impl local"),
        (
            PADDING | {"parallel.moe_expert_kernels": "triton"},
            "transformer_engine",
            "has no effect with --moe-expert-kernels triton on one expert-parallel rank: there is no dispatcher",
        ),
        (
            PADDING | {"parallel.moe_expert_kernels": "triton", "parallel.expert_model_parallel_size": 2},
            "transformer_engine",
            "only costs time with --moe-expert-kernels triton",
        ),
    ],
)
def test_settings_that_experts_do_not_read_are_noticed(changes: dict, implementation: str, text: str) -> None:
    assert any(
        text in warning
        for warning in rules.warnings(with_values(RunConfig(), changes), LAYER_BACKENDS[implementation], 1)
    )
    on_te = with_values(RunConfig(), PADDING | {"parallel.moe_expert_kernels": "te"})
    assert not any("--moe-router-padding" in warning for warning in rules.warnings(on_te, TRANSFORMER_ENGINE, 1))


def test_fp8_attention_says_what_it_costs() -> None:
    values = {"precision.fp8_dot_product_attention": True, "precision.fp8_format": "hybrid"}
    assert any(
        warning.startswith("--fp8-dot-product-attention may cost loss")
        for warning in rules.warnings(with_values(RunConfig(), values), TRANSFORMER_ENGINE, 1)
    )
