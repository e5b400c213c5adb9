"""Settings to and from config.json. Unsupported ones are refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_folders import FAMILY_MODELS as MODEL
from hf_folders import GPT2, LLAMA, MODELS, settings_of

from megafp8.checkpoint.convert.families import family_of_hf_config, family_of_model, gpt, llama
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.config import dimensions, flags, mixture
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[4]
LLAMA_FLAGS = "--model-preset tiny --vocab-size 128"
GPT2_FLAGS = "--model-preset tiny-gpt2 --vocab-size 128"


def config_of(text: str) -> RunConfig:
    return flags.parse_with_problems(f"{text} --seq-length 32".split())[0].config


def problems_of(fields: dict[str, Any]) -> list[str]:
    theirs = HFConfig(fields)
    family_of_hf_config(fields).from_hf_config(theirs)
    return theirs.problems


def test_mup_is_exported_as_the_multipliers_of_granite() -> None:
    flags_of_mup = "--use-mup --mup-base-hidden-size 32 --mup-base-head-dim 4 --mup-embedding-mult 3"
    config = config_of(f"{LLAMA_FLAGS} {flags_of_mup}")
    family, problems = family_of_model(config.model)
    assert problems == [] and family.model_type == "granite"
    fields, channels = family.to_hf_config(config.model, config.precision), dimensions.kv_channels(config.model)
    assert fields["embedding_multiplier"] == 3 and fields["attention_multiplier"] == 2 / channels
    assert fields["logits_scaling"] == config.model.hidden_size / 32
    assert any("--logits-scaling" in problem for problem in family_of_model(config.model, "llama")[1])


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_a_round_trip(preset: str) -> None:
    config = with_values(RunConfig(), PRESETS[preset])
    if config.model.max_position_embeddings is None:
        config = replace(config, model=replace(config.model, max_position_embeddings=2048))
    family, problems = family_of_model(config.model)
    others = {
        "gpt2": "gpt2", "qwen3-30b": "qwen3_moe", "qwen3": "qwen3", "olmoe": "olmoe", "moe": "mixtral",
        "mixtral": "mixtral", "v2-lite": "deepseek_v2", "v3": "deepseek_v3",
    }  # fmt: skip
    expected_type = next((family for part, family in others.items() if part in preset), "llama")
    assert problems == [] and family.model_type == expected_type
    theirs = HFConfig({"model_type": family.model_type} | family.to_hf_config(config.model, config.precision))
    back = with_values(RunConfig(), family.from_hf_config(theirs))
    assert theirs.problems == []
    expected = replace(config.model, vocab_size=None, moe_aux_loss_coeff=back.model.moe_aux_loss_coeff)
    if preset == "tiny-moe":  # no layer is dense
        expected = replace(expected, ffn_hidden_size=expected.moe_ffn_hidden_size)
    if expected.num_query_groups == 1:
        expected = replace(expected, group_query_attention=False)
    if expected.multi_latent_attention:
        expected = replace(expected, rope_type="yarn", yarn_original_max_position_embeddings=4096)
    if mixture.is_mixture(expected):
        has_experts = mixture.expert_layers(expected)
        frequency = "1" if all(has_experts) else str([int(each) for each in has_experts])
        balancing = back.model.moe_router_load_balancing_type
        expected = replace(
            expected, moe_layer_freq=frequency, moe_router_load_balancing_type=balancing,
            moe_z_loss_coeff=back.model.moe_z_loss_coeff,
        )  # fmt: skip
    assert back.model == expected


@pytest.mark.parametrize("name", MODELS)
def test_hf_fields_survive_a_round_trip(name: str) -> None:
    fields = MODELS[name]
    back = family_of_hf_config(fields).to_hf_config(settings_of(fields).model, settings_of(fields).precision)
    assert {field: back[field] for field in fields.keys() & back.keys()} == {
        field: value for field, value in fields.items() if field in back
    }


def test_rotary_settings_as_transformers_5_has_them() -> None:
    fields = LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}
    model = settings_of(fields).model
    assert (model.rotary_base, model.rotary_seq_len_interpolation_factor, model.use_rope_scaling) == (5000, 4, False)


@pytest.mark.parametrize(("name", "is_tanh"), [("gelu_new", True), ("gelu_pytorch_tanh", True), ("gelu", False)])
def test_gelu_variants(name: str, is_tanh: bool) -> None:
    config = settings_of(GPT2 | {"activation_function": name})
    assert config.precision.bias_gelu_fusion is is_tanh
    assert (gpt.GPT2.to_hf_config(config.model, config.precision)["activation_function"] == "gelu") is not is_tanh


def test_the_tanh_gelu_without_a_fused_bias() -> None:
    config = config_of(f"{GPT2_FLAGS} --openai-gelu --no-bias-gelu-fusion")
    assert gpt.GPT2.unsupported_features(config.model) == []
    assert gpt.GPT2.to_hf_config(config.model, config.precision)["activation_function"] == "gelu_new"


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--squared-relu", "--squared-relu"),
        ("--qk-layernorm", "--qk-layernorm"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p"),
        ("--window-size 8", "--window-size 8"),
        ("--rotary-interleaved", "--rotary-interleaved"),
        ("--rotary-percent 0.5", "--rotary-percent 0.5"),
        ("--add-qkv-bias", "--add-qkv-bias"),
        ("--normalization LayerNorm", "--normalization LayerNorm"),
        ("--num-experts 4 --moe-layer-freq [0]*1+[1]*1", "--num-experts 4: a Llama"),
        (
            "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            "--rotary-seq-len-interpolation-factor 2: a Llama",
        ),
    ],
)
def test_settings_without_a_llama_equivalent_are_refused(flag: str, named: str) -> None:
    assert llama.LLAMA.unsupported_features(config_of(LLAMA_FLAGS).model) == []
    (problem,) = llama.LLAMA.unsupported_features(config_of(f"{LLAMA_FLAGS} {flag}").model)
    assert problem.startswith(named)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--disable-bias-linear", "--disable-bias-linear"),
        ("--normalization RMSNorm", "--normalization RMSNorm"),
        ("--swiglu", "--swiglu"),
        ("--position-embedding-type rope", "--position-embedding-type rope"),
        ("--group-query-attention --num-query-groups 2", "--num-query-groups 2"),
        ("--kv-channels 64", "--kv-channels 64"),
    ],
)
def test_settings_without_a_gpt2_equivalent_are_refused(flag: str, named: str) -> None:
    assert gpt.GPT2.unsupported_features(config_of(GPT2_FLAGS).model) == []
    (problem,) = gpt.GPT2.unsupported_features(config_of(f"{GPT2_FLAGS} {flag}").model)
    assert problem.startswith(named)


QUICKSTART = re.search(r"^model=\((.*?)\)", (ROOT / "examples/quickstart.sh").read_text(encoding="utf-8"), re.M | re.S)


def test_the_model_of_the_quickstart_is_a_qwen3() -> None:
    assert QUICKSTART is not None
    family, problems = family_of_model(config_of(f"{QUICKSTART[1]} --vocab-size 4096").model)
    assert family.model_type == "qwen3" and problems == []


@pytest.mark.parametrize(
    ("flags_of_run", "expected"),
    [
        ("--add-qkv-bias", "qwen2"),
        ("--window-size 15,0", "mistral"),
        ("--no-rope-freq 2", "smollm3"),
        ("--norm-placement post --qk-layernorm --qk-layernorm-across-heads", "olmo2"),
        ("--residual-multiplier 0.5 --logits-scaling 4", "granite"),
        ("--rotary-percent 0.5", "phi3"),
        ("--num-experts 4", "mixtral"),
        ("--num-experts 4 --qk-layernorm", "qwen3_moe"),
        ("--num-experts 4 --qk-layernorm --moe-router-pre-softmax --moe-layer-freq 2", "qwen3_moe"),
        ("--num-experts 4 --qk-layernorm --qk-layernorm-across-heads", "olmoe"),
        ("--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --moe-input-jitter-eps 0.1", "mixtral"),
    ],
)
def test_a_run_is_of_the_family_that_has_its_features(flags_of_run: str, expected: str) -> None:
    family, problems = family_of_model(config_of(f"{LLAMA_FLAGS} {flags_of_run}").model)
    assert (family.model_type, problems) == (expected, [])


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--moe-router-score-function sigmoid", "--moe-router-score-function sigmoid: a Mixtral"),
        ("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type sinkhorn: a Mixtral"),
        ("--moe-router-topk-scaling-factor 2", "--moe-router-topk-scaling-factor 2: a Mixtral"),
        ("--moe-shared-expert-intermediate-size 64", "--moe-shared-expert-intermediate-size 64: a Mixtral"),
        ("--moe-layer-freq [0,1]", "--moe-layer-freq [0, 1]: a Mixtral"),
    ],
)
def test_mixtures_of_no_family_are_refused(flag: str, problem: str) -> None:
    found = family_of_model(config_of(f"{LLAMA_FLAGS} --num-experts 4 {flag}").model, "mixtral")[1]
    assert any(each.startswith(problem) for each in found), found


def test_layers_with_experts_are_the_last_of_each_group() -> None:
    fields = MODEL["qwen3_moe"]
    assert settings_of(fields).model.moe_layer_freq == "[0, 0, 0, 1, 0, 1]"
    assert settings_of(fields | {"decoder_sparse_step": 1, "mlp_only_layers": []}).model.moe_layer_freq == "1"


def test_scores_with_the_sum_1_are_those_of_a_later_softmax() -> None:
    for normalizes in (True, False):
        fields = MODEL["qwen3_moe"] | {"norm_topk_prob": normalizes}
        assert settings_of(fields).model.moe_router_pre_softmax is not normalizes


DEEPSEEK_V2, DEEPSEEK_V3 = MODEL["deepseek_v2"], MODEL["deepseek_v3"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (DEEPSEEK_V3 | {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, "rope_interleave is False"),
        (DEEPSEEK_V3 | {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (DEEPSEEK_V3 | {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": 3}, "first_k_dense_replace 3 leaves none of 3 layers"),
        (DEEPSEEK_V3 | {"topk_group": 1}, "topk_group 1 of n_group 4: transformers selects a group by its best 2"),
        (DEEPSEEK_V3 | {"n_shared_experts": 0}, "n_shared_experts is 0"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (
            DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            "its best 1, megatron-core by its best num_experts_per_tok / topk_group = 3 / 1",
        ),
        (
            DEEPSEEK_V2 | {"rope_scaling": DEEPSEEK_V2["rope_scaling"] | {"mscale_all_dim": 0.0}},
            "mscale is 0.707 and mscale_all_dim 0",
        ),
        (DEEPSEEK_V2 | {"rope_scaling": DEEPSEEK_V2["rope_scaling"] | {"truncate": False}}, "truncate is False"),
    ],
)  # fmt: skip
def test_deepseek_models_without_an_equivalent_are_refused(fields: dict[str, Any], named: str) -> None:
    assert any(named in problem for problem in problems_of(fields)), problems_of(fields)


def test_groups_of_experts_are_kept_where_both_libraries_select_them_equally() -> None:
    grouped = DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3}
    model = settings_of(grouped).model
    assert (model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_pre_softmax) == (4, 3, True)
    assert settings_of(DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1}).model.moe_router_num_groups is None


def test_another_family_may_be_chosen() -> None:
    config = config_of(LLAMA_FLAGS)
    assert (
        family_of_model(config.model, "mistral")[0].model_type == "mistral"
        and family_of_model(config.model, "mistral")[1] == []
    )
    assert family_of_model(config.model, "qwen3")[1] == ["no --qk-layernorm: a Qwen3ForCausalLM has --qk-layernorm"]
    with pytest.raises(CheckpointError, match="--model-type bert: the families are llama"):
        family_of_model(config.model, "bert")


def test_a_model_of_neither_family_is_refused_for_the_nearer_one() -> None:
    family, problems = family_of_model(
        config_of(f"{LLAMA_FLAGS} --qk-layernorm --window-size 8 --parallel-residual").model
    )
    assert family.model_type == "qwen3"
    assert problems == ["--parallel-residual: a Qwen3ForCausalLM has no --parallel-residual"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA | {"attention_bias": True}, "attention_bias True and mlp_bias False"),
        (LLAMA | {"num_key_value_heads": 3}, "8 heads cannot share 3"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: type is 'dynamic'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 1.5}}, "factor is 1.5"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA | {"rope_theta": 0.5}, "rope_theta is 0.5"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size is '64' and no number"),
        (LLAMA | {"hidden_size": -64}, "hidden_size is -64"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers is None"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        (LLAMA | {"rope_scaling": [2]}, "rope_scaling is [2] and no object"),
        (MODEL["qwen2"] | {"layer_types": ["full_attention"], "use_sliding_window": True}, "layer_types is ['full"),
        (MODEL["qwen3"] | {"attention_bias": True}, "attention_bias is True"),
        (MODEL["qwen3"] | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        (MODEL["qwen3"] | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        (MODEL["mistral"] | {"num_hidden_layers": 10**15, "rope_theta": "a"}, "rope_theta is 'a' and no number"),
        (MODEL["gemma2"] | {"hidden_size": 10**400}, "and no number"),
        (MODEL["mistral"] | {"sliding_window": 0}, "sliding_window is 0"),
        (MODEL["phi3"] | {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "type is 'longrope'"),
        (MODEL["smollm3"] | {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers is [1, 2, 1, 1]"),
        (MODEL["smollm3"] | {"use_sliding_window": True}, "use_sliding_window is True"),
        (MODEL["starcoder2"] | {"use_bias": False}, "use_bias is False"),
        (MODEL["starcoder2"] | {"embedding_dropout": 0.1}, "embedding_dropout is 0.1"),
        (MODEL["gpt_neox"] | {"attention_bias": False}, "attention_bias is False"),
        (MODEL["gpt_neox"] | {"num_attention_heads": 3}, "hidden_size 64 is not a multiple of 3"),
        (MODEL["gemma2"] | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        (MODEL["gemma2"] | {"query_pre_attn_scalar": 24.5}, "query_pre_attn_scalar is 24.5"),
        (MODEL["gemma3_text"] | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (MODEL["mixtral"] | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (MODEL["mixtral"] | {"num_local_experts": 0}, "num_local_experts is 0"),
        (MODEL["qwen3_moe"] | {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (MODEL["qwen3_moe"] | {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        (MODEL["qwen3_moe"] | {"mlp_only_layers": [1, 3, 5]}, "leave no layer with experts"),
        (MODEL["olmoe"] | {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (GPT2 | {"activation_function": "relu"}, "activation_function is 'relu'"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (GPT2 | {"embd_pdrop": 0.3}, "embd_pdrop is 0.3"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is True"),
    ],
)
def test_hf_settings_without_an_equivalent_are_refused(fields: dict[str, Any], named: str) -> None:
    assert any(named in problem for problem in problems_of(fields)), problems_of(fields)


def test_problems_are_reported_together() -> None:
    assert len(problems_of(LLAMA | {"hidden_act": "gelu", "attention_bias": True, "rope_theta": 0.5})) == 3


@pytest.mark.parametrize("fields", [{}, {"model_type": "bert"}, LLAMA | {"auto_map": {"AutoModel": "code.Model"}}])
def test_other_models_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="llama, .*gpt2 can be converted"):
        family_of_hf_config(fields)
