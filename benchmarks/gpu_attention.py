"""Attention of a model's shape on this GPU, forward and backward, by every backend of `--attention-backend`.

    python benchmarks/gpu_attention.py --shapes A B --json FILE
    python benchmarks/gpu_attention.py -- --model-preset llama3-8b --seq-length 8192 --micro-batch-size 1
    python benchmarks/gpu_attention.py --backends fused --documents 2048 -- --model-preset llama3-8b \
        --seq-length 32768 --micro-batch-size 1

After `--` come flags of `pretrain_gpt.py`; `--shapes` are those of `gpu_train.py`. `fused` is cuDNN through Transformer
Engine, `flash` the flash-attn package, `unfused` Transformer Engine's own, `sdpa` torch's choice, `sdpa flash` torch's
FlashAttention 2, `plain` two products and a softmax in torch; the FP8 ones are cuDNN's on codes, casts included (in
training `--fp8-dot-product-attention`, under delayed scaling). What really ran is in the table; a backend that is not
there, or that Transformer Engine would not take, is named with the reason.

`--documents TOKENS` also times attention within documents of so many tokens on average, of random lengths, as
`--reset-attention-mask` has it: with room for as many documents as there are and for more, which are empty.

Times are of the GPU, by events, medians of rounds; the L2 cache is flushed before each. TFLOP/s are the model's: causal
attention counted by half, backward twice forward. The peak is what one call, forward and backward, allocates beyond its
inputs. The error is the largest difference of the output to that of `sdpa` in FP32, over its largest number.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import timing
from benchmarks.gpu_gemm import FLUSHED_BYTES, Model, model_of, parse_models
from megafp8.config import dimensions
from megafp8.device.gpus import GPUS, find_gpu
from megafp8.models.loss import document_ends
from megafp8.te.packed_sequences import Borders, attend_packed

SDPA, SDPA_FLASH, PLAIN = "sdpa", "sdpa flash", "plain"
OF_TORCH = (PLAIN, SDPA, SDPA_FLASH)
# The variables by which Transformer Engine is told what it may take, as megatron-core sets them.
SWITCHES = {"fused": "NVTE_FUSED_ATTN", "flash": "NVTE_FLASH_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
FP8_RECIPES = {"fused FP8 delayed": "DelayedScaling", "fused FP8 tensorwise": "Float8CurrentScaling"}
BACKENDS = (*SWITCHES, *OF_TORCH, *FP8_RECIPES)
BUSY_CYCLES = 1_000_000


class NotHere(Exception):
    """A backend does not run here; the text says why."""


@dataclass(frozen=True)
class Shape:
    """Attention of one rank and microbatch.

    Attributes:
        heads, groups: query heads and key/value heads of the rank.
        channels: of a head.
        ends: borders of documents in the microbatch; empty where each sequence is one.
    """

    name: str
    length: int
    batch: int
    heads: int
    groups: int
    channels: int
    ends: tuple[int, ...] = ()

    @property
    def borders(self) -> tuple[int, ...]:
        """Of documents, or of sequences."""
        return self.ends or tuple(range(0, (self.batch + 1) * self.length, self.length))

    @property
    def forward_flops(self) -> float:
        """Two products, of which the causal half counts."""
        squares = sum((end - start) ** 2 for start, end in itertools.pairwise(self.borders))
        return 2 * 2 * self.heads * self.channels * squares / 2

    def in_documents(self, mean_tokens: int) -> Shape:
        """Of the same tokens in documents of random lengths."""
        starts = torch.rand(self.batch, self.length, generator=torch.Generator().manual_seed(0)) < 1 / mean_tokens
        starts[:, 0] = True
        return replace(self, name=f"{self.name} in documents", ends=tuple(document_ends(starts).tolist()))

    def with_room(self, backend: str) -> list[str]:
        """This backend with room for the documents, and for more."""
        number = 1 << (len(self.ends) - 2).bit_length()
        return [f"{backend} {number * factor} documents" for factor in (1, 2, 4, 16, 64, 256)]


def shape_of(model: Model) -> Shape:
    """Of a model's microbatch on one tensor-parallel rank."""
    config, ranks = model.run.config, model.run.sizes.tensor
    heads = config.model.num_attention_heads
    assert heads is not None and config.training.micro_batch_size is not None and config.data.seq_length is not None
    return Shape(
        model.name, config.data.seq_length, config.training.micro_batch_size, heads // ranks,
        dimensions.num_query_groups(config.model) // ranks, dimensions.kv_channels(config.model),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one backend took.

    Attributes:
        ran: the kernels that Transformer Engine chose.
    """

    shape: str
    backend: str
    ran: str
    forward_ms: float
    backward_ms: float
    forward_tflops: float
    backward_tflops: float
    peak_mib: float
    error: float


def row_of(shape: Shape, backend: str, ran: str, times: Sequence[tuple[float, float]], peak: int, error: float) -> Row:
    """The row of some rounds' (forward, backward) milliseconds."""
    forward_ms, backward_ms = (statistics.median(side) for side in zip(*times, strict=True))
    return Row(
        shape=shape.name, backend=backend, ran=ran, forward_ms=forward_ms, backward_ms=backward_ms,
        forward_tflops=shape.forward_flops / forward_ms / 1e9,
        backward_tflops=2 * shape.forward_flops / backward_ms / 1e9,
        peak_mib=peak / 2**20, error=error,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """For people."""
    header = (
        "backend", "ran", "forward ms", "backward ms", "both ms", "forward TFLOP/s", "backward TFLOP/s", "peak MiB",
        "error",
    )  # fmt: skip
    return timing.format_table(header, [
        (row.backend, row.ran, row.forward_ms, row.backward_ms, row.forward_ms + row.backward_ms, row.forward_tflops,
         row.backward_tflops, row.peak_mib, f"{row.error:.1e}")
        for row in rows
    ])  # fmt: skip


# ---- on the device ------------------------------------------------------------------------------------------------


class Inputs:
    """Queries, keys, values [s, b, heads, channels] and the output's gradient [s, b, heads x channels], BF16."""

    def __init__(self, shape: Shape, device: torch.device):
        self.borders = shape.borders[: shape.borders.index(shape.length) + 1]  # of the first sequence
        generator = torch.Generator(device).manual_seed(0)

        def numbers(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=torch.bfloat16)

        s, b, d = shape.length, shape.batch, shape.channels
        self.query = numbers(s, b, shape.heads, d).requires_grad_()
        self.key, self.value = (numbers(s, b, shape.groups, d).requires_grad_() for _ in range(2))
        self.gradient = numbers(s, b, shape.heads * d)

    def expected(self) -> Tensor:
        """The output of the first sequence, in FP32."""
        first = [x[:, :1].float() for x in (self.query, self.key, self.value)]
        with torch.no_grad():
            return torch.cat([sdpa(*(x[start:end] for x in first)) for start, end in itertools.pairwise(self.borders)])


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of torch, shapes as Transformer Engine has them."""
    output = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)), is_causal=True,
        enable_gqa=key.shape[2] != query.shape[2],
    )  # fmt: skip
    return output.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same, with all scores in memory, the softmax in FP32."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, 2) for x in (key, value))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    output = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return output.permute(2, 0, 1, 3).reshape(query.shape[2], query.shape[0], -1)


def attention_of(shape: Shape, backend: str) -> tuple[Callable[..., Tensor], Callable[[], AbstractContextManager[Any]]]:
    """A backend's function of queries, keys and values, and the context to call it in.

    Raises:
        NotHere: Transformer Engine is not installed.
    """
    if backend in OF_TORCH:
        only_flash = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
        return (plain if backend == PLAIN else sdpa), (only_flash if backend == SDPA_FLASH else nullcontext)
    try:
        import transformer_engine.common.recipe as recipes
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
    except ImportError as error:
        raise NotHere(f"needs Transformer Engine: {error}") from error
    kind = backend.split()[0]
    os.environ |= {name: str(int(each == kind)) for each, name in SWITCHES.items()}
    _attention_backends["backend_selection_requires_update"] = True
    module = te.DotProductAttention(
        shape.heads, shape.channels, num_gqa_groups=shape.groups, attention_dropout=0.0,
        qkv_format="thd" if shape.ends else "sbhd", attn_mask_type="padding_causal" if shape.ends else "causal",
    )  # fmt: skip
    if shape.ends:
        empty = (shape.ends[-1],) * (int(backend.split()[1]) + 1 - len(shape.ends))
        ends = torch.tensor((*shape.ends, *empty), dtype=torch.int32, device="cuda")
        return partial(within_documents, module, ends), nullcontext
    if backend not in FP8_RECIPES:
        return module, nullcontext
    recipe = getattr(recipes, FP8_RECIPES[backend])(fp8_dpa=True)
    return module, lambda: te.autocast(enabled=True, recipe=recipe)


def within_documents(module: Callable[..., Tensor], ends: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of Transformer Engine, as training calls it."""

    def attend(query: Tensor, key: Tensor, value: Tensor, of_queries: Borders, of_keys: Borders) -> Tensor:
        return module(
            query, key, value, cu_seqlens_q=of_queries.ends, cu_seqlens_kv=of_keys.ends,
            max_seqlen_q=of_queries.longest, max_seqlen_kv=of_keys.longest,
        )  # fmt: skip

    return attend_packed(attend, query, key, value, ends)


def selected(backend: str) -> str:
    """What Transformer Engine chose."""
    if backend in OF_TORCH:
        return "torch"
    from megafp8.te.layers import selected_attention_backend

    return selected_attention_backend() or "unknown"


def measure(shape: Shape, backend: str, inputs: Inputs, rounds: int) -> Row:
    """Time one backend.

    Raises:
        NotHere: it does not run, or another one would.
    """
    attention, context = attention_of(shape, backend)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=inputs.query.device)
    leaves = (inputs.query, inputs.key, inputs.value)

    def once() -> tuple[float, float]:
        for leaf in leaves:
            leaf.grad = None
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        output = between(events[:2], flushed, lambda: forward())
        between(events[2:], flushed, lambda: output.backward(inputs.gradient))
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])

    def forward() -> Tensor:
        with context():
            return attention(*leaves)

    try:
        once()
        ran = selected(backend)
        if not ran.startswith(backend.split()[0]) and backend not in OF_TORCH:
            raise NotHere(f"Transformer Engine takes {ran} instead")
        error = relative_error(forward().detach()[:, :1], inputs.expected())
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = [once() for _ in range(rounds)]
        return row_of(shape, backend, ran, times, torch.cuda.max_memory_allocated() - held, error)
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        raise NotHere(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__) from error


