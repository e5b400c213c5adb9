"""What passes beside a step's CUDA graph need: memory of their own.

A graph keeps the memory that its passes went through while it was captured, and nothing else may have it between two
launches. So a step that is looked at, which runs kernel by kernel, has its activations and logits a second time, and a
validation has its logits and one layer's activations. They share what they get, as they come one after the other. Steps
before the capture need nothing here: torch gives what they leave back to the device first. Quantized weights are kept
between passes, and passes beside the graph write to the graph's.

Reckoned from how torch's allocator and Transformer Engine's layers work, not measured: the peaks that runs record are
of tensors, and what a graph keeps between its launches is none.
"""

from __future__ import annotations

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.planning.memory import MemoryEstimate, layer_activations


def beside_graph_bytes(
    config: RunConfig, estimate: MemoryEstimate, *, implementation: str = "transformer_engine"
) -> int:
    """Bytes of a rank beside its graph; 0 for a run without one, or without looks and validations.

    Args:
        estimate: of that rank.
    """
    if not derived.has_step_graph(config):
        return 0
    if config.logging.fp8_log_interval is not None:
        return estimate.activations_bytes + estimate.logits_bytes + estimate.buffers_bytes
    if config.training.eval_iters:
        return layer_activations(config, implementation=implementation).total + estimate.logits_bytes
    return 0
