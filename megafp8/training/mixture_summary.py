"""The experts of a run in a dry run: their layout, the GEMMs of one expert and the tokens that ranks exchange."""

from __future__ import annotations

from megafp8.config import derived, mixture
from megafp8.config.activations import is_gated
from megafp8.config.schema import RunConfig
from megafp8.planning.mixture_time import exchanged_bytes

SMALL_ROWS, SMALL_EXPERTS = 2048, 64
"""On an H200, with as many experts on a GPU and with fewer tokens each, quantizing took what FP8 GEMMs saved."""


def mixture_text(config: RunConfig, world_size: int) -> list[str]:
    """Lines about the experts, as one text; nothing for a dense model.

    Numbers of tokens are those of a balanced load.
    """
    model, parallel = config.model, config.parallel
    if not mixture.is_mixture(model):
        return []
    rows, local = mixture.routed_rows(config), mixture.experts_per_rank(config)
    assert rows is not None and model.hidden_size is not None
    splits = mixture.expert_tensor_size(parallel)
    width = mixture.moe_ffn_hidden_size(model) // splits
    width_in = 2 * width if is_gated(model) else width
    lines = [
        f"experts: {model.num_experts} in {mixture.num_expert_layers(model)} layers, {model.moe_router_topk} a token; "
        f"{local} a rank: expert {parallel.expert_model_parallel_size} x expert tensor {splits} x expert data "
        f"{mixture.expert_data_size(config, world_size)}",
        f"  GEMMs of one expert and microbatch, if the load is balanced: {rows} x {model.hidden_size} x {width_in} and "
        f"{rows} x {width} x {model.hidden_size}",
    ]
    if parallel.expert_model_parallel_size > 1:
        lines.append(f"  exchanged by a rank: {exchanged_bytes(config) / 1e6:,.1f} MB a layer and microbatch")
    if derived.used_recipes(config.precision) and local >= SMALL_EXPERTS and rows < SMALL_ROWS:
        lines.append(
            f"  warning: {local} experts on a rank with about {rows} tokens each: quantizing their operands may take "
            "as long as FP8 GEMMs save; use more expert-parallel ranks or a larger micro batch"
        )
    return ["\n".join(lines)]
