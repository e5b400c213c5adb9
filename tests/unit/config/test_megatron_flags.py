"""Every flag of Megatron-LM's GPT scripts is known: a setting, replaced, accepted with a warning, or refused."""

import re

import pytest

from megafp8.config import megatron_flags
from megafp8.config.flag_parser import build_parser
from megafp8.config.flags import parse, parse_with_problems
from megafp8.config.megatron_flags import REPLACED, tables
from megafp8.config.settings import settings_by_name
from megafp8.errors import ConfigError

# Flags of Megatron-LM's example training scripts and GPT functional tests (August 2026), FP8 flags first.
FLAGS_IN_USE = """
fp8-format fp8-recipe fp8-quantizer-factory fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo
no-fp8-wgrad disable-fp8-wgrad fp8-param-gather reuse-grad-buf-for-mxfp8-param-ag keep-fp8-transpose-cache
first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 te-precision-config-file
moe-router-padding-for-quantization moe-router-padding-for-fp8 fp4-format fp4-recipe fp4-quantizer-factory
fp4-param-gather use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 transformer-impl te-rng-tracker cuda-graph-impl
kitchen-config-file kitchen-recipe-number use-kitchen-attention kitchen-attention-backend fp8-output-proj
ckpt-drop-redundant-extra-state moe-dispatch-fwd-dtype moe-combine-bwd-dtype use-grouped-gemm-for-dense-mlp
megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype use-legacy-models
legacy-tokenizer no-async-tensor-model-parallel-allreduce no-scatter-gather-tensors-in-pipeline moe-extended-tp
moe-use-legacy-grouped-gemm tiktoken-special-tokens tokenizer-hf-use-fast tokenizer-hf-include-special-tokens
hybrid-attention-ratio hybrid-mlp-ratio hidden-size log-interval max-position-embeddings micro-batch-size
num-attention-heads eval-interval lr global-batch-size eval-iters min-lr lr-decay-style tensor-model-parallel-size
num-layers save-interval tensorboard-dir save data-path clip-grad weight-decay tokenizer-type seq-length split
tokenizer-model position-embedding-type adam-beta1 adam-beta2 load pipeline-model-parallel-size init-method-std bf16
use-distributed-optimizer disable-bias-linear normalization ffn-hidden-size group-query-attention num-query-groups
attention-dropout hidden-dropout untie-embeddings-and-output-weights rotary-base swiglu num-workers ckpt-format
train-iters lr-decay-iters rotary-percent train-samples dataloader-type exit-duration-in-mins lr-warmup-samples
log-num-zeros-in-grad log-params-norm lr-warmup-fraction lr-decay-samples eod-mask-loss pretrained-checkpoint
use-checkpoint-args no-masked-softmax-fusion distributed-timeout-minutes attention-softmax-in-fp32 overlap-grad-reduce
overlap-param-gather use-mcore-models attention-backend sequence-parallel context-parallel-size vocab-size
data-cache-path no-create-attention-mask-in-dataloader kv-channels wandb-exp-name wandb-project lr-warmup-iters
vocab-file auto-detect-ckpt-format calculate-per-token-loss log-throughput no-mmap-bin-files apply-layernorm-1p
moe-router-load-balancing-type moe-router-topk num-experts norm-epsilon moe-aux-loss-coeff moe-grouped-gemm
moe-token-dispatcher-type use-flash-attn tiktoken-pattern manual-gc fp16 cross-entropy-loss-fusion moe-ffn-hidden-size
moe-router-dtype make-vocab-size-divisible-by mock-data wandb-save-dir recompute-granularity
expert-model-parallel-size add-qkv-bias moe-permute-fusion profile profile-step-end profile-step-start
distributed-backend merge-file no-gradient-accumulation-fusion no-load-optim decoupled-lr empty-unused-memory-level
moe-shared-expert-intermediate-size decoupled-min-lr recompute-num-layers recompute-method
data-parallel-sharding-strategy use-megatron-fsdp moe-router-score-function fsdp-double-buffer
init-model-with-meta-device logging-level moe-router-enable-expert-bias moe-router-topk-scaling-factor
no-check-for-nan-in-loss-and-grad no-load-rng profile-ranks use-nccl-ub use-rope-scaling log-memory-to-tensorboard
log-timers-to-tensorboard timing-log-level deterministic-mode async-save use-persistent-ckpt-worker
use-checkpoint-opt_param-scheduler dist-ckpt-optim-fully-reshardable num-layers-per-virtual-pipeline-stage
exit-interval ckpt-fully-parallel-load seed finetune enable-cuda-graph optimizer tp-comm-overlap
"""


