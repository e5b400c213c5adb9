"""Runs with --use-mup: parameter groups, equal bits at the base width, and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from small_run import PLAIN, build_run, fingerprint, save_or_load, small_config, train, weights

from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.config.schema import RunConfig
from megafp8.optimizer.schedules import current_learning_rate

BASE = "--mup-base-hidden-size 32 --mup-base-head-dim 16"  # of a model of width 64 with 4 heads of 16
MUP = f"--use-mup {BASE}"
SHARDED = "--use-distributed-optimizer --bf16"


def settings_of_weights(config: RunConfig) -> tuple[dict[str, tuple[float, float, float]], float]:
    """Learning rate, epsilon and weight decay of each weight after a step, and the rate of the records."""
    run = build_run(config)
    train(run, 1)
    (chunk,) = unwrap_model(run.training_state.chunks)
    (part,) = chained_optimizers(run.training_state.optimizer)
    groups = {id(p): group for group in part.optimizer.param_groups for p in group["params"]}
    found = {
        name: tuple(groups[id(weight)][key] for key in ("lr", "eps", "weight_decay"))
        for name, weight in chunk.named_parameters()
    }
    return found, current_learning_rate(run.training_state.optimizer)


@pytest.mark.parametrize(("style", "decoupled"), [("llama", ""), ("gpt2", ""), ("llama", "--decoupled-lr 5e-3")])
def test_only_matrices_of_the_layers_have_another_rate_and_epsilon(style: str, decoupled: str) -> None:
    config = small_config(style, f"{PLAIN} {MUP} {decoupled}")
    ((found, printed),) = run_ranks(1, settings_of_weights, config)
    assert printed == pytest.approx(5e-4)  # after one of two steps of warmup
    for name, (rate, eps, weight_decay) in found.items():
        is_table = name.startswith(("embedding.", "output_layer."))
        is_matrix = not is_table and name.endswith(".weight") and "norm" not in name
        expected = 2.5e-3 if decoupled and is_table else 5e-4 / 2 if is_matrix else 5e-4
        assert rate == pytest.approx(expected), name
        assert eps == (5e-9 if is_matrix else 1e-8), name
        assert weight_decay == (0.1 if is_table or is_matrix else 0), name
    assert sum(eps == 5e-9 for _, eps, _ in found.values()) == 8


def trained(config: RunConfig) -> tuple[list[float], str]:
    run = build_run(config)
    return train(run, 3).losses, fingerprint(weights(run))  # the first update has a learning rate of 0


def test_at_the_base_width_the_bits_are_those_without_mup() -> None:
    (plain,) = run_ranks(1, trained, small_config("llama", PLAIN))
    own = "--use-mup --mup-base-head-dim 16"
    assert run_ranks(1, trained, small_config("llama", f"{PLAIN} {own}"))[0] == plain
    assert run_ranks(1, trained, small_config("llama", f"{PLAIN} {own} --mup-base-hidden-size 64"))[0] == plain
    assert run_ranks(1, trained, small_config("llama", f"{PLAIN} {MUP}"))[0] != plain


def test_the_first_loss_is_that_of_the_settings_that_stand_for_mup() -> None:
    """With one table for embedding and output layer the initial weights are the same, too."""
    same = f"--init-method-std {0.02 / 2**0.5!r} --embedding-init-method-std 0.02 --logits-scaling 2 --softmax-scale"
    (ours,) = run_ranks(1, trained, small_config("gpt2", f"{PLAIN} {MUP} --mup-attn-scale-power 0.75"))
    (theirs,) = run_ranks(1, trained, small_config("gpt2", f"{PLAIN} {same} {4 / 16**0.75!r}"))
    assert ours[0][0] == theirs[0][0] and ours[0][2] != theirs[0][2]


def halves(config: RunConfig, folder: Path, is_first: bool) -> Any:
    run = build_run(config)
    save_or_load(run, folder, 2, is_first)
    return train(run, 2, first_step=3).losses, fingerprint(weights(run))


@pytest.mark.parametrize("flags", [PLAIN, SHARDED])
def test_a_resumed_run_has_the_groups_of_the_unbroken_one(flags: str, tmp_path: Path) -> None:
    config = small_config("llama", f"{flags} {MUP}")
    (unbroken,) = run_ranks(1, halves, config, tmp_path, True)
    assert run_ranks(1, halves, config, tmp_path, False)[0] == unbroken
