"""Settings in which a run may differ from the checkpoint that it continues: accepted and named, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import compatibility
from megafp8.checkpoint.compatibility import changed_settings, check_amax_history, check_model, check_schedule
from megafp8.config import flags
from megafp8.config.schema import RunConfig
from megafp8.config.settings import to_json
from megafp8.errors import CheckpointError

PATH = Path("iter_0000007")
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 255 --bf16 --micro-batch-size 1"
MIXTURE = (
    f"{MODEL} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
# Accepted settings of the model, with the name under which each is reported.
COEFFICIENTS = (
    ("--moe-aux-loss-coeff 2e-2", "model.moe_aux_loss_coeff"),
    ("--moe-z-loss-coeff 1e-3", "model.moe_z_loss_coeff"),
    ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3", "model.mtp_loss_scaling_factor"),
    ("--moe-router-bias-update-rate 0", "model.moe_router_bias_update_rate"),
    ("--moe-input-jitter-eps 0.01", "model.moe_input_jitter_eps"),
    ("--moe-router-load-balancing-type seq_aux_loss", "model.moe_router_load_balancing_type"),
    ("--moe-router-force-load-balancing", "model.moe_router_force_load_balancing"),
    ("--moe-router-dtype fp64", "model.moe_router_dtype"),
    ("--make-vocab-size-divisible-by 256", "model.make_vocab_size_divisible_by"),
)
# Settings of optimizer, data, gradients and training.
OTHERS = (
    ("--reset-attention-mask", "data.reset_attention_mask"),
    ("--eod-mask-loss", "data.eod_mask_loss"),
    ("--hidden-dropout 0.2", "model.hidden_dropout"),
    ("--attention-dropout 0.2", "model.attention_dropout"),
    ("--clip-grad 0.5", "optimizer.clip_grad"),
    ("--adam-beta1 0.8", "optimizer.adam_beta1"),
    ("--adam-beta2 0.9", "optimizer.adam_beta2"),
    ("--adam-eps 1e-3", "optimizer.adam_eps"),
    ("--muon-momentum 0.8", "optimizer.muon_momentum"),
    ("--muon-extra-scale-factor 0.2", "optimizer.muon_extra_scale_factor"),
    ("--muon-use-nesterov", "optimizer.muon_nesterov"),
    ("--muon-coefficient-type polar_express", "optimizer.muon_coefficient_type"),
    ("--grad-reduce-in-bf16", "precision.grad_reduce_in_bf16"),
    ("--exp-avg-dtype bf16", "optimizer.exp_avg_dtype"),
    ("--fp8-lm-level O1", "precision.fp8_lm_level"),
    ("--no-use-precision-aware-optimizer", "optimizer.use_precision_aware_optimizer"),
    ("--micro-batch-size 2", "training.micro_batch_size"),
    ("--override optimizer.clip_grad=2", "overrides"),
)
# A checkpoint of step 10 of 16 in samples.
CONSTANT = {
    "max_lr": 1e-3, "min_lr": 0.0, "lr_warmup_steps": 2, "lr_decay_steps": 16, "lr_decay_style": "constant",
    "init_lr": 0.0, "wsd_decay_steps": None, "lr_wsd_decay_style": "exponential", "start_wd": 0.1, "end_wd": 0.1,
    "wd_incr_steps": 16, "wd_incr_style": "constant", "num_steps": 10,
}  # fmt: skip
LONGER = {"lr_decay_steps": 32, "wd_incr_steps": 32}
WSD = CONSTANT | {"lr_decay_style": "WSD", "wsd_decay_steps": 6}


def config_of(text: str) -> RunConfig:
    """As parsed, without rules."""
    return flags.parse(text.split()).config


def named(
    before: str, now: str, monkeypatch: pytest.MonkeyPatch, weights_only: bool = False, world_size: int = 4
) -> tuple[str, ...]:
    """The checkpoint is of four ranks."""
    common = {"config": to_json(config_of(before)), "layout": [1, 2, 2]}
    monkeypatch.setattr(compatibility, "load_common_state", lambda path: common)
    return changed_settings(PATH, config_of(now), world_size, weights_only)


@pytest.mark.parametrize(("change", "name"), COEFFICIENTS, ids=lambda value: value.split()[0])
def test_a_coefficient_of_training_is_no_other_model(change: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = MIXTURE if "mtp" not in name else f"{MIXTURE} --mtp-num-layers 1"
    check_model(PATH, config_of(before), config_of(f"{before} {change}"))
    check_model(PATH, config_of(f"{before} {change}"), config_of(before))
    for weights_only in (False, True):
        (note,) = named(before, f"{before} {change}", monkeypatch, weights_only)
        assert f"differ from the checkpoint's: {name}: " in note and " -> " in note


@pytest.mark.parametrize(
    "change",
    [
        "--moe-router-score-function softmax", "--moe-router-topk 1", "--moe-router-topk-scaling-factor 2.5",
        "--moe-router-num-groups 2 --moe-router-group-topk 1", "--moe-router-pre-softmax", "--norm-epsilon 1e-6",
        "--rotary-base 5000", "--rotary-percent 0.5", "--moe-router-load-balancing-type sinkhorn",
    ],
)  # fmt: skip
def test_another_function_is_refused(change: str) -> None:
    with pytest.raises(CheckpointError, match="is a checkpoint of a different model"):
        check_model(PATH, config_of(MIXTURE), config_of(f"{MIXTURE} {change}"))


@pytest.mark.parametrize(("change", "name"), OTHERS, ids=lambda value: value.split()[0])
def test_a_change_of_what_a_run_learns_is_named(change: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = named(MODEL, f"{MODEL} {change}", monkeypatch)
    assert f"{name}: " in note
    is_of_the_model = name.startswith("model.")
    assert bool(named(MODEL, f"{MODEL} {change}", monkeypatch, weights_only=True)) == is_of_the_model


def test_all_changes_are_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = f"{MODEL} --clip-grad 0.5 --hidden-dropout 0.2 --num-query-groups 1 --ffn-hidden-size 256"
    assert named(MODEL, now, monkeypatch) == (
        "settings that differ from the checkpoint's: model.hidden_dropout: 0.1 -> 0.2; optimizer.clip_grad: 1.0 -> 0.5",
    )


@pytest.mark.parametrize(
    ("before", "now", "note"),
    [
        ("", "", "training.global_batch_size: 4 -> 8 (--global-batch-size 4 keeps it)"),
        ("--global-batch-size 8", "", ""),
        ("", "--global-batch-size 4", ""),
        ("--global-batch-size 4", "--global-batch-size 8", "training.global_batch_size: 4 -> 8"),
        ("", "--tensor-model-parallel-size 2", ""),
        ("--tensor-model-parallel-size 2", "", "training.global_batch_size: 2 -> 8 (--global-batch-size 2 keeps it)"),
    ],
)
def test_another_batch_of_other_ranks_is_named(
    before: str, now: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The global batch size of a run without the flag follows from its ranks."""
    before, now = f"{MODEL} {before}", f"{MODEL} {now}"
    line = (f"settings that differ from the checkpoint's: {note}",) if note else ()
    assert named(before, now, monkeypatch, world_size=8) == line
    assert named(before, now, monkeypatch, weights_only=True, world_size=8) == ()