OURS = frozenset(build_parser()._option_string_actions)


@pytest.mark.parametrize("name", FLAGS_IN_USE.split())
def test_every_flag_in_use_has_a_place(name):
    flag = f"--{name}"
    assert flag in OURS or flag in REPLACED or megatron_flags.classify(flag, ()) is not None


def _flags(table):
    return [flag for entry in tables()[table] for flag in entry.flags]


def test_every_table_is_read():
    assert set(tables()) == {"accepted", "refused", "accepted_values", "unused_with", "unused_without"}
    for name, table in tables().items():
        for entry in table:
            assert entry.flags and all(flag.startswith("--") for flag in entry.flags), entry
            assert bool(entry.words) == (name != "refused") and bool(entry.reason) == ("unused" not in name), entry


def test_no_flag_has_two_places():
    listed = [*_flags("accepted"), *_flags("refused"), *REPLACED]
    assert len(listed) == len(set(listed)), sorted(flag for flag in listed if listed.count(flag) > 1)
    assert not OURS & set(listed)
    assert not [flag for flag in OURS if megatron_flags.refusal_reason(flag)]
    assert not [flag for flag in _flags("accepted") if megatron_flags.refusal_reason(flag)]


def test_refused_flags_give_a_reason_and_name_flags_that_exist():
    not_ours = {"--max-restarts"}
    for reason in (entry.reason for entry in tables()["refused"]):
        for named in re.findall(r"--[a-z0-9][a-z0-9_-]*", reason):
            assert named in OURS | not_ours, f"{named} in: {reason}"


def test_attention_that_is_not_there_is_named_once_and_nobody_told_to_remove_it():
    line = (
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4 "
        "--gdp-num-householder 3 --dsa-indexer-topk 64 --no-dsa-indexer-rotate-activation"
    )
    (problem,) = parse_with_problems(line.split())[1]
    flags, _, reason = problem.partition(": ")
    assert flags.split(", ") == [word for word in line.split() if word.startswith("--")]
    assert "sparse attention" in reason and "linear attention" in reason and "another model would be trained" in reason
    assert "remove" not in problem and "all earlier tokens" not in problem


def test_flags_that_are_refused_for_the_same_reason_are_one_problem_at_the_first():
    line = "--hybrid-layer-pattern M*M- --fim-data --unknown --mamba-num-heads 8 --fim-rate 0.5 --fim-data"
    other_model, fim, unknown = parse_with_problems(line.split())[1]
    assert other_model == "--hybrid-layer-pattern, --mamba-num-heads: " + megatron_flags.refusal_reason("--mamba-")
    assert fim.startswith("--fim-data, --fim-rate: samples are") and fim.endswith("; remove them")
    assert unknown.startswith("unknown flag --unknown")
    (alone,) = parse_with_problems(["--fim-data"])[1]
    assert alone.startswith("--fim-data: samples are") and alone.endswith("; remove it")


def test_reasons_that_flags_share_are_about_any_number_of_them():
    for entry in tables()["refused"]:
        is_shared = len(entry.flags) > 1 or "*" in entry.flags[0]
        assert not (is_shared and entry.reason.startswith("it ")), entry


def test_accepted_values_belong_to_refused_flags():
    mains = {main for entry in tables()["unused_without"] for main in entry.words}
    for entry in tables()["accepted_values"]:
        (flag,) = entry.flags
        assert megafp8_refuses(flag), flag
        for value in entry.words:
            assert megatron_flags.classify(flag, [value]).accepted
        assert not megatron_flags.classify(flag, ["another"], mains - {flag}).accepted


def megafp8_refuses(flag):
    return megatron_flags.refusal_reason(flag) is not None


