"""What records of the experts' load show to be wrong, and the suggestions that a run can follow."""

from __future__ import annotations

import pytest
from load_records import MANY, records_of

from megafp8.config import flags, rules
from megafp8.metrics.expert_load import COLLAPSE, IDLE, ExpertRecord, load_warnings
from megafp8.metrics.health_suggestions import for_collapsed_router, more_balance
from megafp8.metrics.records import from_json, to_json
from megafp8.metrics.sinks.trackers import scalars


def faults(records: list[ExpertRecord], num_experts: int, topk: int = 1) -> list[tuple[str, str]]:
    return [(warning.layer, warning.kind) for warning in load_warnings(records, num_experts, topk)]


@pytest.mark.parametrize("num_remaining", [8 * MANY, 3 * MANY])
@pytest.mark.parametrize(
    ("counts", "expected"),
    [([8, 0, 0, 0], [("3", COLLAPSE)]), ([4, 3, 1, 0], [("3", IDLE)]), ([2, 2, 2, 2], [])],
)
def test_faults_that_last_are_found(counts: list[float], expected: list, num_remaining: int) -> None:
    many = [MANY * each for each in counts]
    records = records_of(many, many, num_remaining=num_remaining)
    assert not faults(records[:1], 4), "one record may show chance"
    assert faults(records, 4) == expected


def test_experts_are_idle_only_if_the_same_ones_are() -> None:
    first, second = [MANY, MANY, 0, 0, MANY], [0, MANY, MANY, 0, MANY]
    (warning,) = load_warnings(records_of(first, second), 5, 1)
    assert warning.what == "expert 3 of 5 has no tokens"
    assert not faults(records_of([MANY, 0, MANY], [0, MANY, MANY]), 3)


def test_a_few_idle_experts_are_named() -> None:
    counts = [MANY, 0, MANY, 0, 0, 0, 0, MANY]
    (warning,) = load_warnings(records_of(counts, counts), 8, 1)
    assert warning.what == "experts 1, 3, 4 and 2 more of 8 have no tokens"


@pytest.mark.parametrize(("mean", "is_found"), [(0.5, False), (8, False), (16, True)])
def test_experts_that_may_be_idle_by_chance_are_not_reported(mean: float, is_found: bool) -> None:
    """Of 128 experts with 8 tokens on average, any has none by chance in one of 30 steps; with 16, of 100,000."""
    counts = [2 * mean * (expert % 2) for expert in range(128)]
    assert bool(faults(records_of(counts, counts, topk=8), 128, 8)) is is_found


@pytest.mark.parametrize(
    ("counts", "is_collapse"),
    [
        ([4, 4, 0, 0, 0, 0, 0, 0], True),  # the busiest has half of the tokens' assignments
        ([4, 0, 3, 0, 1, 0, 0, 0], False),
        ([4, 1, 1, 1, 1, 0, 0, 0], False),  # one expert has all tokens, the others do not collapse
    ],
)
def test_a_router_collapses_to_as_many_experts_as_a_token_has(counts: list[float], is_collapse: bool) -> None:
    many = [MANY * each for each in counts]
    found = faults(records_of(many, many, topk=2), 8, 2)
    assert found == [("3", COLLAPSE if is_collapse else IDLE)]


def test_nearly_as_many_choices_as_experts_are_no_collapse() -> None:
    """Of 16 balanced experts, 15 have 94% of the assignments."""
    assert not faults(records_of([MANY] * 16, [MANY] * 16, topk=15), 16, 15)


def test_the_numbers_of_experts_are_no_scalars() -> None:
    (record,) = records_of([MANY, 0, 0])
    found = scalars(record)
    assert found["experts/topk_fraction/layer 3"] == 1.0 and found["experts/num_assignments/layer 3"] == MANY
    assert "experts/idle_experts/layer 3" not in found
    assert from_json(to_json(record)) == record


# --- suggestions ------------------------------------------------------------------------------------------------------

TINY = (
    "--model-preset tiny-moe --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --bf16 --moe-token-dispatcher-type alltoall"
)
COEFF, BIAS = "--moe-aux-loss-coeff", "--moe-router-enable-expert-bias"
SIGMOID = "--moe-router-score-function sigmoid"
NO_LOSS = "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("--moe-aux-loss-coeff 0.01", [f"{COEFF} 0.02"]),
        ("--moe-aux-loss-coeff 0", [f"{COEFF} 0.01"]),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01 0",
            [f"{COEFF} 0.02 0.01"],
        ),
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0", []),
        (NO_LOSS, ["--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"]),
        (f"--moe-aux-loss-coeff 0.01 {SIGMOID}", [f"{COEFF} 0.02", BIAS]),
        (f"--moe-aux-loss-coeff 0.01 {SIGMOID} {BIAS}", [f"{COEFF} 0.02"]),
        (
            f"--moe-aux-loss-coeff 0.01 {SIGMOID} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
            [f"{COEFF} 0.02"],
        ),
    ],
)
def test_the_suggestion_fits_the_run(extra: str, expected: list[str]) -> None:
    config = flags.parse(f"{TINY} {extra}".split()).config
    assert rules.setting_problems(config, 1) == []
    assert "; ".join(more_balance(config.model)) == "; ".join(expected)
    lower = "--lr 0.0005, half of the current value; --lr-warmup-iters 2"
    found = for_collapsed_router(config.model, config.optimizer, config.training)
    assert "; ".join(found) == "; ".join([*expected, lower])
