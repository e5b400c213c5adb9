"""Attention options with Transformer Engine's layers: their losses are those of the emulated layers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gap_to_emulated, gpu_curve, gpu_run, unbroken_and_resumed
from gpu_sizes import ATTENTION_OPTIONS
from small_run import step_results

from megafp8.models.loss import document_ends

STEPS = 4
CLOSE = 2e-3  # relative difference of losses: BF16 attention by two kernels
curve = functools.partial(gpu_curve, num_steps=STEPS)


@pytest.mark.parametrize("name", ATTENTION_OPTIONS)
def test_an_option_trains_as_with_emulated_layers(name: str) -> None:
    assert gap_to_emulated(ATTENTION_OPTIONS[name], STEPS) < CLOSE
    assert curve(ATTENTION_OPTIONS[name]).losses != curve("").losses  # it has an effect


@pytest.mark.parametrize("name", ATTENTION_OPTIONS)
def test_an_option_with_fp8(name: str) -> None:
    flags = f"{RECIPES['tensorwise']} {ATTENTION_OPTIONS[name]}"
    assert gap_to_emulated(flags, STEPS) < 5e-3


def test_learnable_offsets_resume_to_the_bit(tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(ATTENTION_OPTIONS["learnable offsets"], STEPS, tmp_path)
    assert unbroken == resumed


@pytest.mark.parametrize("extra", ["", "--window-size 24,0", "--reset-attention-mask --eod-mask-loss"])
def test_the_largest_logit_is_that_of_emulated_layers(extra: str) -> None:
    found = []
    for layers in ("--transformer-impl transformer_engine", "--transformer-impl emulated"):
        with gpu_run(f"--log-max-attention-logit {layers} {extra}") as run:
            found.append([result.metrics["max_attention_logit"] for result in step_results(run, STEPS)])
    assert found[0] == pytest.approx(found[1], rel=2e-2)  # BF16 operands, and weights that drift apart


@pytest.mark.parametrize("extra", ["", "--window-size 24,0"])
def test_documents_have_the_losses_of_each_alone(extra: str) -> None:
    lengths = (40, 3, 64, 21)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(256, (2, sum(lengths)), generator=generator).cuda() for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    documents = document_ends(positions == 0).cuda()
    with gpu_run(f"--reset-attention-mask --reset-position-ids --eod-mask-loss {extra}") as run:
        (chunk,) = run.training_state.chunks
        with torch.no_grad():
            together = chunk(tokens, positions.cuda(), documents, labels=labels)
            whole = chunk(tokens, torch.arange(sum(lengths)).expand(2, -1).cuda(), None, labels=labels)
            parts = []
            for start, length in zip((0, 40, 43, 107), lengths, strict=True):
                part = slice(start, start + length)
                where = torch.arange(length).expand(2, -1).cuda()
                parts.append(chunk(tokens[:, part], where, None, labels=labels[:, part]))
    separate = torch.cat(parts, dim=1)
    assert (together - separate).abs().max() < 0.05  # of BF16 activations
    assert (whole - separate).abs().mean() > 4 * (together - separate).abs().mean()
