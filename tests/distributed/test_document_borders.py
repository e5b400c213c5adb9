"""`--reset-attention-mask`: documents in one sequence train as each would alone, under every layout."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from packed_kernel import packed_attention
from ranks import run_ranks
from small_run import FOUR_LAYERS, PLAIN, DocumentSamples, build_run, small_config
from torch import Tensor

from megafp8.checkpoint.progress import Progress
from megafp8.mcore.multi_token import MultiTokenGPT
from megafp8.models.loss import document_ends, split_over_context, token_loss
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import train_step

LENGTH = 32
LENGTHS = ((5, 1, 26), (32,), (16, 9, 7), (1, 1, 30))  # of the documents in each sample
FLAGS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
LAYOUTS = {
    "tensor and sequence": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "pipeline of 4": ("--pipeline-model-parallel-size 4", 4),
    "interleaved": ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    "recompute": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
    "recompute of attention": ("--recompute-granularity selective", 1),
    "emulated FP8": ("", 1),
    "context of 2": ("--context-parallel-size 2", 2),
    "context of 2, pipeline of 2": ("--context-parallel-size 2 --pipeline-model-parallel-size 2", 4),
    "context of 2, tensor and sequence": (
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4,
    ),
    "context of 2, recompute": (
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2,
    ),
}  # fmt: skip


def gradients(run: Run, batches: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Sum of the losses of batches, and its gradients."""
    (chunk,) = run.training_state.chunks
    chunk.zero_grad_buffer()
    total = torch.zeros(())
    for batch in batches:
        starts = batch.get("document_starts")
        documents = None if starts is None else document_ends(starts)
        is_multi = isinstance(unwrap_model(chunk), MultiTokenGPT)
        options = {"loss_mask": batch["loss_mask"]} if is_multi else {}
        losses = chunk(batch["tokens"], batch["position_ids"], documents, labels=batch["labels"], **options)
        total = total + token_loss(batch["loss_mask"], losses)[0]
    total.backward()
    return float(total), {name: weight.main_grad.clone() for name, weight in chunk.named_parameters()}


def alone(sample: dict[str, Tensor], lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Each document of a sample as a batch of its own."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    return [
        {key: sample[key][None, end - length : end] for key in keys} for length, end in zip(lengths, ends, strict=True)
    ]


LATENT = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-layernorm"
MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
WINDOWED = "--window-size 4,0 --softmax-type learnable"
MODELS = [("llama", ""), ("gpt2", ""), ("llama", WINDOWED), ("gpt2", WINDOWED), ("latent", LATENT), ("llama", MTP)]


@pytest.mark.parametrize(("style", "extra"), MODELS)
def test_documents_train_as_each_alone(style: str, extra: str) -> None:
    def on_rank() -> Any:
        run = build_run(small_config(style, f"{PLAIN} {FOUR_LAYERS} {FLAGS} {extra}"))
        samples = [DocumentSamples(LENGTH, LENGTHS)[index] for index in range(len(LENGTHS))]
        together = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        separate = [part for sample, lengths in zip(samples, LENGTHS, strict=True) for part in alone(sample, lengths)]
        whole = {key: value for key, value in together.items() if key != "document_starts"}
        return gradients(run, [together]), gradients(run, separate), gradients(run, [whole])

    ((together, separate, whole),) = run_ranks(1, on_rank)
    assert together[0] == pytest.approx(separate[0], rel=1e-6)
    assert together[1].keys() == separate[1].keys()
    for name, gradient in together[1].items():
        torch.testing.assert_close(gradient, separate[1][name], rtol=1e-4, atol=2e-6)
    assert abs(whole[0] - separate[0]) > 1e-3  # without borders the loss is another


def losses(extra: str, world_size: int, comm_type: str = "") -> list[float]:
    """Losses of three steps on documents.

    Args:
        comm_type: attention as on Transformer Engine with this `--cp-comm-type`, by a kernel of torch.
    """

    def on_rank() -> list[float]:
        style = "latent" if LATENT in extra else "llama"
        config = small_config(style, f"{FLAGS} --micro-batch-size 2 {extra}", world_size)
        run = build_run(config)
        samples = DocumentSamples(LENGTH, LENGTHS)
        run = dataclasses.replace(run, datasets=(samples, samples, None))
        batches = build_batches(run, samples, 0, 3 * run.global_batch_size, num_workers=0)
        with packed_attention(comm_type) if comm_type else nullcontext():
            return [train_step(run, batches, Progress(step, step * run.global_batch_size)).loss for step in range(3)]

    return run_ranks(world_size, on_rank)[-1]