def test_the_batch_of_a_conversion_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = MODEL.replace("--micro-batch-size 1", "")
    (note,) = named(before, MODEL, monkeypatch)
    assert "global_batch_size" not in note


@pytest.mark.parametrize(
    "change",
    [
        "", "--save elsewhere", "--log-interval 7", "--sequence-parallel", "--num-workers 7",
        "--exit-interval 4", "--fp8-format hybrid", "--init-method-std 0.5", "--eval-iters 3", "--num-threads 2",
    ],
)  # fmt: skip
def test_what_has_no_effect_or_a_check_of_its_own_is_not_named(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(MODEL, f"{MODEL} {change}", monkeypatch) == ()


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (CONSTANT, CONSTANT | LONGER),
        (CONSTANT, CONSTANT | {"lr_decay_steps": 12, "wd_incr_steps": 12}),
        (WSD, WSD | LONGER),
        (CONSTANT | {"lr_decay_style": "cosine"}, CONSTANT | {"lr_decay_style": "cosine", "wd_incr_steps": 32}),
    ],
    ids=["longer", "shorter", "before the decay", "the schedule's own length"],
)
def test_another_end_is_accepted_before_any_decay(saved: dict[str, Any], now: dict[str, Any]) -> None:
    changes = check_schedule(PATH, saved, now)
    assert changes.keys() == {name for name in saved if saved[name] != now[name]}
    assert all(f": 16 -> {now['wd_incr_steps']}" in text for text in changes.values())


@pytest.mark.parametrize(
    ("saved", "now", "number"),
    [
        (WSD | {"num_steps": 11}, LONGER, 1),
        (WSD | {"lr_decay_steps": 32}, {"lr_decay_steps": 15}, 1),
        (CONSTANT | {"lr_decay_style": "linear"}, LONGER, 1),
        (CONSTANT, LONGER | {"lr_decay_style": "WSD", "wsd_decay_steps": 6}, 3),
        (CONSTANT, LONGER | {"lr_warmup_steps": 4}, 1),
        (CONSTANT | {"wd_incr_style": "linear"}, LONGER, 1),
    ],
    ids=["in the decay", "in the new decay", "linear", "another style", "longer warmup", "weight decay grows"],
)
def test_a_change_of_rates_that_were_used_is_refused(saved: dict[str, Any], now: dict[str, Any], number: int) -> None:
    with pytest.raises(CheckpointError, match="a different learning-rate schedule") as caught:
        check_schedule(PATH, saved, saved | now)
    assert str(caught.value).count(" -> this run):") == 1 and str(caught.value).count("\n  ") == number


@pytest.mark.parametrize("recipe", ["--fp8-recipe delayed", "--fp8-recipe tensorwise --precision *linear_fc1=delayed"])
def test_histories_of_another_length_are_refused(recipe: str) -> None:
    """Also of a recipe that only the precision map names."""
    saved, now = (
        flags.parse(f"{MODEL} --fp8-format hybrid {recipe} --fp8-amax-history-len {length}".split()).config.precision
        for length in (4, 8)
    )
    check_amax_history(PATH, saved, saved)
    with pytest.raises(CheckpointError, match="length 4, but this run uses 8; use --fp8-amax-history-len 4"):
        check_amax_history(PATH, saved, now)
