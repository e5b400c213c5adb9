"""What an update has beside its state, against peaks of steps on GPUs."""

from __future__ import annotations

import pytest

from megafp8.config import flags
from megafp8.config.run_sizes import run_sizes
from megafp8.device.gpus import GPUS
from megafp8.resources.automatic import with_choices
from megafp8.resources.memory import MemoryEstimate, estimate_memory

GIB = 2**30
STATE = "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
O3 = f"{STATE} --fp8-param-gather --main-params-dtype fp16 --main-grads-dtype bf16 --grad-reduce-in-bf16"


def estimate(model: str, extra: str, padded_vocab: int) -> MemoryEstimate:
    words = f"{model} --bf16 --fp8-format hybrid --fp8-recipe delayed --global-batch-size 8 {extra}"
    config = flags.parse_with_problems(words.split())[0].config
    return estimate_memory(run_sizes(with_choices(config, GPUS["h100"], 1), 1, padded_vocab))


@pytest.mark.parametrize(
    ("extra", "gib"),
    [
        (STATE, 41.5),
        (O3, 37.3),
        (f"{O3} --fp8-saved-activations norm activation", 32.0),
        (f"{O3} --recompute-granularity selective --recompute-modules mlp", 28.9),
    ],
)
def test_peaks_of_low_precision_state_on_an_h100(extra: str, gib: float) -> None:
    model = "--model-preset llama-1b --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 8"
    assert estimate(model, extra, 50304).total_bytes / GIB == pytest.approx(gib, rel=0.03)


def test_copies_of_an_update_do_not_fit_beside_8b() -> None:
    """The run ended in Transformer Engine's Adam, with 139.4 GiB in use."""
    model = "--model-preset llama3-8b --seq-length 8192 --micro-batch-size 1"
    whole = estimate(model, O3, 128256)
    assert whole.total_bytes > 139.4 * GIB
    copies = 12 * whole.parameters
    assert whole.buffers_bytes == copies - whole.activations_bytes - whole.logits_bytes
    one_pass = estimate(model, f"{STATE} --main-grads-dtype bf16 --grad-reduce-in-bf16", 128256)
    assert one_pass.total_bytes < 120 * GIB and one_pass.buffers_bytes == 0


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_moving_average_takes_its_dtype_for_each_weight_of_the_shard(optimizer: str, dtype: str, size: int) -> None:
    model = (
        "--model-preset llama-1b --bf16 --seq-length 2048 --micro-batch-size 1 --use-distributed-optimizer "
        f"--optimizer {optimizer}"
    )

    def on_4_ranks(extra: str) -> MemoryEstimate:
        return estimate_memory(run_sizes(flags.parse_with_problems(f"{model} {extra}".split())[0].config, 4, 50304))

    with_mean, without = on_4_ranks(f"--ema-decay 0.999 --ema-dtype {dtype}"), on_4_ranks("")
    added = with_mean.optimizer_bytes - without.optimizer_bytes
    assert added == pytest.approx(size * without.parameters / 4, abs=size)
    assert with_mean.total_bytes == without.total_bytes + added
