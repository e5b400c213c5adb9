"""A program of `test_te_without_cuda.py`: FSDP2 gathers weights of Transformer Engine's linears as FP8 codes on two
ranks. Its kernels are torch operations here; its linears, tensors and quantizers are real, and so is FSDP2."""

from types import SimpleNamespace
from unittest import mock

import te_without_cuda  # noqa: F401  (first)
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import Float8CurrentScaling, Format, QParams
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.module import layernorm_linear, linear
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.tensor.storage import float8_tensor_storage

from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.fsdp import runtime
from megafp8.fsdp.gradients import CountedGather
from megafp8.quantization.rounding import CODE_DTYPES
from megafp8.quantization.scaling import compute_amax, quant_scale_of
from megafp8.recipes.base import ScaleRule
from megafp8.te import gathered_codes
from megafp8.te.quantizers import FORMATS

HIDDEN, TOKENS, STEPS, MICROBATCHES, EPS = 32, 8, 2, 2, 1e-5
casts: list[str] = []  # what was cast: the rows of a rank, or a complete tensor
stored: list[bool] = []  # whether fprop found a transpose of its weight


def codes(tensor, scale, fmt):
    scaled = (tensor.float() * scale).clamp(-fmt.max, fmt.max)
    return scaled.to(CODE_DTYPES[fmt.name]).view(torch.uint8)


def quantize(tensor, quantizer, output=None, noop_flag=None):
    """A cast by the quantizer's scale, or by current scaling."""
    fmt, is_given = FORMATS[quantizer.dtype.name], isinstance(quantizer, Float8Quantizer)
    casts.append("rows" if is_given else "tensor")
    if is_given:
        output._data.copy_(codes(tensor, quantizer.scale, fmt))
        return output
    rule = ScaleRule.POWER_OF_TWO if quantizer.force_pow_2_scales else ScaleRule.FP32
    scale = quant_scale_of(compute_amax(tensor), fmt, rule).view(1)
    rows = codes(tensor, scale, fmt)
    return Float8Tensor(
        shape=tensor.shape, dtype=tensor.dtype, data=rows, fp8_scale_inv=1 / scale, fp8_dtype=quantizer.dtype,
        data_transpose=rows.t().contiguous() if quantizer.columnwise_usage else None, quantizer=quantizer, device="cpu",
    )  # fmt: skip


def values(operand, is_transposed):
    """The matrix that a GEMM of Hopper reads: of the transposed codes where it sums over rows."""
    assert not (is_transposed and operand._transpose_invalid)
    assert operand._scale_inv.data_ptr() % 16 == 0, "cuBLAS refuses it"
    data = operand._transpose.t() if is_transposed else operand._data
    return data.view(CODE_DTYPES[FORMATS[operand._fp8_dtype.name].name]).float() * operand._scale_inv


def general_gemm(first, second, layout="TN", out_dtype=None, **options):
    """y = x w^T is TN, dx = dy w is NN, dw = dy^T x is NT, with x or w as the first operand."""
    if layout == "TN":
        stored.append(first._transpose is not None)
    first, second = values(first, layout != "TN"), values(second, layout == "NT")
    first, second = (first.t() if layout == "TN" else first), (second.t() if layout == "NT" else second)
    return (second @ first).to(out_dtype), None, None, None


def normalized(inputs, weight):
    return inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + EPS) * weight


def apply_normalization(inputs, _, weight, bias, eps, quantizer, *others):
    result = normalized(inputs, weight)
    return result if quantizer is None else quantizer(result), None, torch.zeros(len(inputs))


def rmsnorm_bwd(gradient, inputs, _, weight, *others):
    with torch.enable_grad():
        given = [tensor.detach().requires_grad_() for tensor in (inputs, weight)]
        return torch.autograd.grad(normalized(*given), given, gradient)


def prepare_forward(self, inputs, num_gemms=1, **options):
    """Without the check for a GPU."""
    self.activation_dtype = inputs.dtype
    self.init_fp8_metadata(num_gemms=num_gemms)
    self._check_weight_tensor_recipe_correspondence()
    return inputs


tex.quantize, tex.compute_amax = quantize, lambda tensor, amax: amax.copy_(compute_amax(tensor))
tex.fp8_transpose = lambda data, dtype, out=None: data.t().contiguous()
tex.rmsnorm_bwd, layernorm_linear.apply_normalization = rmsnorm_bwd, apply_normalization
linear.general_gemm = layernorm_linear.general_gemm = general_gemm
utils._empty_tensor = float8_tensor_storage._empty_tensor = lambda: torch.empty(0)
TransformerEngineBaseModule.prepare_forward = prepare_forward
gathered_codes.get_fp8_recipe = lambda config: config.recipe
assert not utils.is_non_tn_fp8_gemm_supported()  # as on Hopper


