"""How large the activations of a model are in its first steps, for a comparison of widths (a coordinate check).

Every step has the same batch, so that an activation differs from that of the first step by the updates alone. Tokens
are drawn with a probability of 1 / rank: what a model learns first, their frequencies, is then the same in all
positions, and soon exceeds the noise of the initial weights. In uniform tokens there is nothing to learn.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.checkpoint.progress import Progress
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.schema import RunConfig
from megafp8.device.platform import detect_platform
from megafp8.errors import NumericsError
from megafp8.metrics.layer_statistics import root_mean_square
from megafp8.training.setup import build_training_run
from megafp8.training.step import train_step

Sizes = dict[str, tuple[float, float]]
"""Root mean square of an activation, and of its difference from that of the first step, by name."""


def measure_coordinates(config: RunConfig, implementation: LayerBackend, num_steps: int) -> list[Sizes]:
    """Train a model on one device and return the sizes of each step before its update.

    The activations are the output of the embedding, of the last layer Q*K as the softmax gets it, the outputs of
    attention, MLP and the layer itself, and the logits. Sizes are computed in FP32; from where a model diverges, they
    are NaN.
    """
    platform = detect_platform(config.parallel.distributed_backend)
    run = build_training_run(config, platform, implementation, has_data=False)
    (chunk,) = unwrap_model(run.training_state.chunks)
    activations = observed_activations(chunk)
    batches = itertools.repeat(repeated_batch(config))
    first, sizes = dict[str, Tensor](), list[Sizes]()
    for step in range(num_steps):
        try:
            train_step(run, batches, Progress(step))
        except NumericsError:  # it diverged, as a wide model in standard parametrization may
            return sizes + [dict.fromkeys(activations, (math.nan, math.nan))] * (num_steps - step)
        first = first or dict(activations)
        sizes.append({name: (size(each), size(each - first[name])) for name, each in activations.items()})
    return sizes


def size(values: Tensor) -> float:
    return float(root_mean_square(values))


def observed_activations(chunk: Any) -> dict[str, Tensor]:
    """The activations of the last forward pass of a model, by name; hooks replace them in each pass."""
    found: dict[str, Tensor] = {}

    def observe(module: torch.nn.Module, name: str) -> None:
        def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output).detach().float()

        module.register_forward_hook(record)

    def record_products(attention: Any, inputs: tuple[Any, ...]) -> None:
        query, key = (each.detach().float() for each in inputs[:2])  # [S, B, heads, channels]
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        found["attention logits"] = torch.einsum("sbhc,tbhc->bhst", query, key) * attention.softmax_scale

    # In the order of the forward pass, which is that of the panels. Multipliers of muP are hooks, too, which were
    # registered before.
    layer = chunk.decoder.layers[-1]
    observe(chunk.embedding, "embedding")
    layer.self_attention.core_attention.register_forward_pre_hook(record_products)
    observe(layer.self_attention, "attention output")
    observe(layer.mlp, "MLP output")
    observe(layer, "residual stream")
    observe(chunk.output_layer, "logits")
    return found


def repeated_batch(config: RunConfig) -> dict[str, Tensor]:
    """A microbatch of random tokens, which depend on the seed, in the format of the data loader."""
    batch_size, length, num_ids = config.training.micro_batch_size, config.data.seq_length, config.model.vocab_size
    assert batch_size is not None and length is not None and num_ids is not None
    generator = torch.Generator().manual_seed(config.training.seed)
    frequencies = 1 / torch.arange(1.0, num_ids + 1)
    tokens = torch.multinomial(frequencies, batch_size * (length + 1), replacement=True, generator=generator)
    tokens = tokens.view(batch_size, length + 1)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(batch_size, length),
        "position_ids": torch.arange(length).expand(batch_size, length).contiguous(),
    }
