"""The settings that stand for muP, by its formulas, and what muP is refused with."""

from __future__ import annotations

import pytest

from megafp8.config import rules
from megafp8.config.flags import ParsedArgs, parse
from megafp8.config.layer_backends import EMULATED
from megafp8.config.mup import width_multiplier, without_mup
from megafp8.config.rules.optimizer import MUP_EXCLUDES

COMMON = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --position-embedding-type rope --vocab-size 255 "
    "--seq-length 128 --micro-batch-size 1 --global-batch-size 8 --train-iters 9 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --bf16"
)


def parsed(text: str) -> ParsedArgs:
    return parse(f"{COMMON} {text}".split())


def test_the_settings_follow_from_the_width() -> None:
    model = parsed("--use-mup --mup-base-hidden-size 64 --mup-base-head-dim 16 --mup-embedding-mult 3").config.model
    assert width_multiplier(model) == 4
    plain = without_mup(model)
    assert (plain.init_method_std, plain.embedding_init_method_std) == (0.02 / 2, 0.02)
    assert (plain.logits_scaling, plain.embedding_multiplier) == (4, 3)
    assert plain.softmax_scale == 4 / 32
    assert not plain.use_mup and without_mup(plain) is plain


def test_given_multipliers_replace_those_of_the_width() -> None:
    flags = "--use-mup --mup-base-hidden-size 64 --mup-output-mult 0.5 --mup-attn-scale-power 0.5"
    plain = without_mup(parsed(f"{flags} --embedding-init-method-std 0.1").config.model)
    assert plain.logits_scaling == 2 and plain.embedding_init_method_std == 0.1
    assert plain.softmax_scale == pytest.approx(32**-0.5)


def test_a_model_is_its_own_base_without_a_base() -> None:
    plain = without_mup(parsed("--use-mup").config.model)
    assert plain.logits_scaling == 1 and plain.init_method_std == 0.02 and plain.softmax_scale == 1 / 32


def test_flags_of_mup_alone_change_nothing() -> None:
    without = parsed("--mup-base-hidden-size 64").config
    assert width_multiplier(without.model) == 1 and without_mup(without.model) is without.model
    (warning,) = (text for text in rules.warnings(without, EMULATED, 1) if "mup" in text)
    assert "--mup-base-hidden-size 64" in warning and "--use-mup" in warning


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer muon", "--optimizer sgd", "--multi-latent-attention", "--num-experts 4", "--mtp-num-layers 1",
        "--softmax-scale 0.1", "--embedding-multiplier 2", "--logits-scaling 2",
    ],
)  # fmt: skip
def test_other_scalings_are_refused(flags: str) -> None:
    problems = rules.problems(parsed(f"--use-mup {flags}").config, 1)
    assert any(text.startswith(flags.split()[0]) and "not supported with --use-mup" in text for text in problems)
    assert len(MUP_EXCLUDES) == 8


def test_a_warmup_starts_below_the_rate_of_the_matrices() -> None:
    flags = "--lr-warmup-iters 2 --lr-warmup-init 5e-4"
    assert rules.problems(parsed(flags).config, 1) == []
    (problem,) = rules.problems(parsed(f"{flags} --use-mup --mup-base-hidden-size 64").config, 1)
    assert "--lr-warmup-init 0.0005 is above --lr / 4 (of matrices with --use-mup) = 0.00025" in problem
