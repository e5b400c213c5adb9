"""A program of `test_te_without_cuda.py`: FP8 weights of Transformer Engine with Muon on two ranks, each cast by its
owner. Its kernels are torch operations here; its tensors, quantizers and cast of master weights are real."""

from types import SimpleNamespace
from unittest import mock

import te_without_cuda  # noqa: F401  (first)
import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from megatron.core import fp8_utils
from ranks import run_ranks
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import utils as tensor_utils
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer, Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)

from megafp8.optimizer.layer_wise import Ownership, adopt_fp8_weights
from megafp8.quantization.scaling import compute_amax

SHAPES = {"large": (256, 128), "middle": (128, 128), "small": (128, 128)}
E4M3, SIDE = torch.float8_e4m3fn, 128


def codes(values, scale):
    return (values.float() * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)


def blocks(values):
    """[rows, SIDE, columns, SIDE]: the blocks of a matrix, and what has a number for each of them."""
    return values.view(-1, SIDE, values.shape[1] // SIDE, SIDE)


def quantize(source, quantizer, to, *_):
    to._data.copy_(codes(source, quantizer.scale).view(to._data.shape))
    if quantizer.amax.numel():
        quantizer.amax.copy_(compute_amax(source))


def scale_and_inverse(_, overflow, lists, largest, is_power_of_two, epsilon):
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(largest / amax)
        inverse.copy_(1 / scale)


def partial_amax(master, amax, height, width, start, side):
    assert start == 0 and master.numel() == height * width
    amax[:, : width // side] = blocks(master.view(height, width)).abs().amax(dim=(1, 3))


def partial_cast(master, out, scale, height, width, *_):
    scaled = blocks(master.view(height, width)).float() * scale[:, None, : width // SIDE, None]
    out.copy_(scaled.to(E4M3).view(torch.uint8).flatten())


def copy_lists(_, overflow, lists, factor):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


tex.quantize, tex.compute_amax = quantize, lambda tensor, amax: amax.copy_(compute_amax(tensor))
tex.fp8_transpose = lambda data, dtype, out=None: data.t().contiguous()
tex.fp8_block_scaling_compute_partial_amax, tex.fp8_block_scaling_partial_cast = partial_amax, partial_cast
tensor_utils.multi_tensor_scale, tensor_utils.multi_tensor_compute_scale_and_scale_inv = copy_lists, scale_and_inverse
tensor_utils.multi_tensor_applier = lambda operation, *args: operation(None, *args)


def empty(recipe, shape):
    """A weight whose codes were not written yet."""
    data, transpose = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape[::-1], dtype=torch.uint8)
    given = {
        "shape": shape,
        "dtype": torch.bfloat16,
        "fp8_dtype": DType.kFloat8E4M3,
        "requires_grad": True,
        "device": "cpu",
    }
    if recipe == "blockwise":
        quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=False)
        scales = [torch.ones(quantizer.get_scale_shape(shape, is_columnwise)) for is_columnwise in (False, True)]
        return Float8BlockwiseQTensor(
            rowwise_data=data, rowwise_scale_inv=scales[0], columnwise_data=transpose, columnwise_scale_inv=scales[1],
            quantizer=quantizer, is_2D_scaled=True, **given,
        )  # fmt: skip
    if recipe == "delayed":
        quantizer = Float8Quantizer(torch.full((1,), 32.0), torch.zeros(1), DType.kFloat8E4M3)
    else:
        quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"))
    return Float8Tensor(data=data, fp8_scale_inv=torch.ones(1), data_transpose=transpose, quantizer=quantizer, **given)


def check(recipe, weight, master):
    """Codes, their transpose and scales are those of the rounded master weight."""
    values = master.bfloat16().float()
    if recipe == "blockwise":
        scale = 448 / blocks(values).abs().amax(dim=(1, 3))
        expected = (blocks(values) * scale[:, None, :, None]).to(E4M3).view(torch.uint8).view(values.shape)
        found = weight._rowwise_data, weight._columnwise_data, weight._rowwise_scale_inv[:, : scale.shape[1]]
    else:
        scale = weight._quantizer.scale if recipe == "delayed" else (448 / compute_amax(values)).view(1)
        expected, found = codes(values, scale), (weight._data, weight._transpose, weight._scale_inv)
        assert recipe != "delayed" or weight._quantizer.amax.item() == compute_amax(values).item()
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected.t()) and torch.equal(found[2], 1 / scale)


def shared(recipe):
    """Cast and share the weights of an update, and of a replacement."""
    torch.manual_seed(0)
    rank, group = dist.get_rank(), dist.group.WORLD
    weights = {name: empty(recipe, shape) for name, shape in SHAPES.items()}
    norm = torch.nn.Parameter(torch.ones(128).bfloat16())
    initial = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    updates = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    ownership = Ownership.divide([*weights.values(), norm], group)
    for name, weight in weights.items():
        # As `trainable_only` and megatron-core's optimizer leave them.
        is_own = any(weight is own for own in ownership.of_this_rank)
        weight.main_param = weight.detach().clone().float() if is_own else None
        weight._high_precision_init_val = initial[name]
        assert is_own == ((name == "large") == (rank == 0)) and (not is_own or not weight.main_param.any())
    own = [weight for weight in weights.values() if weight.main_param is not None]
    part = SimpleNamespace(float16_groups=[own])
    adopt_fp8_weights(part)
    masters = {name: weight.main_param for name, weight in weights.items() if weight.main_param is not None}
    for name, master in masters.items():
        assert torch.equal(master, initial[name].float())
        master.copy_(updates[name])
    norm.data.fill_(2.0 if rank == 0 else 1.0)  # its owner, the first of two with as much
    part._copy_main_params_to_model_params()
    assert not any(weight.dequantize().any() for weight in own), "casts are left to `share`"
    received = ownership.share({})
    assert received == (2 * 128 * 128 if rank == 0 else 256 * 128 + 2 * 128), received
    for name, weight in weights.items():
        check(recipe, weight, updates[name])
    assert norm.unique().item() == 2.0
    ownership.share({master: -2 * master for master in masters.values()})
    for name, weight in weights.items():
        check(recipe, weight, -2 * updates[name])
    for name in masters if recipe != "blockwise" else ():  # which compiled code decodes
        masters[name].copy_(weights[name].data)  # as megatron-core does where only weights are loaded
        assert torch.equal(masters[name], weights[name].dequantize(dtype=torch.float32)) and masters[name].any()
    return True


assert fp8_utils.HAVE_TE_FP8_TENSOR_CLASS
RECIPES = ("delayed", "tensorwise", "blockwise")
with mock.patch("torch.cuda.is_available", lambda: False):
    assert run_ranks(2, lambda: [shared(recipe) for recipe in RECIPES]) == [[True] * 3] * 2
