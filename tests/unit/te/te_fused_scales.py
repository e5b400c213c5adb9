"""A program of `test_te_without_cuda.py`: a fused MLP under delayed scaling stores its scales in its linears, and an
output layer with another recipe does not change their updates."""

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from small_te_mlp import small_mlp
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megafp8.te import fused_mlp, layers, patches
from megafp8.te.recipes import OutputLayer

RECIPE = DelayedScaling(amax_history_len=4, fp8_format=Format.HYBRID)
patches.install()
patches.get_fp8_recipe = lambda config: RECIPE
parallel_state.set_tensor_model_parallel_world_size(1)


def fused_linears(mlp: fused_mlp.SwiGLUFusedMLP) -> list[te.ops.BasicLinear]:
    """The operations that represent its linears, as the first forward pass creates them."""
    mlp._fused_impl = (mlp._make_fused_impl(),)
    return fused_mlp.of_linears(mlp._fused_impl[0])


def num_updated() -> int:
    """Sets of scales that Transformer Engine updates after a step."""
    return sum(len(scales) for scales in FP8GlobalStateManager.quantization_state.global_scale_buffer.values())


FP8GlobalStateManager.autocast_enter(enabled=True, fp8_recipe=RECIPE)
mlp = small_mlp()
assert not layers.delayed_state(mlp)
operations = fused_linears(mlp)
assert [type(operation) for operation in mlp._fused_impl[0]][2] is fused_mlp.QuantizingSwiGLU
for linear, operation in zip((mlp.linear_fc1, mlp.linear_fc2), operations, strict=True):
    operation.reset_recipe_state(recipe=RECIPE)
    for number, (mode, index, operand) in enumerate(
        [("forward", 0, "input"), ("forward", 1, "weight"), ("backward", 0, "grad_output")]
    ):
        quantizer = operation.get_quantizer(mode, index)
        quantizer.scale.fill_(2.0 ** (number + 1))
        quantizer.amax.fill_(7.0 + number)
        assert layers.delayed_scale(linear, operand).item() == 2.0 ** (number + 1), operand
assert len(layers.delayed_state(mlp)) == 8 and num_updated() == 4

# High precision for some steps: the fuser drops its state, the linears do not, and nothing is updated twice.
for operation in operations:
    operation.reset_recipe_state(recipe=None)
    assert operation.get_quantizer("forward", 0) is None
    operation.reset_recipe_state(recipe=RECIPE)
    assert operation.get_quantizer("forward", 1).scale.item() == 4.0
assert num_updated() == 4

# A longer history: a step updates the linears' state.
longer = DelayedScaling(amax_history_len=8, fp8_format=Format.HYBRID)
for linear, operation in zip((mlp.linear_fc1, mlp.linear_fc2), operations, strict=True):
    operation.reset_recipe_state(recipe=longer)
    history = linear.fp8_meta["scaling_fwd"].amax_history
    assert history.shape == (8, 3) and history[0].tolist() == [7.0, 8.0, 0.0]
    updated = FP8GlobalStateManager.quantization_state.global_amax_history_buffer.values()
    assert any(tensor is history for tensors in updated for tensor in tensors)
    operation.reset_recipe_state(recipe=RECIPE)

# Its checkpoints load into linears, and vice versa.
state = mlp.linear_fc2.get_extra_state()
loaded = small_mlp()
loaded.linear_fc2.set_extra_state(state)
fresh, restored = fused_linears(loaded)
for operation in (fresh, restored):
    operation.reset_recipe_state(recipe=RECIPE)
assert fresh.get_quantizer("forward", 1).scale.item() == 1.0
assert restored.get_quantizer("forward", 1).scale.item() == 4.0
assert restored.get_quantizer("backward", 0).amax.item() == 9.0
assert torch.equal(loaded.linear_fc2.get_extra_state(), state)

# Other recipes have no state.
plain = small_mlp()
for operation in fused_linears(plain):
    operation.reset_recipe_state(recipe=Float8CurrentScaling())
    assert operation.get_quantizer("forward", 0) is not None
assert not layers.delayed_state(plain)

# FSDP2 sets the weights that it gathers: the operations are made again with them.
assert not plain.has_other_weights()
plain.linear_fc1.weight = torch.nn.Parameter(torch.zeros_like(plain.linear_fc1.weight))
assert plain.has_other_weights()
fused_linears(plain)
assert not plain.has_other_weights()

# With delayed layers and an output layer of another recipe, scales are updated once each way, after all gradients.
FP8GlobalStateManager.reset()
TENSORWISE = Float8CurrentScaling()
events: list[str] = []
recipes: list[object] = []
FP8GlobalStateManager.reduce_and_update_fp8_tensors = classmethod(
    lambda cls, forward=True: events.append("forward" if forward else "backward")
)


class Linear(torch.autograd.Function):
    """How Transformer Engine's linears handle contexts: the first one's backward pass ends with an update."""

    @staticmethod
    def forward(ctx, inputs):
        is_quantizing = FP8GlobalStateManager.is_fp8_enabled()
        recipes.append(FP8GlobalStateManager.get_fp8_recipe() if is_quantizing else None)
        ctx.is_first = is_quantizing and FP8GlobalStateManager.is_first_fp8_module()
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradients):
        events.append("gradient")
        if ctx.is_first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return gradients


TEColumnParallelLinear.forward = lambda self, inputs: (Linear.apply(inputs), None)
output_layer = OutputLayer.__new__(OutputLayer)
torch.nn.Module.__init__(output_layer)
output_layer.own_recipe = TENSORWISE
for _microbatch in range(2):
    events.clear()
    with te.autocast(recipe=RECIPE):
        hidden = Linear.apply(Linear.apply(torch.zeros(2, requires_grad=True)))
    logits, _ = output_layer(hidden)
    assert events == ["forward"], events
    logits.sum().backward()
    assert events == ["forward", *["gradient"] * 3, "backward"], events
output_layer.is_quantizing = False
output_layer(hidden)
assert recipes == [RECIPE, RECIPE, TENSORWISE] * 2 + [None]
assert FP8GlobalStateManager.quantization_state.autocast_depth == 0
