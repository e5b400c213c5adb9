"""A program of `test_te_without_cuda.py`: a linear that a run moves to high precision quantizes no more, whatever its
precision came from, and its neighbors and all scales go on as before."""

from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from small_te_mlp import operations_of, small_mlp
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megafp8.config import precision_schedule
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.nonfinite.policy import move_grouped_experts
from megafp8.te import counters, layers, patches, quantizers, recipes
from megafp8.te.counters import AmaxCounters
from megafp8.te.high_precision_fallback import move_to_high_precision, split
from megafp8.te.recipes import OutputLayer, apply_precision_map, set_precision, wrap_with_recipe

DELAYED = DelayedScaling(amax_history_len=4, fp8_format=Format.HYBRID, amax_compute_algo="max", reduce_amax=False)
TENSORWISE = Float8CurrentScaling()
NAMES = ("layers.0.linear_qkv", "layers.0.linear_proj", "layers.0.linear_fc1", "layers.0.linear_fc2")
patches.install()
patches.get_fp8_recipe = lambda config: DELAYED
parallel_state.set_tensor_model_parallel_world_size(1)
ran: list[tuple[nn.Module, bool]] = []
events: list[str] = []


class Product(torch.autograd.Function):
    """How Transformer Engine's linears handle contexts: the first one's backward pass ends with an update."""

    @staticmethod
    def forward(ctx, inputs, linear, width):
        is_quantizing = FP8GlobalStateManager.is_fp8_enabled()
        ran.append((linear, is_quantizing))
        linear.init_fp8_metadata()
        if is_quantizing:
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(linear.fp8_meta)
            for key, quantizer in (("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0)):
                if hasattr(linear.quantizers[key][quantizer], "amax"):
                    linear.quantizers[key][quantizer].amax.fill_(2.0)
        ctx.is_first = is_quantizing and FP8GlobalStateManager.is_first_fp8_module()
        ctx.width = inputs.shape[-1]
        return inputs.new_zeros(*inputs.shape[:-1], width)

    @staticmethod
    def backward(ctx, gradients):
        events.append("gradient")
        if ctx.is_first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
            events.append("update")
        return gradients.new_zeros(*gradients.shape[:-1], ctx.width), None, None


def forward(self: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
    """As megatron-core's linears: the output and no bias."""
    return Product.apply(inputs, self, self.weight.shape[0]), None


te.Linear.forward = te.LayerNormLinear.forward = TEColumnParallelLinear.forward = forward


class Layer(nn.Module):
    """A chunk with one layer, whose MLP is fused."""

    def __init__(self, returns_input: bool = False):
        super().__init__()
        layer = TransformerLayer.__new__(TransformerLayer)
        nn.Module.__init__(layer)
        layer.layer_number, layer.self_attention, layer.mlp = 1, nn.Module(), small_mlp(returns_input)
        for name in ("linear_qkv", "linear_proj"):
            setattr(layer.self_attention, name, te.Linear(32, 32, bias=False, device="cpu"))
        vars(layer.mlp.config).update(use_te_activation_func=False, bias_activation_fusion=True, cpu_offloading=False)
        self.layer = layer

    @property
    def linears(self) -> list[nn.Module]:
        attention, mlp = self.layer.self_attention, self.layer.mlp
        return [attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2]

    def step(self, recipe: object) -> list[bool]:
        """Forward and backward through all linears; whether each quantized."""
        ran.clear()
        events.clear()
        hidden = torch.zeros(2, 1, 32, requires_grad=True)
        with te.autocast(recipe=recipe):
            joined, _ = self.layer.self_attention.linear_qkv(hidden)
            projected, _ = self.layer.self_attention.linear_proj(joined)
            output, bias = self.layer.mlp(projected)
        if self.layer.mlp.returns_input:
            output, given = output
            assert given is projected
        assert bias is None and [linear for linear, _ in ran] == self.linears
        output.sum().backward()
        return [is_quantizing for _, is_quantizing in ran]


def listed() -> list[int]:
    """The histories that Transformer Engine updates."""
    state = FP8GlobalStateManager.quantization_state
    assert [len(each) for each in state.global_amax_buffer.values()] == [
        len(each) for each in state.global_scale_buffer.values()
    ]
    return [history.data_ptr() for each in state.global_amax_history_buffer.values() for history in each]


def histories(linear: nn.Module) -> list[torch.Tensor]:
    return [linear.fp8_meta[key].amax_history for key in ("scaling_fwd", "scaling_bwd")]


# Delayed scaling: linear_fc2 leaves a fused MLP. Its scales stay, those of linear_fc1 are updated once a step.
for returns_input in (False, True):
    FP8GlobalStateManager.reset()
    chunk = Layer(returns_input)
    mlp = chunk.layer.mlp
    with te.autocast(recipe=DELAYED):
        operations = operations_of(mlp, DELAYED)
        operations[1].get_quantizer("forward", 0).amax.fill_(7.0)
    assert histories(mlp.linear_fc2)[0].data_ptr() in listed()
    kept = [tensor.clone() for tensor in (*histories(mlp.linear_fc2), *layers.delayed_scales(mlp)[2:])]
    move_to_high_precision([chunk], [NAMES[3], "layers.7.linear_qkv"])
    assert mlp.is_split and not set(listed()) & {each.data_ptr() for each in histories(mlp.linear_fc1)}
    for _ in range(3):
        assert chunk.step(DELAYED) == [True, True, True, False]
    assert len(listed()) == len(set(listed())) == 6
    assert histories(mlp.linear_fc1)[0][:, 0].tolist() == [0.0, 2.0, 2.0, 2.0]
    assert mlp.linear_fc1.fp8_meta["scaling_fwd"].scale[0] == 448 / 2
    now = (*histories(mlp.linear_fc2), *layers.delayed_scales(mlp)[2:])
    assert all(torch.equal(*pair) for pair in zip(kept, now, strict=True))

# The first linear of all: the next one causes the update after the backward pass. Moving it again changes nothing.
move_to_high_precision([chunk], [NAMES[0]])
for _ in range(2):
    assert chunk.step(DELAYED) == [False, True, True, False]
    assert events == ["gradient"] * 3 + ["update", "gradient"], events
    move_to_high_precision([chunk], [NAMES[0]])
assert len(listed()) == 4

# A resumed run moves before its first step, and has the same state in its checkpoint.
states = [linear.get_extra_state() for linear in chunk.linears]
FP8GlobalStateManager.reset()
resumed = Layer()
for linear, state in zip(resumed.linears, states, strict=True):
    linear.config = SimpleNamespace(fp8="hybrid")
    linear.set_extra_state(state)
move_to_high_precision([resumed], [NAMES[3], NAMES[0]])
assert resumed.step(DELAYED) == [False, True, True, False] and len(listed()) == 4
FP8GlobalStateManager.reset()
move_to_high_precision([resumed], NAMES)
assert resumed.step(DELAYED) == [False] * 4 and not listed() and events == ["gradient"] * 4

# Steps in high precision (`--fp8-schedule`), and a linear with a recipe of its own.
FP8GlobalStateManager.reset()
chunk = Layer()
qkv, proj, _, fc2 = chunk.linears
for linear in (qkv, proj):
    wrap_with_recipe(linear, TENSORWISE, None)
qkv._fp8_workspaces["weight"] = torch.zeros(1)
move_to_high_precision([chunk], [NAMES[0], NAMES[3]])
assert not qkv._fp8_workspaces
assert chunk.step(TENSORWISE) == [False, True, True, False]
for linear in (qkv, proj, fc2):
    linear.is_quantizing = False
with te.autocast(enabled=False):
    qkv(torch.zeros(2, 1, 32))
    assert ran[-1] == (qkv, False)

# Phases of a map: the layer's recipe, then high precision for a linear. One that the run moved stays moved.
phases = PrecisionConfig(fp8_format="e4m3", fp8_recipe="tensorwise", fp8_schedule="fp8:1,fp8[layers.0.linear_qkv=bf16]")
model = ModelConfig(num_layers=1)
parallel_state.get_amax_reduction_group = lambda **options: None
for is_moved in (False, True):
    FP8GlobalStateManager.reset()
    chunk = Layer()
    chunk.post_process = False
    split(chunk.layer.mlp)
    recipes.named_linears = lambda chunk: zip(NAMES, chunk.linears, strict=True)
    apply_precision_map(chunk, model, phases)
    quantized = []
    for step in (1, 2, 1):
        set_precision(model, precision_schedule.precision_at(phases, step), [chunk])
        if is_moved:
            move_to_high_precision([chunk], [NAMES[0]])
        quantized.append(chunk.step(TENSORWISE))
    assert quantized == [[not is_moved, True, True, True], [False, True, True, True], [not is_moved, True, True, True]]

# An MLP that is split has new quantizers, which get their flags.
chunk = Layer()
counters.named_linears = lambda chunk: zip(NAMES, chunk.linears, strict=True)
seen = AmaxCounters(NAMES, [chunk], torch.device("cpu"))
with te.autocast(recipe=TENSORWISE):
    operations = operations_of(chunk.layer.mlp, TENSORWISE)
seen.reset()
assert hasattr(operations[0].get_quantizer("forward", 0), quantizers.INFINITY)
move_to_high_precision([chunk], [NAMES[3]])
assert chunk.step(TENSORWISE)[2:] == [True, False]
seen.reset()
getattr(chunk.layer.mlp.linear_fc1.quantizers["scaling_fwd"][0], quantizers.INFINITY).fill_(1)
assert seen.counts().tolist() == [1, 0, 0] and seen.find()[2].any() and not seen.find()[[0, 1, 3]].any()

# The output layer.
chunk.output_layer = OutputLayer.__new__(OutputLayer)
nn.Module.__init__(chunk.output_layer)
chunk.output_layer.weight, chunk.output_layer._fp8_workspaces = nn.Parameter(torch.zeros(4, 32)), {}
chunk.output_layer.fp8_meta, chunk.output_layer.own_recipe = {"recipe": TENSORWISE}, TENSORWISE
chunk.output_layer.init_fp8_metadata = lambda: None
chunk.output_layer.quantizers = {"scaling_fwd": [None] * 2, "scaling_bwd": [None]}
for is_quantizing in (True, False):
    chunk.output_layer(torch.zeros(2, 1, 32))
    assert ran[-1] == (chunk.output_layer, is_quantizing)
    move_to_high_precision([chunk], ["output_layer"])

# All experts of a layer in one launch.
experts = GroupedExperts.__new__(GroupedExperts)
nn.Module.__init__(experts)
experts.linear_fc1 = experts.linear_fc2 = nn.Parameter(torch.zeros(2, 4, 4))
experts.rule = experts.codes = SimpleNamespace()
experts.quantizer_state = nn.ModuleDict()
mixture = MoELayer.__new__(MoELayer)
nn.Module.__init__(mixture)
mixture.experts, mixture.shared_experts = experts, None
chunk.layer.mlp = mixture
move_grouped_experts([chunk], [NAMES[1]])
assert experts.rule is not None
move_grouped_experts([chunk], [NAMES[1], "layers.0.experts.0.linear_fc1", "layers.0.experts.1.linear_fc1"])
assert experts.rule is None and experts.codes is None
