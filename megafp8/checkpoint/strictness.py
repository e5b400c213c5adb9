"""`--dist-ckpt-strictness`: keys that only a run or only its checkpoint has.

Megatron-core's words: an unexpected key is asked for by the run and absent from the checkpoint, a missing one is in the
checkpoint and not asked for. Megatron-core finds them; here they become errors, notes or nothing, by the meaning of
its `StrictHandling`. Two things do not depend on it. What layers keep besides weights (scales, amax histories) is taken
where the checkpoint has it. An optimizer state with gaps is always refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megafp8.checkpoint.manifest import listed
from megafp8.errors import CheckpointError

DEFAULT = "assume_ok_unexpected"
LENIENT = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
# Parts of the keys of what only some layers keep besides weights: Transformer Engine's, and the emulated ones'.
LAYER_STATE = ("_extra_state", ".quantizer_state.")
# Parts of a checkpoint besides the model, by the first word of their keys. A run may leave them out.
OTHER_PARTS = ("optimizer", "random_state")


def returned_by_core(strictness: str) -> str:
    """The keys that megatron-core's `load` is to return, in place of its own errors and warnings."""
    return "return_all" if strictness.endswith("_all") else "return_unexpected"


def is_of_layers(key: str) -> bool:
    """Whether a key is of a layer's state besides its weights."""
    return any(part in key for part in LAYER_STATE)


def part_of(key: str) -> str:
    """The part of a checkpoint that a key is of: `model`, or one of `OTHER_PARTS`."""
    return next((part for part in OTHER_PARTS if key.startswith(part)), "model")


def check_keys(path: Path, strictness: str, unexpected: Iterable[str], missing: Iterable[str]) -> tuple[str, ...]:
    """Refuse keys that do not match, or return a note on them.

    Args:
        unexpected: of the parts that the run loads, without layers' state.
        missing: the same; empty unless `strictness` is one of the `*_all`.

    Raises:
        CheckpointError: the strictness does not allow a key, or optimizer state is incomplete.
    """
    unexpected, missing, flag = sorted(unexpected), sorted(missing), f"--dist-ckpt-strictness {strictness}"
    if unexpected and strictness not in LENIENT:
        raise CheckpointError(f"{path} is of another model: it lacks {', '.join(unexpected)}")
    if others := [key for key in unexpected if part_of(key) != "model"]:
        raise CheckpointError(
            f"{path} lacks {listed(others)}, and {flag} is for weights alone: give --no-load-optim, --no-load-rng or "
            "--finetune"
        )
    if missing and strictness == "raise_all":
        raise CheckpointError(f"{path} has {listed(missing)}, which this run does not load ({flag})")
    if strictness == "ignore_all":
        return ()
    notes = {"lacks weights, which stay as initialized": unexpected, "has keys that are not loaded": missing}
    return tuple(f"warning: {path} {text} ({flag}): {listed(keys)}" for text, keys in notes.items() if keys)
