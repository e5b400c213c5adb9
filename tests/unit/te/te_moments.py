"""A program of `test_te_without_cuda.py`: FP8 and FP16 moments of Transformer Engine's Adam, read and stored, and FP8
weights as statistics see them."""

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine_torch as library
from torch import Tensor
from transformer_engine.pytorch.optimizers import fused_adam
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

from megafp8.optimizer.tensor_table import get_moment
from megafp8.te import patches
from megafp8.training.extensions.statistics_hooks import master_values

NAMES = {"exp_avg": torch.uint8, "exp_avg_sq": torch.float16}


def empty(quantizer: Float8Quantizer, shape: list[int], dtype: torch.dtype, *_: object) -> Float8Tensor:
    """As the library does on a GPU before Blackwell."""
    transpose = torch.empty(shape, dtype=torch.uint8) if quantizer.columnwise_usage else None
    return Float8Tensor(
        shape=shape, dtype=dtype, data=torch.empty(shape, dtype=torch.uint8), fp8_scale_inv=1 / quantizer.scale,
        fp8_dtype=quantizer.dtype, data_transpose=transpose, quantizer=quantizer, device=torch.device("cpu"),
    )  # fmt: skip


def quantize(source: Tensor, quantizer: Float8Quantizer, to: Float8Tensor, *_: object) -> None:
    """As the library does, by rows."""
    assert (to._transpose is None) == (not quantizer.columnwise_usage)
    to._data.copy_((source * quantizer.scale).to(torch.float8_e4m3fn).view(torch.uint8))
    to._scale_inv.copy_(1 / quantizer.scale)


library.create_empty_quantized_tensor, library.quantize = empty, quantize
patches.install()
adam = fused_adam.FusedAdam.__new__(fused_adam.FusedAdam)  # without buffers on a GPU
torch.optim.Optimizer.__init__(adam, [torch.nn.Parameter(torch.zeros(300)) for _ in range(200)], {})
adam.name_to_dtype_map, adam._scales, adam.master_weights = NAMES, {}, False
adam.dtype_to_range_map, adam.store_param_remainders = {}, False

generator = torch.Generator().manual_seed(0)
for number, shard in enumerate(adam.param_groups[0]["params"]):
    adam.initialize_state(shard, False)
    size = 0.0 if number == 0 else 10 ** (20 * torch.rand(1, generator=generator).item() - 15)
    for name in NAMES:
        adam.set_scaled_state(shard, name, torch.randn(300, generator=generator).abs() * size)
    fp8, (codes, fp8_scale) = adam.state[shard]["exp_avg"], get_moment(adam, shard, "exp_avg")
    halves, fp16_scale = get_moment(adam, shard, "exp_avg_sq")
    assert fp8._transpose is None and not fp8._quantizer.columnwise_usage
    # The kernel reads and writes what Transformer Engine reads.
    values = {name: adam.get_unscaled_state(shard, name).clone() for name in NAMES}
    assert all(torch.isfinite(value).all() and value.any() == (number > 0) for value in values.values())
    assert torch.equal(codes.view(torch.float8_e4m3fn).float() * fp8_scale.dequant, values["exp_avg"])
    assert torch.equal(halves.float() * fp16_scale.dequant, values["exp_avg_sq"])
    assert torch.equal(1 / fp8_scale.nominal, fp8_scale.quant) and torch.equal(1 / fp8_scale.quant, fp8_scale.dequant)
    # As a checkpoint does.
    tensors = (codes, fp8_scale.nominal, fp8_scale.quant, fp8_scale.dequant, halves, fp16_scale.nominal)
    before = [tensor.clone() for tensor in tensors]
    for name in NAMES:
        adam.set_scaled_state(shard, name, values[name])
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert get_moment(adam, shard, "exp_avg")[0] is codes and get_moment(adam, shard, "exp_avg")[1] == fp8_scale

# Weights that represent BF16 have products of codes and an FP32 scale, which have more bits.
quantizer = adam.state[shard]["exp_avg"]._quantizer
quantizer.scale.fill_(3.0)
weight = torch.nn.Parameter(quantizer.make_empty([300], dtype=torch.bfloat16))
weight.data._data.copy_(codes)
found = master_values(weight, has_masters=False)
assert torch.equal(found, codes.view(torch.float8_e4m3fn).float() * weight._scale_inv) and not found.requires_grad
