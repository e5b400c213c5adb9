"""Rules about the router of mixture-of-experts layers: scores, groups, and the balance of the experts."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import mixture
from megafp8.config.rules.base import all_positive, no_effect_without
from megafp8.config.schema import ModelConfig, RunConfig


def experts_of_a_token_exist(config: RunConfig, world_size: int) -> Iterator[str]:
    """A token has at most as many experts as there are."""
    model = config.model
    experts = model.num_experts
    if mixture.is_mixture(model) and experts is not None and 0 < experts < model.moe_router_topk:
        yield (f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {experts}: use at most {experts}")


def one_expert_has_a_gradient(config: RunConfig, world_size: int) -> Iterator[str]:
    """A softmax over the single score of one selected expert is always 1, and the router would never learn."""
    model = config.model
    is_constant = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    is_sinkhorn = model.moe_router_load_balancing_type == ("sinkhorn",)
    if mixture.is_mixture(model) and model.moe_router_topk == 1 and is_constant and not is_sinkhorn:
        yield "--moe-router-topk 1 applies the softmax to one score, which is always 1: give --moe-router-pre-softmax"


def _divisors_beside(number: int, value: int) -> list[int]:
    """The divisors of a number, from 2 on, that are next to a value; the number itself if it is smaller."""
    divisors = [each for each in range(2, number + 1) if number % each == 0]
    below, above = [each for each in divisors if each < value], [each for each in divisors if each > value]
    return [*below[-1:], *above[:1]]


def expert_groups_divide(config: RunConfig, world_size: int) -> Iterator[str]:
    """Group-limited routing has equal groups, enough of them, and enough experts in the selected ones."""
    model = config.model
    groups, selected, experts, topk = (
        model.moe_router_num_groups, model.moe_router_group_topk, model.num_experts, model.moe_router_topk
    )  # fmt: skip
    if not mixture.is_mixture(model) or (groups is None and selected is None):
        return
    if groups is None or selected is None:
        yield "--moe-router-num-groups and --moe-router-group-topk are given together: give both or none"
        return
    if not all_positive(groups, selected, topk) or experts is None:
        return
    if experts % groups:
        yield (
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}: use "
            f"{' or '.join(map(str, _divisors_beside(experts, groups))) or 'no'} groups"
        )
    elif selected > groups:
        yield f"--moe-router-group-topk {selected} is more than --moe-router-num-groups {groups}: use at most {groups}"
    elif not selected <= topk <= selected * (experts // groups):
        yield (
            f"--moe-router-topk {topk} with --moe-router-group-topk {selected}: a token selects {topk} experts of "
            f"{selected} groups of {experts} / {groups} = {experts // groups}; use a --moe-router-topk from {selected} "
            f"to {selected * (experts // groups)}"
        )


def losses_have_coefficients(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every auxiliary loss has one coefficient; other kinds of load balancing have none and stand alone."""
    model = config.model
    types, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if not mixture.is_mixture(model):
        return
    shown = f"--moe-router-load-balancing-type {' '.join(types)}"
    numbers = " ".join(f"{each:g}" for each in coefficients)
    if len(types) != len(coefficients):
        yield (
            f"{shown} with --moe-aux-loss-coeff {numbers}: {len(types)} types and {len(coefficients)} coefficients; "
            "give one coefficient for each type"
        )
    if len(set(types)) != len(types) or (len(types) > 1 and not set(types) <= set(mixture.AUXILIARY_LOSSES)):
        yield f"{shown}: only different auxiliary losses ({', '.join(mixture.AUXILIARY_LOSSES)}) can be combined"
    elif types == ("sinkhorn",) and any(coefficients):
        yield f"{shown} with --moe-aux-loss-coeff {numbers}: it has no auxiliary loss; use --moe-aux-loss-coeff 0"


def expert_bias_needs_sigmoid(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core adds the bias of experts to sigmoid scores only."""
    model = config.model
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        yield (
            f"--moe-router-enable-expert-bias with --moe-router-score-function {model.moe_router_score_function}: give "
            "--moe-router-score-function sigmoid"
        )
    if model.moe_router_enable_expert_bias and "sinkhorn" in model.moe_router_load_balancing_type:
        yield "--moe-router-enable-expert-bias with sinkhorn, which selects experts without it: remove one"
    rate = model.moe_router_bias_update_rate
    if not model.moe_router_enable_expert_bias and rate != ModelConfig().moe_router_bias_update_rate:
        yield no_effect_without(f"--moe-router-bias-update-rate {rate:g}", "--moe-router-enable-expert-bias")


def sinkhorn_has_its_own_scores(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core's sinkhorn reads neither groups nor settings of the scores."""
    model = config.model
    if not mixture.is_mixture(model) or "sinkhorn" not in model.moe_router_load_balancing_type:
        return
    score = "the sigmoid of its logit" if model.moe_router_topk == 1 else "its softmax over all experts"
    factor = model.moe_router_topk_scaling_factor
    is_given = {
        f"--moe-router-num-groups {model.moe_router_num_groups}": model.moe_router_num_groups is not None,
        f"--moe-router-group-topk {model.moe_router_group_topk}": model.moe_router_group_topk is not None,
        "--moe-router-score-function sigmoid": model.moe_router_score_function == "sigmoid",
        f"--moe-router-topk-scaling-factor {factor}": factor not in (None, 1.0),
        "--moe-router-pre-softmax": model.moe_router_pre_softmax,
    }
    for flag, given in is_given.items():
        if given:
            yield f"{flag} with sinkhorn, which does not read it: the score of an expert is {score}; remove it"
