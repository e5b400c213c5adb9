"""Whether two runs learned from the same samples in the same order, and were validated on the same text.

Records hold no hash of the data. They hold where it lay: shards of one name in two folders are taken for copies, as two
machines have them, and shards of other names for other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Optional

from megafp8.config.blend import parse_blend
from megafp8.config.derived import DEFAULT_SPLIT, split_shares
from megafp8.reports.load import Run
from megafp8.reports.pairs import Pair
from megafp8.reports.settings import seed_of, stages_of
from megafp8.telemetry.records import RunRecord


def data_warnings(pair: Pair) -> list[str]:
    """What the two runs have otherwise, with both values."""
    run, base = pair.run, pair.base
    texts = [
        f"{run.name} has {name} {ours}, {base.name} {theirs}: they did not learn from the same data in the same order, "
        "or were validated on other data, so nothing is decided"
        for name, (ours, theirs) in _differing(pair).items()
    ]
    if (tokens := _validation_tokens(pair)) is not None:
        texts.append(
            f"{run.name} was validated on {tokens[0]:,} tokens, {base.name} on {tokens[1]:,}: "
            "the losses are not of the same data"
        )
    if seed_of(run) != seed_of(base):
        texts.append(f"{run.name} has seed {seed_of(run)}, {base.name} {seed_of(base)}: they are no pair")
    return texts


def other_data(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """In what any of the pairs differs so that its gap is not one of the recipe: "training data", "seed"."""
    names: dict[str, None] = {}
    for pair in pairs:
        names |= dict.fromkeys(_differing(pair))
        names |= {"number of validation tokens": None} if _validation_tokens(pair) is not None else {}
        names |= {"seed": None} if seed_of(pair.run) != seed_of(pair.base) else {}
    return tuple(names)


def _differing(pair: Pair) -> dict[str, tuple[str, str]]:
    """(run's, baseline's) facts that differ. What a run's records do not say is no difference."""
    ours, theirs = _facts_of(pair.run), _facts_of(pair.base)
    return {name: (ours[name], theirs[name]) for name in ours if name in theirs and ours[name] != theirs[name]}


def _validation_tokens(pair: Pair) -> Optional[tuple[int, int]]:
    """Those of the last validations of the run and of the baseline, where both have one and they differ."""
    ours, theirs = pair.run.last_validation, pair.base.last_validation
    if ours is None or theirs is None or ours.num_tokens == theirs.num_tokens:
        return None
    return ours.num_tokens, theirs.num_tokens


def _facts_of(run: Run) -> dict[str, str]:
    """Of all stages, each value once."""
    found: dict[str, dict[str, None]] = {}
    for stage in stages_of(run):
        for name, value in _facts(stage.info).items():
            found.setdefault(name, {})[value] = None
    return {name: ", then ".join(values) for name, values in found.items()}


def _facts(info: RunRecord) -> dict[str, str]:
    """What a record says, and nothing of what it does not."""
    data, facts = info.config.get("data", {}), {}
    if "data_path" in data:
        is_apart = any(data.get(f"{part}_data_path") for part in ("train", "valid", "test"))
        shards = data.get("train_data_path") or data["data_path"] or ()
        facts["training data"] = "mock data" if data.get("mock_data") else _blend_text(shards)
        facts["split"] = "none" if is_apart else _split_text(data.get("split") or DEFAULT_SPLIT)
        facts["validation data"] = _blend_text(data.get("valid_data_path") or ()) if is_apart else "of the split"
    if "seq_length" in data:
        facts["sequence length"] = str(data["seq_length"])
    if (batch := _global_batch(info)) is not None:
        facts["global batch"] = str(batch)
    return facts


def _global_batch(info: RunRecord) -> Optional[int]:
    """Sequences of a step; None where the record does not say."""
    training = info.config.get("training", {})
    micro, default = training.get("micro_batch_size"), None
    if "global_batch_size" in training and isinstance(micro, int):  # not auto
        default = micro * info.layout.get("data", 1)
    return training.get("global_batch_size") or default


def _blend_text(words: Sequence[str]) -> str:
    """The shards by the last part of their names, with their shares: "0.25 books, 0.75 web"."""
    if not words:
        return "none"
    blend = parse_blend(words)
    names = [PurePath(prefix).name for prefix in blend.prefixes]
    if blend.weights is None:
        return ", ".join(names)
    return ", ".join(f"{w / sum(blend.weights):.4g} {name}" for w, name in zip(blend.weights, names, strict=True))


def _split_text(split: str) -> str:
    """Shares that add up to 1: 98,1,1 and 980,10,10 are the same."""
    shares = split_shares(split)
    return ",".join(f"{share / sum(shares):.4g}" for share in shares)
