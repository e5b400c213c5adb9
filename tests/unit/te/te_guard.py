"""A program of `test_te_without_cuda.py`: `--fp8-guard warn` watches Transformer Engine's linears, also in a fused MLP,
whose linears are not called."""

import dataclasses
import math
from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
from megatron.core import parallel_state
from small_te_mlp import EPS, HIDDEN, small_mlp, swiglu, use_torch_operations

from megafp8.config import flags, rules
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.device import capability
from megafp8.device.capability import TARGETS
from megafp8.metrics.layer_statistics import INPUT_STATISTICS, input_statistics, swiglu_alignment
from megafp8.te import userbuffers
from megafp8.training.extensions import guard

RUN = (
    "--model-preset tiny --num-layers 1 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 "
    "--lr 1e-3 --bf16 --fp8-format hybrid --fp8-recipe tensorwise --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 500 --transformer-impl transformer_engine"
)


def problems(policy: str) -> list[str]:
    """Of the guard on an H200."""
    config = flags.parse(f"{RUN} --fp8-guard {policy}".split()).config
    return [*rules.setting_problems(config, 1), *capability.capability_problems(config, TARGETS["h200"])]


assert not problems("warn") and not problems("bf16-layer") and not problems("smooth-swiglu")
assert "saves others" in problems("smooth-swiglu --fp8-saved-activations norm")[0]
delayed = "bf16-layer --fp8-recipe delayed"
assert not problems(delayed) and not problems(f"{delayed} --on-nonfinite-activation bf16 --max-skipped-steps 1")
assert "updated with the linears around it" in problems(f"{delayed} --fp8-dot-product-attention --kv-channels 128")[0]
assert "saves others" in problems(f"{delayed} --fp8-saved-activations norm")[0]
assert any("no copy in high precision" in problem for problem in problems(f"{delayed} --fp8-param-gather"))
for fuser, is_refused in (("--use-transformer-engine-op-fuser", True), ("--no-use-transformer-engine-op-fuser", False)):
    found = problems(f"warn --quantize-kernels te {fuser} --on-nonfinite-activation stop")
    assert any("fused MLP shows no infinite amax" in problem for problem in found) is is_refused, found

MODES = userbuffers.UserBufferQuantizationMode
for policy, modes in (("warn", [MODES.FP8]), ("bf16-layer", [MODES.FP8, MODES.NONE])):
    guarded = flags.parse(f"{RUN} --fp8-guard {policy}".split()).config
    assert userbuffers.quantization_modes(guarded.precision, guarded.training) == modes
in_bf16 = dataclasses.replace(guarded.precision, fp8_format=None, fp8_recipe="delayed")
assert userbuffers.quantization_modes(in_bf16, guarded.training) == [MODES.NONE]

mlp = small_mlp()
guard.named_linears = lambda chunk: [("layers.0.linear_fc1", mlp.linear_fc1), ("layers.0.linear_fc2", mlp.linear_fc2)]
guard.unwrap_model = lambda chunks: chunks
guard.dist = SimpleNamespace(all_reduce=lambda tensor, op: None, ReduceOp=SimpleNamespace(MAX=None))
config = flags.parse(f"{RUN} --fp8-guard warn".split()).config
run = SimpleNamespace(
    config=config, implementation=TRANSFORMER_ENGINE, training_state=SimpleNamespace(chunks=[mlp]),
    platform=SimpleNamespace(device=torch.device("cpu")),
)  # fmt: skip

collector = guard.LayerStatistics(run)
parallel_state.set_tensor_model_parallel_world_size(1)
use_torch_operations()
hidden = torch.randn(4, 2, HIDDEN)
hidden[..., 3] *= 100
assert collector.start() == collector.start(), "the key of its CUDA graph"
with collector.start().attached():
    mlp(hidden)
    mlp(torch.zeros_like(hidden))  # only the first microbatch counts
values = collector.take()
weight = mlp.linear_fc1.layer_norm_weight.detach()
normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,), weight, EPS)
activated = swiglu(normed @ mlp.linear_fc1.weight.detach().t())
for name, inputs in (("linear_fc1", normed), ("linear_fc2", activated)):
    for statistic, value in zip(INPUT_STATISTICS, input_statistics(inputs), strict=True):
        assert math.isclose(values[statistic, f"layers.0.{name}.input"], value.item(), rel_tol=1e-4), (statistic, name)
assert values["SwiGLU alignment", "layers.0"] == swiglu_alignment(mlp.linear_fc1.weight).item()
