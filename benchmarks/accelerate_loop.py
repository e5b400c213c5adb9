"""A Hugging Face model under `accelerate`, in BF16 or with its FP8 (Transformer Engine's linears), as its guides show.

    accelerate launch --num_processes 1 benchmarks/accelerate_loop.py --shape llama3.2-1b --mode delayed

Model, batch and microbatches are those of the shape with this name in `gpu_train.py`. Weights are in FP32 under
autocast, which is accelerate's way; attention is torch's, the optimizer torch's fused AdamW, data are random tokens.
Prints tokens/s, model TFLOP/s as in `gpu_train.py`, peak GiB and joules a token as one line of JSON, and how many
linears are torch's and Transformer Engine's: of GPT-2 only the output layer is converted, since transformers builds its
layers from `Conv1D`, which accelerate leaves as it is.

`--tiny` tries the loop on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from benchmarks.gpu_train import SHAPES
from megafp8.checkpoint.convert.families import family_of_model
from megafp8.config import dimensions, flags, model_shapes
from megafp8.config.schema import RunConfig
from megafp8.device.energy import EnergyCounter, has_library

HISTORY = {"amax_history_len": 1024, "amax_compute_algo": "max"}  # of `delayed` in gpu_train.py


def run_of(shape: str) -> RunConfig:
    """Model and batch of a shape."""
    return flags.parse_with_problems(SHAPES[shape].split())[0].config


def build_model(config: RunConfig) -> Any:
    """The transformers model of a run, with initial weights in FP32."""
    positions = config.model.max_position_embeddings or config.data.seq_length
    model = replace(config.model, max_position_embeddings=positions)
    family, _ = family_of_model(model)
    vocabulary = dimensions.padded_vocab_size(config, int(config.model.vocab_size or 0) + 1)
    fields = family.to_hf_config(model, config.precision) | {"vocab_size": vocabulary}
    model_type = fields.pop("model_type", family.model_type)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), attn_implementation="sdpa")


def measure(shape: str, mode: str, warm_up: int, steps: int) -> dict[str, Any]:
    """Train, and return what was measured; times are of complete steps of all microbatches."""
    config, set_up = run_of(shape), []
    if mode != "bf16":
        set_up = [TERecipeKwargs(fp8_format="HYBRID", **HISTORY)]
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    length = config.data.seq_length
    assert isinstance(micro, int) and batch is not None and length is not None
    accelerator = Accelerator(
        mixed_precision="bf16" if mode == "bf16" else "fp8", kwargs_handlers=set_up,
        gradient_accumulation_steps=batch // micro,
    )  # fmt: skip
    set_seed(1)
    model = build_model(config)
    on_gpu = accelerator.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.1, fused=on_gpu)
    model, optimizer = accelerator.prepare(model, optimizer)
    times, joules = [], 0.0
    counter = EnergyCounter(accelerator.device).joules if on_gpu and has_library() else lambda: 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            joules = counter()
        start = time.perf_counter()
        for _ in range(batch // micro):
            tokens = torch.randint(model.config.vocab_size, (micro, length), device=accelerator.device)
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        loss.item()  # waits for the step
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[warm_up:])
    num_tokens = batch * length
    flops = model_shapes.flops_per_token(config.model, model.config.vocab_size, length)
    kinds = [type(module).__module__.split(".")[0] for module in model.modules() if type(module).__name__ == "Linear"]
    return {
        "shape": shape, "mode": mode, "tokens_per_s": num_tokens / seconds, "step_ms": 1e3 * seconds,
        "tflops": flops * num_tokens / seconds / 1e12, "loss": loss.item(),
        "linears": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "joules_per_token": (counter() - joules) / (num_tokens * steps),
    }  # fmt: skip


def main() -> None:
    """Measure one mode, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3.2-1b", help="model and batch")
    parser.add_argument("--mode", choices=["bf16", "delayed"], default="bf16", help="precision")
    parser.add_argument("--warm-up", type=int, default=4, metavar="N", help="steps before the timed ones (default 4)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="timed steps (default 8)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any machine")
    args = parser.parse_args()
    print(json.dumps(measure("tiny" if args.tiny else args.shape, args.mode, args.warm_up, args.steps)), flush=True)


if __name__ == "__main__":
    main()
