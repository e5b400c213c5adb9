"""The translation into megatron-core's configuration: what it keeps, refuses and never produces."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass, replace
from typing import Any, Optional, get_type_hints

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from small_run import FOUR_LAYERS, PLAIN, VIRTUAL, small_config

from megafp8.config.layer_backends import EMULATED, LOCAL, TRANSFORMER_ENGINE, LayerBackend
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError
from megafp8.mcore import config as mcore_config
from megafp8.mcore.config import build_checked, build_ddp_config, build_optimizer_config, build_transformer_config
from megafp8.mcore.overrides import FIELDS_OF_0_19, WITHOUT_EFFECT, describe_type, override_refusal, parse_value
from megafp8.mcore.patches import is_installed


def transformer(config: RunConfig, implementation: LayerBackend = EMULATED) -> Any:
    return build_transformer_config(config, implementation, on_cuda=False)


def overridden(*entries: str, flags: str = "") -> RunConfig:
    return replace(small_config("llama", flags), overrides=entries)


# ---- requested values are kept
# ----------------------------------------------------------------------------------------


def test_model_settings_are_translated() -> None:
    config = transformer(small_config("llama"))
    assert (config.num_layers, config.hidden_size, config.num_attention_heads, config.num_query_groups) == (2, 64, 4, 2)
    assert config.normalization == "RMSNorm"
    assert config.gated_linear_unit
    assert config.activation_func is torch.nn.functional.silu
    assert config.qk_layernorm
    assert not config.add_bias_linear
    assert (config.attention_dropout, config.hidden_dropout) == (0.0, 0.0)

    config = transformer(small_config("gpt2", "--ffn-hidden-size 96 --norm-epsilon 1e-6 --kv-channels 8"))
    assert (config.normalization, config.layernorm_epsilon) == ("LayerNorm", 1e-6)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (96, 8, 4)
    assert config.add_bias_linear


def test_weights_are_made_in_fp8_except_with_fsdp2() -> None:
    """Its ranks keep rows in BF16, and gather codes of them."""
    flags = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
    for layout, is_made in (("--use-distributed-optimizer", True), ("--use-torch-fsdp2", False)):
        config = small_config("llama", f"{flags} {layout} --no-gradient-accumulation-fusion", 2)
        assert transformer(config, TRANSFORMER_ENGINE).fp8_param is is_made


def test_layout_settings_are_translated() -> None:
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    config = transformer(small_config("llama", f"{sizes} --sequence-parallel", 8))
    sizes = config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size
    assert sizes == (2, 2, 2)
    assert config.sequence_parallel
    assert config.virtual_pipeline_model_parallel_size is None


def test_layers_get_the_exchange_of_documents() -> None:
    for documents, exchange in (("", "p2p"), ("--reset-attention-mask", "a2a")):
        config = small_config("llama", f"{PLAIN} {documents}")
        assert mcore_config.parallel_fields(config)["cp_comm_type"] == exchange


@pytest.mark.parametrize(
    ("flags", "dtype"), [("", torch.float32), ("--bf16", torch.bfloat16), ("--fp16", torch.float16)]
)
def test_dtype_settings_are_translated(flags: str, dtype: torch.dtype) -> None:
    config = small_config("llama", flags)
    built, optimizer = transformer(config), build_optimizer_config(config, EMULATED)
    assert built.params_dtype == built.pipeline_dtype == optimizer.params_dtype == dtype
    assert (built.bf16, built.fp16) == (optimizer.bf16, optimizer.fp16) == ("bf16" in flags, "fp16" in flags)


@pytest.mark.parametrize(("flags", "is_fp32"), [("", True), ("--bf16", True), ("--bf16 --grad-reduce-in-bf16", False)])
def test_gradient_reduction_settings_are_translated(flags: str, is_fp32: bool) -> None:
    assert build_ddp_config(small_config("llama", flags)).grad_reduce_in_fp32 is is_fp32


def test_optimizer_settings_are_translated() -> None:
    config = build_optimizer_config(small_config("llama", "--clip-grad 0.5 --adam-eps 1e-6 --adam-beta1 0.8"), LOCAL)
    assert (config.lr, config.weight_decay, config.clip_grad) == (1e-3, 0.1, 0.5)
    assert (config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.8, 0.95, 1e-6)


@pytest.mark.parametrize(
    ("style", "flags", "is_fused"),
    [
        ("gpt2", "", True),
        ("gpt2", "--disable-bias-linear", False),
        ("gpt2", "--squared-relu", False),
        ("llama", "", True),
        ("llama", "--no-bias-swiglu-fusion", False),
    ],
)
def test_every_activation_is_accepted_on_a_gpu(style: str, flags: str, is_fused: bool) -> None:
    config = build_transformer_config(small_config(style, flags), EMULATED, on_cuda=True)
    assert config.bias_activation_fusion == is_fused


def test_emulated_layers_quantize_by_themselves() -> None:
    """megatron-core would look for Transformer Engine if it knew."""
    config = small_config("llama", "--fp8-format hybrid --fp8-recipe tensorwise")
    assert transformer(config).fp8 is None


def test_gelu_is_the_same_function_with_and_without_its_kernel() -> None:
    """The fused kernel is the tanh form. Without it, on a CPU, the unfused function must have that form too."""
    x = torch.linspace(-4, 4, 101)
    tanh, erf = torch.nn.functional.gelu(x, approximate="tanh"), torch.nn.functional.gelu(x)
    assert not torch.equal(tanh, erf)
    assert torch.equal(transformer(small_config("gpt2")).activation_func(x), tanh)
    assert torch.equal(transformer(small_config("gpt2", "--no-bias-gelu-fusion")).activation_func(x), erf)


# ---- what megatron-core would do wrong without an error -------------------------------------------------------------


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_no_flags_enable_a_wrong_pipeline(style: str) -> None:
    """Two interleaved stages never batch their messages, and buffers of pending sends are never freed."""
    splits = ("", "--num-virtual-stages-per-pipeline-rank 2", "--num-layers-per-virtual-pipeline-stage 1")
    overlaps = ("", "--no-overlap-p2p-communication")
    for split, overlap, stages in itertools.product(splits, overlaps, (1, 2, 4)):
        if stages == 1 and split or stages == 4 and "virtual" in split:
            continue
        flags = f"{FOUR_LAYERS} --pipeline-model-parallel-size {stages} {split} {overlap}"
        config = transformer(small_config(style, flags, stages))
        is_interleaved = config.virtual_pipeline_model_parallel_size is not None
        assert not (is_interleaved and stages == 2 and config.batch_p2p_comm), (split, overlap)
        assert not (config.overlap_p2p_comm and config.deallocate_pipeline_outputs), (split, overlap)
        assert config.overlap_p2p_comm == (is_interleaved and not overlap), "asked for, and not turned off"
        assert config.calculate_per_token_loss
        assert config.perform_initialization


@pytest.mark.parametrize(
    ("flags", "entry", "reason"),
    [
        ("--no-overlap-p2p-communication", "transformer.batch_p2p_comm=true", "mixed up"),
        ("", "transformer.deallocate_pipeline_outputs=true", "freed while being sent"),
        ("", "transformer.perform_initialization=false", "gradient norm is wrong"),
        (
            "--cuda-graph-impl local --use-distributed-optimizer --no-overlap-p2p-communication",
            "transformer.batch_p2p_sync=true",
            "cannot wait",
        ),
    ],
)
def test_overrides_that_enable_it_are_refused(flags: str, entry: str, reason: str) -> None:
    config = small_config("llama", f"{VIRTUAL} {flags}", 2)
    transformer(config)
    with pytest.raises(ConfigError, match=reason):
        transformer(replace(config, overrides=(entry,)))


# ---- what megatron-core changes by itself ---------------------------------------------------------------------------


@dataclass
class Edits:
    """A configuration that changes its arguments, as some of megatron-core's do."""

    kept: int = 0
    lowered: int = 0
    derived: Optional[int] = None

    def __post_init__(self) -> None:
        self.lowered = min(self.lowered, 1)
        self.derived = self.derived or 3
        if self.kept < 0:
            raise ValueError("kept must not be negative")


