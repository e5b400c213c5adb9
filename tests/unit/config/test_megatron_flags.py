"""Every flag of Megatron-LM's GPT scripts is known: a setting, replaced, accepted with a notice, or refused."""

import re

import pytest

from megafp8.config import megatron_flags
from megafp8.config.flags import build_parser, parse
from megafp8.config.megatron_flags import _ACCEPTED_GROUPS, _HARMLESS_VALUES, _OVERRIDABLE, _REFUSED_GROUPS, REPLACED
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


def _flags(groups):
    return [flag for group in groups for flag in group[0].split()]


def test_no_flag_has_two_places():
    places = [*_flags(_ACCEPTED_GROUPS), *_flags(_REFUSED_GROUPS), *_OVERRIDABLE, *REPLACED]
    assert len(places) == len(set(places)), sorted(flag for flag in places if places.count(flag) > 1)
    assert not OURS & set(places)
    assert not [flag for flag in OURS if megatron_flags.refusal_reason(flag)]
    assert not [flag for flag in _flags(_ACCEPTED_GROUPS) if megatron_flags.refusal_reason(flag)]


def test_refused_flags_give_a_reason_and_name_flags_that_exist():
    not_ours = {"--max-restarts"}
    for flag in [*_flags(_REFUSED_GROUPS), *_OVERRIDABLE]:
        verdict = megatron_flags.classify(flag, ())
        assert not verdict.accepted
        assert verdict.text.startswith(f"{flag}: ")
        reason = verdict.text.removeprefix(f"{flag}: ")
        for named in re.findall(r"--[a-z0-9][a-z0-9_-]*", reason):
            assert named in OURS | not_ours, f"{named} in: {verdict.text}"


def test_harmless_values_belong_to_refused_flags():
    for flag, values in _HARMLESS_VALUES.items():
        assert megatron_flags.refusal_reason(flag), flag
        for value in values:
            assert megatron_flags.classify(flag, [value]).accepted
        assert not megatron_flags.classify(flag, ["another"]).accepted


def test_accepted_flags_are_accepted_with_a_notice_and_check_their_arity():
    for flags, arity, _ in _ACCEPTED_GROUPS:
        for flag in flags.split():
            assert megatron_flags.classify(flag, ["1"] * arity).accepted
            assert not megatron_flags.classify(flag, ["1"] * (arity + 1)).accepted


def test_replaced_flags_are_read_as_their_replacements():
    invocation = parse(["--use-rotary-position-embeddings", "--encoder-num-layers", "4", "--fp8-hybrid"])
    assert invocation.config.model.position_embedding_type == "rope"
    assert invocation.config.model.num_layers == 4
    assert invocation.config.precision.fp8_format == "hybrid"
    assert len(invocation.notices) == 3
    assert {"model.num_layers", "precision.fp8_format"} <= invocation.given


def test_overridable_fields_are_megatron_cores():
    config_module = pytest.importorskip("megatron.core.transformer.transformer_config")
    ddp_module = pytest.importorskip("megatron.core.distributed.distributed_data_parallel_config")
    classes = {
        "transformer": config_module.TransformerConfig,
        "ddp": ddp_module.DistributedDataParallelConfig,
    }
    for target in _OVERRIDABLE.values():
        section, field = target.split("=")[0].split(".")
        assert field in classes[section].__dataclass_fields__, target


def test_a_refused_flag_consumes_its_values():
    with pytest.raises(ConfigError) as caught:
        parse(["--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "--num-experts", "8", "--bogus", "1"])
    assert len(caught.value.problems) == 3
    assert "dense models only" in caught.value.problems[0]
    assert "unknown flag --bogus" in caught.value.problems[2]


def test_flags_without_effect_are_named_in_the_notices():
    invocation = parse(["--use-mcore-models", "--timing-log-level", "0", "--expert-model-parallel-size", "1"])
    assert len(invocation.notices) == 3
    assert all(notice.startswith("--") for notice in invocation.notices)


def test_every_setting_keeps_a_spelling():
    for setting in settings_by_name().values():
        assert setting.flags or setting.off, setting.name
