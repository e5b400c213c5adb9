"""A program of `test_te_without_cuda.py`: infinite and saturating amaxes of Transformer Engine's linears and of
attention in FP8 are counted, named and removed, whoever cast the tensor, and quantizers of other recipes get flags for
our kernels."""

import dataclasses
from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from small_te_mlp import operations_of, small_mlp
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.cpp_extensions.fused_attn import META_DP, META_QKV
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from megafp8.config import flags
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.metrics.step_totals import OPERAND_COUNTS, StepTotals
from megafp8.nonfinite import operands
from megafp8.nonfinite.operands import NonfiniteOperands, OperandMonitor
from megafp8.te import counters, fused_mlp, patches, quantizers

RECIPE = DelayedScaling(amax_history_len=4, fp8_format=Format.HYBRID, amax_compute_algo="max", reduce_amax=False)
NAMES = ("layers.0.linear_fc1", "layers.0.linear_fc2")
patches.install()
patches.get_fp8_recipe = lambda config: RECIPE
parallel_state.set_tensor_model_parallel_world_size(1)
operands.unwrap_model = lambda chunks: chunks
operands.dist = SimpleNamespace(
    all_reduce=lambda tensor: None,
    get_world_size=lambda: 1,
    all_gather_object=lambda found, names: found.__setitem__(0, names),
)


def monitor_of(mlp: fused_mlp.SwiGLUFusedMLP) -> OperandMonitor:
    """The monitor of one layer."""
    counters.named_linears = lambda chunk: zip(NAMES, (mlp.linear_fc1, mlp.linear_fc2), strict=True)
    return OperandMonitor(NAMES, [counters.AmaxCounters(NAMES, [mlp], torch.device("cpu"))])


def totals_of(monitor: OperandMonitor) -> StepTotals:
    """As the step reduces them, on one rank."""
    return StepTotals({name: tuple(map(float, value)) for name, value in monitor.counts().items()})


def update(forward: bool, *amaxes: tuple[te.ops.BasicLinear, str, int, float]) -> None:
    """The amaxes of a microbatch, then Transformer Engine's update of scales."""
    for operation, mode, index, amax in amaxes:
        operation.get_quantizer(mode, index).amax.fill_(amax)
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)


# Delayed scaling.
FP8GlobalStateManager.autocast_enter(enabled=True, fp8_recipe=RECIPE)
mlp = small_mlp()
monitor = monitor_of(mlp)
monitor.reset()
fc1, fc2 = operations_of(mlp, RECIPE)
clean = [(fc1, "forward", 0, 2.0), (fc1, "forward", 1, 1.0), (fc2, "forward", 0, 4.0), (fc2, "forward", 1, 1.0)]
update(True, *clean)
update(False, (fc1, "backward", 0, 1.0), (fc2, "backward", 0, 1.0))
assert monitor.counts()[OPERAND_COUNTS].tolist() == [0, 0, 0]
assert monitor.find(totals_of(monitor), True).counts == ()
assert fc2.get_quantizer("forward", 0).scale.item() == 448 / 4
monitor.reset()
assert not hasattr(fc2.get_quantizer("forward", 0), quantizers.INFINITY)  # its amaxes are enough

# In the first of two microbatches the input of linear_fc2 is infinite; in the second one that of linear_fc1 saturates.
monitor.reset()
update(True, *clean, (fc2, "forward", 0, torch.inf))
update(False, (fc1, "backward", 0, 1.0), (fc2, "backward", 0, 1.0))
update(True, *clean, (fc1, "forward", 0, 2.1))
update(False, (fc1, "backward", 0, 1.0), (fc2, "backward", 0, torch.inf))
totals = totals_of(monitor)
assert totals[OPERAND_COUNTS] == (2, 1, 2)
history = mlp.linear_fc2.fp8_meta["scaling_fwd"].amax_history
assert torch.isinf(history[:, 0]).sum() == 1
nonfinite = monitor.find(totals, False)
assert nonfinite.infinite_amaxes == ("layers.0.linear_fc2.input", "layers.0.linear_fc2.grad_output"), nonfinite
assert nonfinite.describe() == (
    "layers.0.linear_fc2.input (fprop, wgrad): 1 non-finite; "
    "layers.0.linear_fc2.grad_output (dgrad, wgrad): 1 non-finite"
), nonfinite.describe()
assert dict(nonfinite.counts)["layers.0.linear_fc1.input.fprop"].saturated == 1

# The history is cleared: the scale follows the next amaxes, where an infinite one would keep it.
assert not torch.isinf(history).any()
monitor.reset()
for _ in range(3):
    update(True, *clean, (fc2, "forward", 0, 8.0))
assert fc2.get_quantizer("forward", 0).scale.item() == 448 / 8
assert monitor.counts()[OPERAND_COUNTS].tolist() == [0, 1, 0]  # the first 8 was beyond the scale of 4
assert monitor.find(totals_of(monitor), False) == NonfiniteOperands(num_saturated=1)
named = [name for name, found in monitor.find(totals_of(monitor), True).counts if found.saturated]
assert named == ["layers.0.linear_fc2.input.fprop", "layers.0.linear_fc2.input.wgrad"], named