@pytest.fixture(scope="module")
def one_rank() -> list[float]:
    return losses(f"{PLAIN} {FOUR_LAYERS}", 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_sees_the_documents(name: str, one_rank: list[float]) -> None:
    extra, world_size = LAYOUTS[name]
    is_quantized = name == "emulated FP8"
    precision = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise" if is_quantized else PLAIN
    found = losses(f"{precision} {FOUR_LAYERS} {extra}", world_size)
    assert found == pytest.approx(one_rank, rel=1e-2 if is_quantized else 1e-5)


@pytest.mark.parametrize(
    ("layout", "comm_type", "model"),
    [
        ("", "p2p", ""),
        ("", "p2p", LATENT),
        ("context of 2", "p2p", ""),
        ("context of 2", "a2a", ""),
        ("context of 2", "p2p", LATENT),
        ("context of 2, tensor and sequence", "p2p", ""),
        ("context of 2, tensor and sequence", "a2a", LATENT),
        ("context of 2, recompute", "p2p", ""),
    ],
)
def test_packed_documents_on_every_layout(layout: str, comm_type: str, model: str, one_rank: list[float]) -> None:
    expected = losses(f"{PLAIN} {FOUR_LAYERS} {model}", 1) if model else one_rank
    extra, world_size = LAYOUTS.get(layout, ("", 1))
    found = losses(f"{PLAIN} {FOUR_LAYERS} {model} {extra}", world_size, comm_type)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model", [MTP, LATENT], ids=["multi-token prediction", "latent attention"])
def test_models_see_the_documents_on_several_ranks(model: str) -> None:
    plain = f"{PLAIN} {FOUR_LAYERS} {model}"
    expected = losses(plain, 1)
    for layout in ("--context-parallel-size 2", "--pipeline-model-parallel-size 2"):
        assert losses(f"{plain} {layout}", 2) == pytest.approx(expected, rel=1e-5)


FROZEN = {
    "bf16": "",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",  # evaluation does not change its scales
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}


@pytest.mark.parametrize("recipe", FROZEN)
@pytest.mark.parametrize("layout", ["", "--context-parallel-size 2"])
@pytest.mark.parametrize("comm_type", ["", "p2p", "a2a"])
def test_other_documents_change_no_bit(recipe: str, layout: str, comm_type: str) -> None:
    """Where scales are fixed, or those of single tokens."""
    world_size = 2 if layout else 1

    def on_rank() -> list[list[float]]:
        flags = f"--bf16 --transformer-impl emulated {FROZEN[recipe]} {FLAGS} --num-experts 4 --moe-router-topk 2"
        run = build_run(small_config("llama", f"{flags} --moe-ffn-hidden-size 64 {layout}", world_size))
        (chunk,) = run.training_state.chunks
        chunk.eval()
        sample = DocumentSamples(LENGTH, LENGTHS)[2]  # documents of 16, 9 and 7 tokens
        found = []
        for change in (0, 7):
            tokens = sample["tokens"].clone()
            tokens[:16] = (tokens[:16] + change) % 255
            tokens[25:] = (tokens[25:] + change) % 255
            batch = {key: value[None] for key, value in (sample | {"tokens": tokens}).items()}
            ends = document_ends(batch["document_starts"])
            if world_size > 1:
                batch = split_over_context(batch)
            with torch.no_grad(), packed_attention(comm_type) if comm_type else nullcontext():
                losses = chunk(batch["tokens"], batch["position_ids"], ends, labels=batch["labels"])
            places = torch.arange(LENGTH)[None]
            here = split_over_context({"tokens": places})["tokens"] if world_size > 1 else places
            found.append(losses[(here >= 16) & (here < 25)].tolist())
        return found

    ranks = run_ranks(world_size, on_rank)
    assert sum(len(before) for before, _ in ranks) == 9
    assert all(before == after for before, after in ranks)