def test_a_changed_value_is_an_error() -> None:
    assert mcore_config.build_checked(Edits, {"kept": 5, "lowered": 1, "derived": None}).derived == 3
    with pytest.raises(ConfigError, match="Edits changed lowered from 2 to 1"):
        mcore_config.build_checked(Edits, {"kept": 5, "lowered": 2})
    with pytest.raises(ConfigError, match="Edits refuses the configuration: kept must not be negative"):
        mcore_config.build_checked(Edits, {"kept": -1})


def test_errors_of_megatron_core_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="TransformerConfig refuses"):
        transformer(overridden("transformer.cpu_offloading=true", "transformer.cpu_offloading_num_layers=-1"))


# ---- overrides ------------------------------------------------------------------------------------------------------


def test_overrides_reach_each_section() -> None:
    config = overridden(
        "transformer.fp32_residual_connection=true", "ddp.pad_buckets_for_high_nccl_busbw=true",
        "optimizer.decoupled_weight_decay=false", "optimizer.apply_wd_to_qk_layernorm=true",
    )  # fmt: skip
    assert transformer(config).fp32_residual_connection is True
    assert build_ddp_config(config).pad_buckets_for_high_nccl_busbw is True
    assert build_optimizer_config(config, LOCAL).apply_wd_to_qk_layernorm is True
    assert build_optimizer_config(config, LOCAL).decoupled_weight_decay is False


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("transformer.num_layers=3", "--num-layers"),
        ("transformer.fp8=e4m3", "--fp8-format"),
        ("transformer.layernorm_epsilon=1e-6", "--norm-epsilon"),
        ("transformer.params_dtype=bf16", "--bf16"),
        ("transformer.num_moe_experts=4", "set by --num-experts"),
        ("transformer.mtp_num_layers=1", "set by --mtp-num-layers"),
        ("transformer.moe_router_topk=1", "set by --moe-router-topk"),
    ],
)
def test_fields_of_flags_cannot_be_overridden(entry: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        transformer(overridden(entry))


def test_every_translated_field_has_an_owner() -> None:
    """Or is an internal field of megatron-core that `unsafe_override_problems` checks."""
    ours = {
        "pipeline_dtype", "init_method", "output_layer_init_method", "embedding_init_method", "perform_initialization",
        "batch_p2p_comm", "batch_p2p_sync", "deallocate_pipeline_outputs", "use_cpu_initialization",
        "calculate_per_token_loss",
    }  # fmt: skip
    config = small_config("llama")
    filled = {
        *mcore_config.shape_fields(config), *mcore_config.parallel_fields(config),
        *mcore_config.precision_fields(config, EMULATED), *mcore_config.kernel_fields(config, EMULATED, False),
    }  # fmt: skip
    assert {field for field in filled if override_refusal(field) is None} <= ours


def test_all_wrong_overrides_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        transformer(overridden("transformer.no_such_field=1", "transformer.mamba_state_dim=wide", "ddp.nothing=1"))
    assert len(caught.value.problems) == 2, "ddp is another section"
    assert "has no field no_such_field" in caught.value.problems[0]
    assert "transformer.mamba_state_dim=wide: 'wide' is not of type" in caught.value.problems[1]
    with pytest.raises(ConfigError, match="DistributedDataParallelConfig has no field nothing"):
        build_ddp_config(overridden("ddp.nothing=1"))


def test_fields_that_megafp8s_own_step_ignores_are_refused() -> None:
    reasons = "megafp8's optimizer step|megatron-core's schedule|the fused grouped MLP"
    for field in WITHOUT_EFFECT:
        with pytest.raises(ConfigError, match=f"{field}: ({reasons})"):
            build_optimizer_config(overridden(f"optimizer.{field}=1"), LOCAL)
    with pytest.raises(ConfigError, match="delay_wgrad_compute: megatron-core's schedule"):
        transformer(overridden("transformer.delay_wgrad_compute=true"))
    with pytest.raises(ConfigError, match=r"moe_mlp_glu_interleave_size: the fused grouped MLP of megatron-core 0\.19"):
        transformer(overridden("transformer.moe_mlp_glu_interleave_size=32"))


def test_fields_of_a_newer_megatron_core_are_named() -> None:
    sections = mcore_config.OVERRIDABLE_CONFIGS.values()
    found = {name for kind in sections for name in get_type_hints(kind)} & FIELDS_OF_0_19
    assert found == (set() if is_installed("<0.19") else FIELDS_OF_0_19)
    if is_installed("<0.19"):
        problems = mcore_config.override_problems(overridden(*(f"ddp.{field}=1" for field in FIELDS_OF_0_19)))
        reasons = r"in megatron-core 0\.19, and 0\.16\.1 is|feature of newer versions of megatron-core|is set by --"
        assert len(problems) == len(FIELDS_OF_0_19)
        assert all(re.search(reasons, problem) for problem in problems)


def test_weights_in_nvfp4_are_of_megatron_core_0_19() -> None:
    """Blackwell's: what is built without the hardware."""
    words = ["transformer.fp4_param=True", "ddp.fp4_param_gather=True"]
    flags = "--fp4-format e2m1 --use-distributed-optimizer"
    if is_installed("<0.19"):
        with pytest.raises(ConfigError, match=r"\.fp4_param=True: .* in megatron-core 0\.19, and 0\.16\.1 is"):
            transformer(overridden(words[0], flags=flags), TRANSFORMER_ENGINE)
        with pytest.raises(ConfigError, match=r"no field fp4_param_gather: .* in megatron-core 0\.19, and 0\.16\.1 is"):
            build_ddp_config(overridden(words[1], flags=flags))
        return
    config = overridden(*words, flags=flags)
    assert transformer(config, TRANSFORMER_ENGINE).fp4_param and build_ddp_config(config).fp4_param_gather
    partly = [overridden(word, flags=flags) for word in words] + [overridden(*words, flags="--fp4-format e2m1")]
    for config in partly:
        with pytest.raises(ConfigError, match=r"ddp\.fp4_param_gather=True --use-distributed-optimizer$"):
            transformer(config, TRANSFORMER_ENGINE)


def test_the_language_model_head_in_mxfp8_is_of_megatron_core_0_19() -> None:
    """Blackwell's: what is built without the hardware."""
    config = overridden("transformer.fp8_output_proj=True", flags="--fp8-format e4m3 --fp8-recipe mxfp8")
    if is_installed("<0.19"):
        with pytest.raises(ConfigError, match=r"no field fp8_output_proj: .* in megatron-core 0\.19, and 0\.16\.1 is"):
            transformer(config, TRANSFORMER_ENGINE)
        return
    assert transformer(config, TRANSFORMER_ENGINE).fp8_output_proj
    with pytest.raises(ConfigError, match="fp8_output_proj must be used together with fp8 mode"):
        transformer(config, EMULATED)


def test_activation_offloading() -> None:
    text = "--fine-grained-activation-offloading --offload-modules [core_attn attn_proj]"
    built = transformer(small_config("llama", text), TRANSFORMER_ENGINE)
    assert (built.fine_grained_activation_offloading, built.offload_modules) == (True, ["core_attn", "attn_proj"])
    assert built.min_offloaded_tensor_size == 1 << 20
    with pytest.raises(ConfigError, match="is set by --fine-grained-activation-offloading: give that"):
        transformer(overridden("transformer.fine_grained_activation_offloading=True"))


def test_a_refusal_without_a_message_shows_the_assertion() -> None:
    with pytest.raises(ConfigError, match="refuses the configuration: AssertionError in 'assert self.offload_modules"):
        fields = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
        build_checked(TransformerConfig, fields | {"fine_grained_activation_offloading": True})


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("hidden_size", "64", 64),
        ("init_method_std", "1", 1.0),
        ("moe_z_loss_coeff", "1", 1.0),
        ("moe_z_loss_coeff", "none", None),
        ("bias_dropout_fusion", "TRUE", True),
        ("normalization", "RMSNorm", "RMSNorm"),
        ("recompute_modules", "['mlp', 'core_attn']", ["mlp", "core_attn"]),
        ("window_size", "(3, 0)", (3, 0)),
        ("window_size", "[3, 0]", (3, 0)),
        ("params_dtype", "bf16", torch.bfloat16),
        ("cp_comm_type", "p2p", "p2p"),
        ("cp_comm_type", "['p2p', 'a2a']", ["p2p", "a2a"]),
    ],
)
def test_texts_become_values_of_the_fields_type(field: str, text: str, value: Any) -> None:
    found = parse_value(text, transformer_types()[field])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("hidden_size", "64.0"),
        ("hidden_size", "true"),
        ("hidden_size", "none"),
        ("init_method_std", "small"),
        ("bias_dropout_fusion", "1"),
        ("bias_dropout_fusion", ""),
        ("normalization", "Norm"),
        ("recompute_modules", "mlp"),
        ("recompute_modules", "[1]"),
        ("window_size", "(3, 0, 1)"),
        ("params_dtype", "float32"),
        ("params_dtype", "[]"),
        ("attention_backend", "fast"),
        ("attention_backend", "[]"),
        ("activation_func", "relu"),
    ],
)
def test_texts_of_another_type_are_refused(field: str, text: str) -> None:
    with pytest.raises(ValueError, match="is not of type"):
        parse_value(text, transformer_types()[field])


def test_an_enumeration_is_named() -> None:
    wanted = transformer_types()["attention_backend"]
    assert parse_value("flash", wanted) is wanted["flash"]
    assert describe_type(wanted).startswith("AttnBackend (flash, fused")


def transformer_types() -> dict[str, Any]:
    kind = type(transformer(small_config("llama", PLAIN)))
    return {field.name: field.type for field in dataclasses.fields(kind)}