class Chunk(nn.Module):
    """As `TorchFSDP`: two layers, each with two linears, which FSDP2 gathers one after the other."""

    def __init__(self, recipe, reshards, recomputes):
        super().__init__()
        torch.manual_seed(0)
        options = {"bias": False, "device": "cpu", "params_dtype": torch.bfloat16}
        self.layers = nn.Sequential(*(
            nn.Sequential(
                te.LayerNormLinear(HIDDEN, 2 * HIDDEN, normalization="RMSNorm", eps=EPS, **options),
                te.Linear(2 * HIDDEN, HIDDEN, **options),
            )
            for _ in range(2)
        ))  # fmt: skip
        self.linears = [each for layer in self.layers for each in layer]
        for each in self.linears:
            each.weight.data.copy_(torch.randn(each.weight.shape) / 8)
            each.config = SimpleNamespace(recipe=recipe)
        mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in (*self.layers, self.layers):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        self.process_group, self.quantized_weights, self.recomputes = mesh.get_group(), [], recomputes

    def start(self):
        """What megatron-core's schedule does before the first microbatch of a step or an evaluation."""
        for each in self.linears:
            each.is_first_microbatch = True

    def forward(self, hidden):
        if self.recomputes:
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
        else:
            hidden = self.layers(hidden)
        for each in self.linears:
            each.is_first_microbatch = False  # as megatron-core's linears do
        return hidden


def trained(gathers_codes, recipe, reshards, recomputes=False):
    """Gradients and outputs of all steps, bytes gathered in the last one, and its casts of rows and tensors."""
    with mock.patch("torch.cuda.is_available", lambda: True):
        chunk = Chunk(recipe, reshards, recomputes)
    if gathers_codes:
        runtime.give_codes(chunk, *gathered_codes.codes_by_linear(MODEL, PRECISION, chunk))
    traffic, found = CountedGather([chunk]), []
    random = torch.Generator().manual_seed(dist.get_rank())
    for _step in range(STEPS):
        traffic.take()
        casts.clear()
        chunk.start()
        for _microbatch in range(MICROBATCHES):
            hidden = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16().requires_grad_()
            with te.autocast(recipe=recipe):
                output = chunk(hidden)
                output.float().square().mean().backward()
            found.append(hidden.grad)
        received, num_rows = traffic.take(), casts.count("rows")
        num_tensors = len(casts) - num_rows
        for weight in chunk.parameters():
            gradient = weight.grad.to_local()
            assert gradient.dtype == torch.bfloat16 and type(gradient) is torch.Tensor
            found.append(gradient.clone())
            weight.data.to_local().sub_(gradient)
            weight.grad = None
        chunk.start()
        with torch.no_grad(), te.autocast(recipe=recipe):
            found.append(chunk(hidden.detach()))
    for _, record in chunk.quantized_weights:
        assert type(record._unsharded_param) is Float8Tensor and record._unsharded_param._transpose is None
    return found, received, num_rows, num_tensors


# The layers of `Chunk` are the inner two of four. The other two are in BF16.
NAMES = [f"layers.{layer}.linear_{linear}" for layer in (1, 2) for linear in ("fc1", "fc2")]
gathered_codes.named_linears = lambda chunk: [*zip(NAMES, chunk.linears, strict=True), ("layers.0.linear_fc1", None)]
MODEL = ModelConfig(num_layers=4)
PRECISION = PrecisionConfig(
    bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise", fp8_param_gather=True, first_last_layers_bf16=True,
    num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1,
)  # fmt: skip
PLAIN = Float8CurrentScaling(fp8_format=Format.HYBRID)
POWERS = Float8CurrentScaling(fp8_format=Format.E4M3)
POWERS.fp8_quant_fwd_weight = QParams(power_2_scale=True)
CASES = {"plain": (PLAIN, True), "kept": (PLAIN, False), "powers": (POWERS, True), "again": (PLAIN, True, True)}


def both():
    stored.clear()
    return {name: [trained(gathers, *case) for gathers in (False, True)] for name, case in CASES.items()}, any(stored)


with mock.patch("torch.cuda.is_available", lambda: False):
    answers = run_ranks(2, both)
# Of a gather of all layers, in codes.
NUM_LINEARS, LINEARS, NORMS = 4, 4 * HIDDEN * 2 * HIDDEN, 2 * HIDDEN * 2
for per_case, keeps_transposes in answers:
    assert not keeps_transposes
    for name, ((bf16, bf16_bytes, no_rows, _), (fp8, fp8_bytes, num_rows, num_tensors)) in per_case.items():
        assert all(torch.equal(one, other) for one, other in zip(bf16, fp8, strict=True)), name
        assert all(one.isfinite().all() for one in bf16) and not torch.equal(bf16[0], bf16[-1])
        assert (no_rows, num_rows) == (0, NUM_LINEARS), name
        passes = 3 if name == "again" else 2
        assert num_tensors == MICROBATCHES * NUM_LINEARS * passes, "inputs and gradients, and no weights"
        amaxes = 4 * NUM_LINEARS
        assert (fp8_bytes - amaxes) * (2 * LINEARS + NORMS) == bf16_bytes * (LINEARS + NORMS), name