def test_a_flag_is_unused_only_without_its_main_flag():
    for flag, value, main in (
        ("--moe-latent-size", "2", "--num-experts"),
        ("--moe-router-topk-limited-devices", "2", "--num-experts"),
        ("--mtp-use-repeated-layer", None, "--mtp-num-layers"),
        ("--no-flight-recorder-dump-on-timeout", None, "--flight-recorder-dump-path"),
        ("--data-parallel-sharding-strategy", "optim", "--use-megatron-fsdp"),
    ):
        words = [] if value is None else [value]
        warning = megatron_flags.classify(flag, words, {flag})
        assert warning.accepted and f"it only matters with {main}" in warning.text
        assert not megatron_flags.classify(flag, words, {flag, main}).accepted


def test_a_flag_may_be_unused_with_another():
    """Megatron-LM does not rearrange mock data either."""
    for flag, words in (("--fim-data", []), ("--fim-rate", ["0.5"]), ("--mid-level-dataset-surplus", ["0.01"])):
        warning = megatron_flags.classify(flag, words, {flag, "--fim-data", "--mock-data"})
        assert warning.accepted and warning.text.endswith("it does not matter with --mock-data")
        assert not megatron_flags.classify(flag, words, {flag, "--fim-data", "--data-path"}).accepted


def test_unused_flags_and_their_main_flags_have_places():
    for entry in tables()["unused_without"]:
        for main in entry.words:
            assert main in OURS or megafp8_refuses(main) or main in _flags("accepted"), main
        for flag in entry.flags:
            name = flag.replace("*", "x")
            assert megafp8_refuses(name), f"{name} would be accepted in any case, or is unknown"


def test_flags_for_inference_and_other_models_are_accepted():
    for flag in ("--inference-max-requests", "--dino-head-hidden-size", "--no-inference-wandb-logging"):
        assert megatron_flags.classify(flag, ["1"]).accepted


def test_accepted_flags_are_accepted_with_a_warning_and_check_their_arity():
    numbers = {"0": (0, 1), "1": (1, 2), "many": (2, 0)}
    for flags, (number,) in ((entry.flags, entry.words) for entry in tables()["accepted"]):
        if number == "any":
            continue
        for flag in flags:
            fitting, wrong = numbers[number]
            assert megatron_flags.classify(flag, ["1"] * fitting).accepted
            assert not megatron_flags.classify(flag, ["1"] * wrong).accepted


def test_replaced_flags_are_read_as_their_replacements():
    parsed = parse(["--use-rotary-position-embeddings", "--encoder-num-layers", "4", "--fp8-hybrid"])
    assert parsed.config.model.position_embedding_type == "rope"
    assert parsed.config.model.num_layers == 4
    assert parsed.config.precision.fp8_format == "hybrid"
    assert len(parsed.warnings) == 3
    assert {"model.num_layers", "precision.fp8_format"} <= parsed.given


@pytest.mark.parametrize(
    ("preset", "flag"), [("mixtral-8x7b", "--moe-latent-size"), ("deepseek-v2-lite", "--cache-mla-latents")]
)
def test_a_preset_gives_a_flag_its_effect(preset: str, flag: str):
    """So that it is refused, as without the preset; it is idle only in a model without experts or latent attention."""
    words = [flag, "64"] if flag == "--moe-latent-size" else [flag]
    (problem,) = parse_with_problems(["--model-preset", preset, *words])[1]
    assert problem.startswith(f"{flag}: ")
    (warning,) = parse(["--model-preset", "llama3-8b", *words]).warnings
    assert warning.startswith(f"{flag}: no effect; it only matters with --")


def test_a_flag_may_stand_for_several():
    parsed = parse(["--checkpoint-activations"])
    training = parsed.config.training
    assert (training.recompute_granularity, training.recompute_method, training.recompute_num_layers) == (
        "full", "uniform", 1,
    )  # fmt: skip
    assert len(parsed.warnings) == 1


def test_a_replaced_flag_may_override_others_wherever_they_stand():
    """As in Megatron-LM, which sets these fields after it has read the flags."""
    for words in (
        ["--enable-gpt-oss", "--position-embedding-type", "rope"],
        ["--position-embedding-type", "rope", "--enable-gpt-oss"],
    ):
        parsed, problems = parse_with_problems(words)
        model = parsed.config.model
        assert problems == []
        assert (model.position_embedding_type, model.rotary_scaling_factor) == ("yarn", 32)
        assert not model.yarn_correction_range_round_to_int
        assert any(warning.startswith("--position-embedding-type: no effect; ") for warning in parsed.warnings)
    model = parse_with_problems(["--qk-layernorm", "--export-qk-l2-norm"])[0].config.model
    assert (model.qk_l2_norm, model.qk_layernorm) == (True, False)
    assert parse_with_problems(["--qk-layernorm"])[0].config.model.qk_layernorm


