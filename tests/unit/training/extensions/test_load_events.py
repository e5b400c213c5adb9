"""Warnings about the experts' load become one event for each layer and kind, with suggestions that the run accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from load_records import MANY, records_of

from megafp8.config import flags
from megafp8.metrics.records import EventRecord
from megafp8.training.extensions.expert_load import ExpertLoads

TINY = (
    "--model-preset tiny-moe --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --bf16 --num-experts 4 --moe-router-topk 1 "
    "--moe-router-pre-softmax --moe-aux-loss-coeff 0.01"
)


def test_each_fault_of_a_layer_is_reported_once() -> None:
    """Also if the experts and their number change."""
    config = flags.parse(TINY.split()).config
    run: Any = SimpleNamespace(
        config=config, rank_position=SimpleNamespace(world_size=1), training_state=SimpleNamespace(chunks=[]),
        platform=SimpleNamespace(device=torch.device("cpu")), parts=[],
    )  # fmt: skip
    state: Any = SimpleNamespace(run=run)
    one_idle, two_idle, collapsed = [MANY, MANY, MANY, 0], [MANY, MANY, 0, 0], [MANY, 0, 0, 0]
    records = records_of(one_idle, one_idle, two_idle, two_idle, collapsed, collapsed, collapsed)
    extension = ExpertLoads()
    extension.open(state)
    written = [written for record in records for written in extension.evaluate(run, record)]
    idle, collapse = [record.detail for record in written if isinstance(record, EventRecord)]
    assert idle == "layer 3: idle experts: expert 3 of 4 has no tokens; try: --moe-aux-loss-coeff 0.02"
    assert collapse == (
        "layer 3: collapse: nearly all tokens pass the same 1 of 4 experts (100.0% of assignments); try: "
        "--moe-aux-loss-coeff 0.02; --lr 0.0005, half of the current value; --lr-warmup-iters 2"
    )
