"""A program of `test_te_without_cuda.py`: FP8 attention has the requested recipe, and its delayed-scaling state is
saved in checkpoints, used after a load, and restored after a skipped step."""

from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine.pytorch as te
from megatron.core import fp8_utils
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer import TransformerConfig
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megafp8.config import flags
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.mcore.config import build_transformer_config
from megafp8.te import layers, patches
from megafp8.te.attention import FP8Attention
from megafp8.training.precision import DelayedScalingSnapshot

patches.install()
FLAGS = "--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-dot-product-attention"
GROUP = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
OF_FORWARD, OF_BACKWARD = 9, 6  # Transformer Engine's names of attention's tensors


def core_config(text: str) -> TransformerConfig:
    """megatron-core's configuration of a run."""
    config = flags.parse(f"--num-layers 1 --hidden-size 256 --num-attention-heads 2 {text}".split()).config
    return build_transformer_config(config, TRANSFORMER_ENGINE, on_cuda=False)


def attention() -> FP8Attention:
    """Two heads of 128, without a model around them."""
    built = FP8Attention.__new__(FP8Attention)
    te.DotProductAttention.__init__(built, num_attention_heads=2, kv_channels=128)
    built.config, built._tp_group = CONFIG, GROUP
    return built


def registered() -> list[torch.Tensor]:
    """The scales that Transformer Engine updates after a step."""
    buffers = FP8GlobalStateManager.quantization_state.global_scale_buffer.values()
    return [tensor for tensors in buffers for tensor in tensors]


CONFIG = core_config(FLAGS)
RECIPE = fp8_utils.get_fp8_recipe(CONFIG)
assert RECIPE.fp8_dpa and not RECIPE.fp8_mha
assert not fp8_utils.get_fp8_recipe(core_config(FLAGS.rsplit(maxsplit=1)[0])).fp8_dpa

FP8GlobalStateManager.autocast_enter(enabled=True, fp8_recipe=RECIPE)
first = attention()
assert not layers.delayed_state(first) and not first.get_extra_state().numel()
first.init_fp8_metadata(num_gemms=3)
state = layers.delayed_state(first)
assert [len(tensor.flatten()) for tensor in state] == [OF_FORWARD, 4 * OF_FORWARD, OF_BACKWARD, 4 * OF_BACKWARD]
for number, tensor in enumerate(state):
    tensor.fill_(2.0 ** (number + 1))

# A load comes before the first pass, which then finds the scales where quantizers and updates read them.
second = attention()
second.set_extra_state(first.get_extra_state())
assert all(torch.equal(a, b) for a, b in zip(layers.delayed_state(second), state, strict=True))
second.init_fp8_metadata(num_gemms=3)
FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(second.fp8_meta)
scale = second.fp8_meta["scaling_fwd"].scale
assert scale.tolist() == [2.0] * OF_FORWARD
assert all(quantizer.scale.item() == 2.0 for quantizer in second.quantizers["scaling_fwd"])
assert any(tensor is scale for tensor in registered())
assert torch.equal(second.get_extra_state(), first.get_extra_state())

# Linears may have scales of a checkpoint when attention has none: the check waits for them.
model = torch.nn.ModuleList([te.Linear(32, 32, bias=False, device="cpu"), attention()])
assert layers.lacks_scales_of_attention(model)
model[0].init_fp8_metadata(num_gemms=1)
memory = DelayedScalingSnapshot([model], TRANSFORMER_ENGINE)
for _step in range(3):
    memory.save()
model[1].init_fp8_metadata(num_gemms=3)
assert not layers.lacks_scales_of_attention(model) and not layers.lacks_scales_of_attention(model[0])
for _step in range(2):
    memory.save()
for tensor in layers.delayed_state(model):
    tensor.fill_(float("nan"))
memory.restore()
assert len(layers.delayed_state(model)) == 8
assert not any(tensor.isnan().any() for tensor in layers.delayed_state(model))

# megatron-core's own class omits them from its checkpoints. Ours has one object per layer.
(saved,) = second.sharded_state_dict("core_attention.", metadata={"dp_cp_group": GROUP}).values()
assert saved.key == "core_attention._extra_state" and torch.equal(saved.data, second.get_extra_state())
assert not TEDotProductAttention.sharded_state_dict(second, "core_attention.", metadata={"dp_cp_group": GROUP})
