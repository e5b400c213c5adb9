"""`--dist-ckpt-strictness` has megatron-core's values with their documented effect on a load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from saved_run import build_initial, configure, save_initial

from megafp8.checkpoint.compatibility import LENIENT_STRICTNESS, check_keys
from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import TrainingState
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, with_values
from megafp8.errors import CheckpointError

PATH = Path("iter_0000007")
NORM, MOMENT = "decoder.layers.0.self_attention.q_layernorm.weight", "optimizer.state.exp_avg.q_layernorm.weight"
KEYS = NORM.replace("q_layernorm", "k_layernorm")
SMALL = (
    "--normalization RMSNorm --num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 32 "
    "--vocab-size 100"
)
VALUES = [value.value for value in StrictHandling]


def test_the_values_are_megatron_cores() -> None:
    setting = settings_by_name()["checkpoint.dist_ckpt_strictness"]
    assert sorted(setting.choices) == sorted(VALUES) and setting.default == "assume_ok_unexpected"


@pytest.mark.parametrize("value", VALUES)
def test_each_value_raises_notes_or_ignores(value: str) -> None:
    if value in LENIENT_STRICTNESS:
        notes = check_keys(PATH, value, {NORM}, set())
        assert notes == () if value == "ignore_all" else NORM in notes[0] and "keep their initial values" in notes[0]
        with pytest.raises(CheckpointError, match="use --no-load-optim"):
            check_keys(PATH, value, {NORM, MOMENT}, set())
    else:
        with pytest.raises(CheckpointError, match=f"it lacks {NORM}"):
            check_keys(PATH, value, {NORM}, set())
    if value == "raise_all":
        with pytest.raises(CheckpointError, match=f"has {NORM}, which this run does not load"):
            check_keys(PATH, value, set(), {NORM})
    elif value in ("log_all", "return_all"):
        assert NORM in check_keys(PATH, value, set(), {NORM})[0]


def config_of(has_norms: bool, strictness: str = "assume_ok_unexpected", flags: str = "") -> RunConfig:
    config = configure(f"{SMALL} --bf16 --dist-ckpt-strictness {strictness} {flags}")
    return with_values(config, {"model.qk_layernorm": has_norms})


def loads(path: Path, has_norms: bool, cases: list[tuple[str, str]]) -> list[str]:
    """Load with each strictness and flags into a model with or without norms, past the comparison of settings. Returns
    the messages of each load."""

    def load(training_state: TrainingState, strictness: str, flags: str) -> str:
        alike = config_of(not has_norms, strictness, flags)
        try:
            return " ".join(load_checkpoint(path, alike, training_state).notes)
        except CheckpointError as error:
            return f"CheckpointError: {error}"

    def load_all() -> list[str]:
        training_state = build_initial(config_of(has_norms))
        found = [load(training_state, *case) for case in cases]
        norms = [
            each for name, each in unwrap_model(training_state.chunks[0]).named_parameters() if "q_layernorm" in name
        ]
        assert len(norms) == has_norms and all(torch.equal(norm, torch.ones_like(norm)) for norm in norms)
        return found

    return run_ranks(1, load_all)[0]


def test_unexpected_keys(tmp_path: Path) -> None:
    path = find_checkpoint(save_initial(tmp_path, config_of(False)))[1]
    raised, with_optimizer, noted, ignored = loads(path, True, [
        ("raise_unexpected", "--no-load-optim"), ("log_unexpected", ""), ("log_unexpected", "--no-load-optim"),
        ("ignore_all", "--no-load-optim"),
    ])  # fmt: skip
    assert raised.startswith("CheckpointError") and f"it lacks {KEYS}" in raised
    assert with_optimizer.startswith("CheckpointError") and "use --no-load-optim" in with_optimizer
    assert f"lacks weights, which keep their initial values (--dist-ckpt-strictness log_unexpected): {KEYS}" in noted
    assert "CheckpointError" not in ignored and "initialized" not in ignored


def test_missing_keys(tmp_path: Path) -> None:
    path = find_checkpoint(save_initial(tmp_path, config_of(True)))[1]
    raised, noted, passed_over, ignored = loads(path, False, [
        ("raise_all", ""), ("return_all", "--no-load-optim --no-load-rng"), ("assume_ok_unexpected", ""),
        ("ignore_all", ""),
    ])  # fmt: skip
    assert raised.startswith("CheckpointError") and "which this run does not load" in raised
    assert "has keys that are not loaded (--dist-ckpt-strictness return_all): decoder.layers.self_att" in noted
    assert "optimizer.state" not in noted and "random_state" not in noted, "the flags leave them out"
    assert passed_over == ignored == ""
