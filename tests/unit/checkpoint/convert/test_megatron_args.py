"""Megatron-LM's arguments as settings and back."""

from typing import Any

import pytest
import torch

from megafp8.checkpoint.convert.megatron_args import (
    OTHER_NAMES,
    PLAIN_MODEL,
    SAME_NAMES,
    args_of_settings,
    settings_of_args,
    unexpressed_settings,
)
from megafp8.config import attention_layers
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, with_values

SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def settings_of(**args: Any) -> dict[str, Any]:
    values, problems, left = settings_of_args(SHAPE | args)
    assert not problems and not left
    return values


def test_names_are_settings() -> None:
    names = {f"{section}.{field}" for section, fields in SAME_NAMES.items() for field in fields}
    assert names <= set(settings_by_name())


def test_arguments_with_another_name() -> None:
    values = settings_of(untie_embeddings_and_output_weights=True, fp8="hybrid", rotary_base=500000.0)
    assert values["model.share_embeddings_and_output_weights"] is False
    assert values["precision.fp8_format"] == "hybrid" and values["model.rotary_base"] == 500000


@pytest.mark.parametrize(
    ("args", "vocab_size"),
    [
        ({"vocab_size": 255, "tokenizer_type": "NullTokenizer", "padded_vocab_size": 256}, 255),
        ({"vocab_size": 256, "tokenizer_type": "NullTokenizer", "padded_vocab_size": 256}, 255),
        ({"vocab_size": 256, "tokenizer_type": "HuggingFaceTokenizer", "padded_vocab_size": 256}, 256),
    ],
)
def test_the_id_that_null_tokenizer_adds(args: dict[str, Any], vocab_size: int) -> None:
    assert settings_of(**args)["model.vocab_size"] == vocab_size


@pytest.mark.parametrize("name", sorted(PLAIN_MODEL))
def test_another_model_is_refused(name: str) -> None:
    _, problems, _ = settings_of_args(SHAPE | {name: "something"})
    assert problems == [f"--{name.replace('_', '-')} something: there is no such model here"]


@pytest.mark.parametrize("value", ["x", [1], torch.ones(2), 2.5])
def test_a_value_of_another_type_is_refused(value: Any) -> None:
    _, problems, _ = settings_of_args(SHAPE | {"num_layers": value})
    assert any("model.num_layers" in problem for problem in problems)


def test_other_arguments_are_named_if_they_are_set() -> None:
    _, problems, left = settings_of_args(SHAPE | {"b": 3, "a": True, "c": None, "d": False, "world_size": 8})
    assert not problems and left == ["a = True", "b = 3"]


def test_arguments_that_change_nothing_here_are_not_named() -> None:
    """Defaults of settings and of flags that have no effect, options of features that are off, and what is on."""
    args = {
        "timing_log_level": 0, "log_interval": 100, "num_workers": 2, "cp_comm_type": ["p2p"], "moe_router_topk": 2,
        "muon_momentum": 0.95, "inference_max_requests": 8, "rope_fusion": True, "one_logger": True,
        "ckpt_fully_parallel_save": True, "mscale": 1.0, "moe_layer_freq": 1,
    }  # fmt: skip
    assert settings_of_args(SHAPE | args)[2] == []
    args = {"num_workers": 4, "use_megatron_fsdp": True, "recompute_granularity": "selective", "head_lr_mult": 2.0}
    assert settings_of_args(SHAPE | args)[2] == [
        "head_lr_mult = 2.0", "num_workers = 4", "recompute_granularity = selective", "use_megatron_fsdp = True"
    ]  # fmt: skip


def test_the_gelu_and_the_data_are_those_of_the_run() -> None:
    """Without its fusion, Megatron-LM's GELU is exact and not the tanh approximation."""
    plain = {"add_bias_linear": True, "swiglu": False}
    assert settings_of(**plain, bias_gelu_fusion=False)["precision.bias_gelu_fusion"] is False
    assert "precision.bias_gelu_fusion" not in settings_of(**plain | {"swiglu": True}, bias_gelu_fusion=False)
    values = settings_of(
        rampup_batch_size=["4", "4", "100"], eod_mask_loss=True, reset_attention_mask=True, split="90,10,0",
        decoder_first_pipeline_num_layers=1,
    )  # fmt: skip
    assert values["training.rampup_batch_size"] == (4, 4, 100) and values["data.split"] == "90,10,0"
    assert values["data.eod_mask_loss"] and values["data.reset_attention_mask"]
    assert values["parallel.decoder_first_pipeline_num_layers"] == 1
    args = vars(args_of_settings(with_values(RunConfig(), values), {}))
    assert args["rampup_batch_size"] == [4, 4, 100] and args["bias_gelu_fusion"] is True
    plain = with_values(RunConfig(), {f"model.{name}": value for name, value in SHAPE.items()})
    assert vars(args_of_settings(plain, {}))["rampup_batch_size"] is None