def test_a_value_of_a_setting_may_be_read_as_another():
    parsed = parse(["--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn", "mlp"])
    assert parsed.config.training.cuda_graph_impl == "auto"
    assert parsed.warnings[0] == "--cuda-graph-impl transformer_engine is read as --cuda-graph-impl auto"
    assert parse(["--cuda-graph-impl", "none"]).config.training.cuda_graph_impl == "none"
    assert parse(["--cuda-graph-impl", "full_iteration"]).config.training.cuda_graph_impl == "local"
    decay = parse(["--no-weight-decay-cond-type", "apply_wd_to_qk_layernorm"])
    assert decay.config.overrides == ("optimizer.apply_wd_to_qk_layernorm=True",)
    with pytest.raises(ConfigError, match="--no-weight-decay-cond-type"):
        parse(["--no-weight-decay-cond-type", "another"])


def test_parts_of_a_cuda_graph_are_accepted_under_their_old_flag():
    for values in (["attn"], ["moe_router", "moe_preprocess"]):
        parsed = parse(["--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", *values])
        assert parsed.config.training.cuda_graph_scope == "full_iteration"
        assert parsed.warnings[1].startswith("--cuda-graph-modules: no effect; a CUDA graph holds all passes")
    assert parse(["--cuda-graph-scope", "full_iteration"]).warnings == ()
    with pytest.raises(ConfigError, match="--cuda-graph-scope: invalid choice"):
        parse(["--cuda-graph-scope", "attn", "another"])


def test_flags_of_megatron_cores_fields_become_overrides():
    assert parse(["--test-mode", "--disable-symmetric-registration"]).config.overrides == (
        "transformer.test_mode=True",
        "ddp.disable_symmetric_registration=True",
    )


def test_replacements_are_flags_and_fields_that_exist():
    config_module = pytest.importorskip("megatron.core.transformer.transformer_config")
    ddp_module = pytest.importorskip("megatron.core.distributed.distributed_data_parallel_config")
    optimizer_module = pytest.importorskip("megatron.core.optimizer.optimizer_config")
    classes = {
        "transformer": config_module.TransformerConfig,
        "ddp": ddp_module.DistributedDataParallelConfig,
        "optimizer": optimizer_module.OptimizerConfig,
    }
    for new in REPLACED.values():
        assert {word for word in new.split() if word.startswith("--")} <= OURS, new
        if new.startswith("--override "):
            section, field = new.removeprefix("--override ").split("=")[0].split(".")
            assert field in classes[section].__dataclass_fields__, new


def test_a_refused_flag_consumes_its_values():
    with pytest.raises(ConfigError) as caught:
        parse(["--use-megatron-fsdp", "--tokenizer-metadata", "8", "--bogus", "1"])
    assert len(caught.value.problems) == 3
    assert "--use-megatron-fsdp" in caught.value.problems[0]
    assert "unknown flag --bogus" in caught.value.problems[2]


def test_flags_without_effect_are_named_in_the_warnings():
    parsed = parse(["--use-mcore-models", "--timing-log-level", "0", "--wgrad-deferral-limit", "1"])
    assert len(parsed.warnings) == 3
    assert all(warning.startswith("--") for warning in parsed.warnings)


def test_every_setting_keeps_a_spelling():
    for setting in settings_by_name().values():
        assert setting.flags or setting.off, setting.name


@pytest.mark.parametrize("flag", ["--mask-eod", "--img-size", "--bert-layers"])
def test_a_flag_that_only_looks_like_one_of_megatron_lms_is_unknown(flag):
    with pytest.raises(ConfigError, match=f"unknown flag {flag}"):
        parse([flag, "1"])


@pytest.mark.parametrize("flag", ["--lion-beta1"])
def test_details_of_other_optimizers_change_nothing(flag):
    (warning,) = parse(["--optimizer", "adam", flag, "0.9"]).warnings
    assert warning.startswith(f"{flag}: no effect; it is for another optimizer")