# Where the last amax alone makes the scale, an infinite one is counted, and the next one makes the scale.
RECIPE.amax_compute_algo = "most_recent"
monitor.reset()
update(True, *clean, (fc2, "forward", 0, torch.inf))
assert fc2.get_quantizer("forward", 0).scale.item() == 448 / 8, "of before"
assert monitor.counts()[OPERAND_COUNTS].tolist() == [1, 0, 0]
assert monitor.find(totals_of(monitor), True).infinite_amaxes == ()
update(True, *clean)
assert fc2.get_quantizer("forward", 0).scale.item() == 448 / 4
RECIPE.amax_compute_algo = "max"

# A new monitor takes the place of the old one.
other = monitor_of(mlp)
other.reset()
monitor.reset()
update(True, *clean, (fc2, "forward", 0, torch.inf))
assert other.counts()[OPERAND_COUNTS].tolist() == [1, 0, 1] and monitor.counts()[OPERAND_COUNTS].tolist() == [0, 0, 0]

# Attention in FP8 is no linear, and has a row of its own, where the forward pass has it.
FP8GlobalStateManager.reset()
recipe = dataclasses.replace(RECIPE, fp8_dpa=True)
FP8GlobalStateManager.autocast_enter(enabled=True, fp8_recipe=recipe)
mlp, attention = small_mlp(), te.DotProductAttention(num_attention_heads=2, kv_channels=128)
counters.named_attentions = lambda chunk: [("layers.0.attention", attention), ("layers.1.attention", None)]
counters.named_linears = lambda chunk: zip(NAMES, (mlp.linear_fc1, mlp.linear_fc2), strict=True)
model = "--num-layers 2 --hidden-size 256 --num-attention-heads 2 --bf16 --fp8-format hybrid"
config = flags.parse(f"{model} --fp8-dot-product-attention".split()).config
rows = operands.with_attention(config.model, NAMES)  # as with the other linears in high precision
assert rows == ("layers.0.attention", *NAMES, "layers.1.attention"), rows
monitor = OperandMonitor(rows[:3], [counters.AmaxCounters(rows[:3], [mlp], torch.device("cpu"))])
monitor.reset()
fc1, fc2 = operations_of(mlp, recipe)
update(True, *clean)  # attention has no scales before its first pass
attention.init_fp8_metadata(num_gemms=3)
FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(attention.fp8_meta)
attention.quantizers["scaling_fwd"][META_QKV].amax.fill_(torch.inf)
update(True, *clean, (fc1, "forward", 0, torch.inf))
attention.quantizers["scaling_bwd"][META_DP].amax.fill_(1e6)
update(False, (fc1, "backward", 0, torch.inf), (fc2, "backward", 0, 1.0))
totals = totals_of(monitor)
assert totals[OPERAND_COUNTS] == (3, 1, 3)
nonfinite = monitor.find(totals, False)
ends = ("input.fprop", "grad_output.dgrad", "grad_output.wgrad", "input.wgrad")
assert nonfinite.describe(max_named=1) == "layers.0.attention.input (fprop): 1 non-finite; and 2 more", (
    nonfinite.describe()
)
assert [(name, found.non_finite, found.saturated) for name, found in nonfinite.counts] == [
    ("layers.0.attention.input.fprop", 1, 0), ("layers.0.attention.grad_output.dgrad", 0, 1),
    *((f"layers.0.linear_fc1.{end}", 1, 0) for end in ends),
], nonfinite.counts  # fmt: skip
linear_fc1 = ("layers.0.linear_fc1.input", "layers.0.linear_fc1.grad_output")
assert nonfinite.infinite_amaxes == ("layers.0.attention.input", *linear_fc1)
assert not torch.isinf(attention.fp8_meta["scaling_fwd"].amax_history).any()
counters.named_attentions = lambda chunk: []
linears = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
with_attention = (linears[0], "attention", *linears[1:])
for words, names in ((model, linears), (f"{model} --fp8-dot-product-attention", with_attention)):
    config = flags.parse(words.split()).config
    built = operands.build_operand_monitor(
        config.model, config.precision, [mlp], TRANSFORMER_ENGINE, torch.device("cpu")
    )
    (detector,) = built.detectors
    assert isinstance(detector, counters.AmaxCounters) and built.linears == detector.linears
    assert built.linears == tuple(f"layers.{layer}.{name}" for layer in (0, 1) for name in names)

# Current scaling: flags of quantizers, which our kernels set.
FP8GlobalStateManager.reset()
mlp = small_mlp()
monitor = monitor_of(mlp)
monitor.reset()
fc1, fc2 = operations_of(mlp, Float8CurrentScaling())
monitor.reset()
made = SimpleNamespace(_data=None, _transpose=None, _scale_inv=None)
Float8CurrentScalingQuantizer.make_empty = lambda self, shape, dtype: made
_, parts = quantizers.empty_result(fc2.get_quantizer("forward", 0), (128, 128), torch.bfloat16)
parts.infinity.fill_(1)
assert monitor.counts()[OPERAND_COUNTS].tolist() == [1, 0, 0]
assert monitor.find(totals_of(monitor), True).describe() == "layers.0.linear_fc2.input (fprop, wgrad): 1 non-finite"
_, parts = quantizers.empty_result(fc1.get_quantizer("backward", 0), (128, 128), torch.bfloat16)
parts.infinity.fill_(1)
assert "layers.0.linear_fc1.grad_output (dgrad, wgrad)" in monitor.find(totals_of(monitor), True).describe()
monitor.reset()
assert monitor.counts()[OPERAND_COUNTS].tolist() == [0, 0, 0] and parts.infinity.item() == 0
