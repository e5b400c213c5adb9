"""Flags and rules of --optimizer muon."""

from __future__ import annotations

import pytest

from megafp8.config import rules
from megafp8.config.flags import ParsedArgs, parse
from megafp8.config.layer_backends import EMULATED
from megafp8.config.optimizers import has_flat_shards, is_layer_wise, updates_matrices
from megafp8.config.rules import warnings

COMMON = (
    "--model-preset tiny --vocab-size 255 --seq-length 128 --micro-batch-size 1 --global-batch-size 8 --train-iters 9 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --bf16"
)


def parsed(text: str) -> ParsedArgs:
    return parse(f"{COMMON} {text}".split())


def test_flags_have_megatron_lms_meaning_and_defaults() -> None:
    optimizer = parsed("--optimizer muon").config.optimizer
    assert (optimizer.muon_momentum, optimizer.muon_nesterov, optimizer.muon_split_qkv) == (0.9, False, True)
    assert (optimizer.muon_scale_mode, optimizer.muon_num_ns_steps, optimizer.muon_tp_mode) == (
        "spectral", 5, "duplicated",
    )  # fmt: skip
    changed = parsed("--optimizer muon --muon-nesterov --muon-no-split-qkv --muon-extra-scale-factor 0.2").config
    assert changed.optimizer.muon_nesterov and not changed.optimizer.muon_split_qkv
    assert parsed("--optimizer muon --muon-use-nesterov").config.optimizer.muon_nesterov, "of older versions"


def test_state_is_shared_by_complete_weights() -> None:
    alone, shared = parsed("--optimizer muon").config, parsed("--optimizer muon --use-distributed-optimizer").config
    adam = parsed("--use-distributed-optimizer").config
    assert [updates_matrices(config.optimizer) for config in (alone, shared, adam)] == [True, True, False]
    sections = [(config.optimizer, config.parallel) for config in (alone, shared, adam)]
    assert [is_layer_wise(*each) for each in sections] == [False, True, False]
    assert [has_flat_shards(*each) for each in sections] == [False, False, True]
    assert rules.setting_problems(shared, 2) == []
    fp8_weights = "--optimizer muon --use-distributed-optimizer --fp8-format hybrid --fp8-param-gather"
    assert rules.setting_problems(parsed(fp8_weights).config, 2) == []


def test_dist_muon_is_muon_with_shared_state() -> None:
    parsed_args = parsed("--optimizer dist_muon")
    assert is_layer_wise(parsed_args.config.optimizer, parsed_args.config.parallel)
    assert parsed_args.warnings == (
        "--optimizer dist_muon is read as --optimizer muon --use-distributed-optimizer",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--muon-use-syrk", "it only affects the speed of Muon"),
        ("--no-use-layer-wise-param-layout", "it only places gradients in memory"),
    ],
)
def test_flags_of_speed_change_nothing(flags: str, text: str) -> None:
    (warning,) = parsed(f"--optimizer muon {flags}").warnings
    assert text in warning


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--muon-scalar-optimizer lion", "weights that Muon does not train are AdamW's"),
        ("--muon-fp32-matmul-prec low", "torch has no such precision"),
        ("--use-torch-fsdp2", "ranks have rows of a matrix"),
        ("--fp8-format hybrid --fp8-param-gather --no-use-distributed-optimizer", "needs --use-distributed-optimizer"),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "are sent by their owners"),
        ("--use-precision-aware-optimizer --use-distributed-optimizer", "supports only --optimizer adam, not muon"),
        ("--muon-coefficient-type aol", "needs a multiple of 4 steps"),
        ("--muon-momentum 1", "--muon-momentum 1.0 must be"),
        ("--muon-extra-scale-factor 0", "--muon-extra-scale-factor 0.0 must be"),
    ],
)
def test_what_cannot_be_done_is_refused(flags: str, text: str) -> None:
    problems = rules.setting_problems(parsed(f"--optimizer muon {flags}").config, 2)
    assert [problem for problem in problems if text in problem], problems


def test_settings_of_muon_have_no_effect_on_adam() -> None:
    config = parsed("--muon-momentum 0.95 --muon-no-split-qkv --muon-tp-mode distributed").config
    assert rules.setting_problems(config, 1) == []
    found = [each for each in warnings(config, EMULATED, 1) if "without --optimizer muon" in each]
    assert len(found) == 3 and found[0].startswith("--muon-momentum 0.95 has no effect")