def between(events: Sequence[Any], flushed: Tensor, run: Callable[[], Any]) -> Any:
    """Call with an empty cache, between two events, while the GPU is busy enough for the host to come first."""
    flushed.zero_()
    torch.cuda._sleep(BUSY_CYCLES)
    events[0].record()
    result = run()
    events[1].record()
    return result


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest number."""
    return ((found.float().reshape(expected.shape) - expected).abs().max() / expected.abs().max()).item()


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="default: all")
    parser.add_argument("--documents", type=int, metavar="TOKENS", help="also attention within documents of this mean")
    return parse_models(parser, argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 where nothing ran."""
    options = parse(argv)
    gpu = find_gpu(torch.cuda.get_device_name()) or GPUS["h200"]
    everything, missing = [], {}
    for name, text in options.models.items():
        whole = shape_of(model_of(name, text, gpu))
        cases = [(whole, options.backends)]
        if options.documents:
            shape = whole.in_documents(options.documents)
            kinds = [backend for backend in ("fused", "flash") if backend in options.backends]
            cases.append((shape, [each for kind in kinds for each in shape.with_room(kind)]))
        for shape, backends in cases:
            inputs, rows = Inputs(shape, torch.device("cuda")), []
            for backend in backends:
                try:
                    rows.append(measure(shape, backend, inputs, options.rounds))
                except NotHere as reason:
                    missing[f"{shape.name} {backend}"] = str(reason)
                torch.cuda.empty_cache()
            print(f"\n{shape}, {torch.cuda.get_device_name()}\n{table(rows)}", flush=True)
            everything += rows
    for name, reason in missing.items():
        print(f"{name} does not run: {reason}")
    if options.json:
        timing.write_json(options.json, {"rows": everything, "missing": missing})
    return 0 if everything else 1


if __name__ == "__main__":
    sys.exit(main())
