"""Try one attention backend of Transformer Engine in a process of its own, and print the result as JSON.

    python -m megafp8.te.attention_trial flash|fused|unfused

The backend is chosen by environment variables that Transformer Engine reads once.
"""

from __future__ import annotations

import json
import math
import os
import sys

from megafp8.device.layer_support import ATTENTION_SWITCHES

SIZES = {"tokens": 2048, "batch": 2, "heads": 16, "groups": 4, "head_dim": 128}
WARM_UP, ROUNDS = 3, 10


def trial() -> dict[str, float]:
    """Causal attention forward and backward in BF16 against torch's in FP32.

    Returns:
        `error`: the largest difference of outputs and gradients over the largest value; `ms`: median time.
    """
    import statistics

    import torch
    import transformer_engine.pytorch as te

    tokens, batch, heads, groups, head_dim = SIZES.values()
    generator = torch.Generator("cuda").manual_seed(1)

    def random(num_heads: int) -> torch.Tensor:
        shape = (tokens, batch, num_heads, head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator).requires_grad_()

    q, k, v, dy = random(heads), random(groups), random(groups), random(heads).detach().flatten(2)
    attention = te.DotProductAttention(heads, head_dim, num_gqa_groups=groups, attn_mask_type="causal")
    times = []
    for _ in range(WARM_UP + ROUNDS):
        for each in (q, k, v):
            each.grad = None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y = attention(q, k, v)
        y.backward(dy)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    exact = [each.detach().float().permute(1, 2, 0, 3).requires_grad_() for each in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    expected.backward(dy.float())
    pairs = [(y, expected)] + [(a.grad, b.grad.permute(2, 0, 1, 3)) for a, b in zip((q, k, v), exact, strict=True)]
    errors = [((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    if any(math.isnan(error) for error in errors):
        raise ArithmeticError("outputs or gradients are NaN")
    return {"error": max(errors), "ms": statistics.median(times[WARM_UP:])}


def main(backend: str) -> None:
    """Print the trial's results, `{"wrong": reason}`, or `{"unavailable": reason}`."""
    os.environ.update({switch: str(int(name == backend)) for name, switch in ATTENTION_SWITCHES.items()})
    try:
        result: dict[str, object] = {**trial()}
    except ArithmeticError as error:
        result = {"wrong": str(error)}
    except Exception as error:  # whatever a backend raises on this device is the result
        result = {"unavailable": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