def test_settings_survive_the_way_there_and_back() -> None:
    config = with_values(
        RunConfig(),
        {
            "model.num_layers": 3, "model.hidden_size": 64, "model.num_attention_heads": 4, "model.swiglu": True,
            "model.ffn_hidden_size": 96, "model.kv_channels": 16, "model.vocab_size": 100, "model.rotary_base": 500,
            "model.share_embeddings_and_output_weights": False, "optimizer.lr": 1e-3, "precision.bf16": True,
            "precision.fp8_format": "hybrid", "training.global_batch_size": 8, "data.seq_length": 32,
            "model.max_position_embeddings": 32, "precision.fp8_param_gather": True,
            "optimizer.use_precision_aware_optimizer": True,
            "optimizer.main_params_dtype": "fp16", "optimizer.exp_avg_dtype": "fp8",
            "optimizer.exp_avg_sq_dtype": "fp16",
        },
    )  # fmt: skip
    values, problems, left = settings_of_args(vars(args_of_settings(config, {"iteration": 5})))
    assert not problems and not left
    assert with_values(RunConfig(), values) == config


def test_dtypes_of_optimizer_state_are_those_of_torch() -> None:
    """They have no effect without the precision-aware optimizer, also in Megatron-LM."""
    dtypes = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16, "main_grads_dtype": torch.float32}
    values = settings_of(**dtypes, use_precision_aware_optimizer=True)
    assert (values["optimizer.exp_avg_dtype"], values["optimizer.exp_avg_sq_dtype"]) == ("fp8", "fp16")
    args = vars(args_of_settings(with_values(RunConfig(), values), {}))
    assert dtypes.items() <= args.items()
    assert not any(name.endswith("_dtype") for name in settings_of(**dtypes))
    _, problems, _ = settings_of_args(SHAPE | {"exp_avg_dtype": torch.int8, "use_precision_aware_optimizer": True})
    assert "exp_avg_dtype" in problems[0]


WINDOWS = {
    "model.num_layers": 4, "model.hidden_size": 64, "model.num_attention_heads": 4, "model.window_size": "9,0",
    "model.window_attn_skip_freq": "([1]+[0])*2", "model.position_embedding_type": "rope", "model.no_rope_freq": "2",
}  # fmt: skip


def test_windows_and_patterns_have_megatron_lms_types() -> None:
    config = with_values(RunConfig(), WINDOWS)
    assert unexpressed_settings(config.model) == []
    args = vars(args_of_settings(config, {}))
    assert (args["window_size"], args["window_attn_skip_freq"], args["no_rope_freq"]) == ((9, 0), [1, 0, 1, 0], 2)
    values, problems, left = settings_of_args(args)
    assert not problems and not left
    assert values["model.window_size"] == "9,0" and values["model.no_rope_freq"] == "2"
    assert attention_layers.windowed_layers(with_values(RunConfig(), values).model) == (True, False, True, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.geglu": True}, {"model.norm_placement": "post"}, {"model.parallel_residual": True},
        {"model.embedding_multiplier": 2.0}, {"model.residual_multiplier": 0.5}, {"model.logits_scaling": 2.0},
        {"model.softmax_scale": 0.1}, {"model.use_mup": True}, {"model.attention_logit_softcapping": 50.0},
        {"model.num_experts": 4}, {"model.openai_gelu": True, "model.add_bias_linear": False},
        {"model.position_embedding_type": "yarn"},
    ],
)  # fmt: skip
def test_a_model_that_megatron_lm_lacks_is_not_exported(changes: dict[str, Any]) -> None:
    (problem,) = unexpressed_settings(with_values(RunConfig(), changes).model)
    assert problem.startswith("--") and "not converted to Megatron-LM" in problem


def test_yarn_is_not_imported() -> None:
    assert "yarn" in settings_of_args(SHAPE | {"position_embedding_type": "yarn"})[1][0]


def test_names_of_the_model_are_settings() -> None:
    assert {f"model.{name}" for name in OTHER_NAMES} <= set(settings_by_name())
