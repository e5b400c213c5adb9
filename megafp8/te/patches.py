"""Patches of Transformer Engine 2.20, for performance and for bugs. No other file patches it, but `gemm_ranges.py`
while a profile is recorded.

The evidence of a patch names files below `transformer_engine/` and a text in each that makes it necessary. A test fails
when a text is gone, so that a patch does not outlive its reason.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Collection
from typing import Any, Optional

import torch
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.dot_product_attention import backends
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.ops._common import get_dummy_wgrads_for_params
from transformer_engine.pytorch.ops.basic import BasicLinear
from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import Quantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

from megafp8.mcore.patches import Patch
from megafp8.quantization.scaling import MOMENT_FORMAT_MAX, master_dequant_scale, moment_dequant_scale
from megafp8.recipes import registry
from megafp8.te import quantizers

DELAYED_TENSORS = ("scale", "amax_history")
DIRECTIONS = ("fwd", "bwd")


def is_flat(tensor: Tensor) -> bool:
    """Whether a tensor is one row, as the distributed optimizer's shards of weights are."""
    return tensor.dim() == 1 or (tensor.dim() == 2 and tensor.shape[0] == 1)


def cast_flat_shards_by_rows() -> None:
    """Do not transpose shards of weights: the transpose of the complete weight is made after the gather."""
    plain = Float8Quantizer.update_quantized

    @functools.wraps(plain)
    def update_quantized(
        self: Float8Quantizer, src: Tensor, dst: Float8Tensor, *, noop_flag: Optional[Tensor] = None
    ) -> Float8Tensor:
        quantizer = self
        if self.columnwise_usage and is_flat(src) and getattr(dst, "_transpose", None) is None:
            quantizer = self.copy()
            quantizer.set_usage(columnwise=False)
        return plain(quantizer, src, dst, noop_flag=noop_flag)

    # On the class, so that quantizers that exist already use it, too.
    Float8Quantizer.update_quantized = update_quantized


def scale_moments_to_stay() -> None:
    """Use `moment_dequant_scale` for Adam's moments, and `master_dequant_scale` for FP16 master weights.

    Transformer Engine gives an all-zero FP8 moment the scale 0, whose reciprocal makes every element NaN. A moment
    or master weight that is read in FP32 and stored again may get an adjacent scale, so that a resumed run is not
    identical to the bit. The scale of master weights has not run on a GPU.
    """
    plain = FusedAdam._apply_scale

    @functools.wraps(plain)
    def apply_scale(self: FusedAdam, name: str, values: Tensor, stored: Tensor, scale: Tensor) -> None:
        is_fp8 = isinstance(stored, Float8Tensor)
        if not (is_fp8 or stored.dtype == torch.float16):
            plain(self, name, values, stored, scale)
            return
        # One pass, and no tensor of magnitudes.
        smallest, largest = torch.aminmax(values)
        amax = torch.maximum(-smallest, largest)
        if name == "master_param":
            scale.copy_(master_dequant_scale(amax))
        else:
            format_max = MOMENT_FORMAT_MAX[torch.uint8 if is_fp8 else torch.float16]
            scale.copy_(moment_dequant_scale(amax, format_max))
        if is_fp8:
            stored._quantizer.scale.copy_(1 / scale)
            stored.copy_(values)
        else:
            stored.copy_(values.to(scale.device) * (1 / scale))

    FusedAdam._apply_scale = apply_scale


def keep_moments_by_rows() -> None:
    """Do not transpose FP8 moments: no GEMM reads them, and the transpose is a second copy and a slow cast."""
    plain = FusedAdam._initialize_state

    @functools.wraps(plain)
    def initialize_state(self: FusedAdam, parameter: Tensor, name: str, *options: Any, **named: Any) -> None:
        plain(self, parameter, name, *options, **named)
        stored = self.state[parameter][name]
        if isinstance(stored, Float8Tensor):
            stored._quantizer.set_usage(columnwise=False)
            stored.update_usage(columnwise_usage=False)

    FusedAdam._initialize_state = initialize_state


def save_delayed_state_as_tensors() -> None:
    """Save amax histories and scales as tensors: Transformer Engine pickles them, and then refuses to load pickles."""
    plain_get, plain_set = TransformerEngineBaseModule.get_extra_state, TransformerEngineBaseModule.set_extra_state

    @functools.wraps(plain_get)
    def get_extra_state(self: TransformerEngineBaseModule) -> Tensor:
        if not isinstance(self.fp8_meta.get("recipe"), DelayedScaling) or "scaling_fwd" not in self.fp8_meta:
            return plain_get(self)
        return serialize_tensors(delayed_tensors(self.fp8_meta))

    @functools.wraps(plain_set)
    def set_extra_state(self: TransformerEngineBaseModule, state: Optional[Tensor]) -> None:
        tensors = deserialize_tensors(state)
        if tensors is None:
            plain_set(self, state)
            return
        recipe = get_fp8_recipe(self.config) if self.config.fp8 else None
        if not isinstance(recipe, DelayedScaling):
            return  # a checkpoint of delayed scaling resumes under a stateless recipe
        self.fp8_meta["recipe"] = recipe
        # A linear sets it in its first forward pass.
        self.fp8_meta.setdefault("num_gemms", getattr(self, "num_gemms", 1))
        self.init_fp8_meta_tensors(recipe)
        for name, current in delayed_tensors(self.fp8_meta).items():
            current.copy_(tensors[name])

    TransformerEngineBaseModule.get_extra_state = get_extra_state
    TransformerEngineBaseModule.set_extra_state = set_extra_state


def delayed_tensors(fp8_meta: dict[str, Any]) -> dict[str, Tensor]:
    """The scales and amax histories of one module by name, not copied."""
    return {
        f"{kind}_{direction}": getattr(fp8_meta[f"scaling_{direction}"], kind)
        for direction in DIRECTIONS
        if f"scaling_{direction}" in fp8_meta
        for kind in DELAYED_TENSORS
    }


def serialize_tensors(tensors: dict[str, Tensor]) -> Tensor:
    """Serialize tensors to one uint8 tensor on the CPU."""
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, file)
    # `frombuffer` wants writable memory.
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def deserialize_tensors(state: Optional[Tensor]) -> Optional[dict[str, Tensor]]:
    """The tensors that `serialize_tensors` was given; None for other states. Loading executes no code of the state."""
    if not isinstance(state, Tensor) or not state.numel():
        return None
    try:
        return torch.load(io.BytesIO(state.cpu().numpy().tobytes()), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return None  # Transformer Engine reports what is wrong with it


def overwrite_without_adding() -> None:
    """Return dummy weight gradients to autograd: one that overwrote `main_grad` would be added to itself."""
    plain = BasicLinear.op_backward

    @functools.wraps(plain)
    def op_backward(self: BasicLinear, ctx: Any, grad_output: Tensor) -> tuple[Tensor, list[Optional[Tensor]]]:
        grad_input, gradients = plain(self, ctx, grad_output)
        if ctx.weight_requires_grad and self._accumulate_into_main_grad:
            gradients = get_dummy_wgrads_for_params([self.weight])
        return grad_input, gradients

    BasicLinear.op_backward = op_backward


class WithoutZeros(TorchDispatchMode):
    """Zeros are not written into tensors [tokens, heads, channels]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_zero = func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0)
        return args[0] if is_zero and args[0].dim() == 3 else func(*args, **(kwargs or {}))


def write_packed_gradients_once() -> None:
    """Leave out the zeros, which tokens between documents would need: here documents follow each other.

    Not where queries are cut (bottom-right masks): keys that no query reads get no gradient from the kernel.
    """
    plain = backends.fused_attn_bwd

    @functools.wraps(plain)
    def fused_attn_bwd(*args: Any, **options: Any) -> Any:
        words = [each for each in (*args, *options.values()) if isinstance(each, str)]
        is_complete = "padding_causal" in words and any(word.startswith("thd") for word in words)
        with WithoutZeros() if is_complete else contextlib.nullcontext():
            return plain(*args, **options)

    backends.fused_attn_bwd = fused_attn_bwd


PATCHES = (
    Patch(
        "flat shards",
        "FP8 weights are cast shard by shard, each a single row, through a kernel that transposes: 40% of a step",
        (
            ("pytorch/tensor/utils.py", "quantizer.update_quantized(master_weight.view(1, -1),"),
            ("pytorch/tensor/utils.py", "quantizer.update_quantized(master_weight, model_weight_fragment)"),
            ("pytorch/tensor/float8_tensor.py", "tex.quantize(src, self, dst, noop_flag)"),
        ),
        cast_flat_shards_by_rows,
    ),
    Patch(
        "scales of moments",
        "a moment in FP8 that is all zero becomes NaN; one in FP8 or FP16 that is read and stored again changes",
        (
            ("pytorch/optimizers/fused_adam.py", "scaled_state._quantizer.scale.copy_(1 / scale)"),
            ("pytorch/optimizers/fused_adam.py", "torch.div(absmax, max_range, out=scale)"),
        ),
        scale_moments_to_stay,
    ),
    Patch(
        "transposed FP8 moments",
        "moments in FP8 take two bytes a number on GPUs whose GEMMs want transposed codes, and a slow cast",
        (
            ("pytorch/optimizers/fused_adam.py", "self.state[param][state_name] = quantizer.make_empty(data.shape)"),
            ("pytorch/tensor/float8_tensor.py", "columnwise: bool = True,"),
        ),
        keep_moments_by_rows,
    ),
    Patch(
        "overwritten gradients",
        "with `overwrite_main_grad` a fused operation's weight has twice its gradient",
        (
            ("pytorch/ops/basic/basic_linear.py", "accumulate_into_main_grad = get_accumulate_flag_in_param("),
            ("pytorch/ops/basic/basic_linear.py", "grad_weight = get_dummy_wgrads_for_params([self.weight])[0]"),
        ),
        overwrite_without_adding,
    ),
    Patch(
        "delayed scaling's state",
        "it is pickled, and refused when read",
        (
            ("pytorch/module/base.py", "state_serialized = bytearray(pickle.dumps(state))"),
            ("pytorch/_extra_state.py", "Refusing to load pickled Transformer Engine extra state"),
        ),
        save_delayed_state_as_tensors,
    ),
    Patch(
        "zeros before packed gradients",
        "gradients of documents are zeroed before the kernel writes them: 1% of a step of llama-1b",
        (
            ("pytorch/cpp_extensions/fused_attn.py", "output_tensors = tex.fused_attn_bwd("),
            ("pytorch/attention/dot_product_attention/backends.py", "dq, dk, dv, *rest = fused_attn_bwd("),
        ),
        write_packed_gradients_once,
    ),
)


@functools.cache
def install() -> None:
    """Apply all patches; a second call does nothing."""
    for patch in PATCHES:
        patch.apply()


def cast_by_kernels(recipes: Collection[str]) -> None:
    """Cast activations and gradients of these recipes by our kernels, where they support the tensor.

    Other recipes are cast by Transformer Engine, and so is what its norms and other fused kernels quantize themselves.
    After its casts, but not in these kernels, infinite amaxes set the flags of quantizers.

    Args:
        recipes: of `registry.with_triton_casts`.
    """
    named = (registry.get(recipe).te_quantizer for recipe in recipes)
    ours = {name[1] for name in named if name is not None}
    for quantizer in (Float8Quantizer, *quantizers.CHECKED):
        # What an earlier run in this process has wrapped is wrapped anew, not twice.
        plain = getattr(quantizer.quantize_impl, "__wrapped__", quantizer.quantize_impl)
        quantizer.quantize_impl = _with_kernels(plain, is_ours=quantizer.__name__ in ours)


def _with_kernels(plain: Callable[[Quantizer, Tensor], Any], is_ours: bool) -> Callable[[Quantizer, Tensor], Any]:
    """A `quantize_impl` that uses our kernels, if asked for and where they support the tensor."""

    @functools.wraps(plain)
    def quantize_impl(self: Quantizer, tensor: Tensor) -> Any:
        kernels = quantizers.kernels_for(self, tensor.shape) if is_ours else None
        if kernels is not None:
            return quantizers.cast(tensor, self, kernels)
        result = plain(self, tensor)
        quantizers.flag_infinity(self, tensor, result)
        return result

    return quantize_impl


def observe_amaxes(observe: Callable[[bool], None]) -> None:
    """Call a function just before Transformer Engine makes scales of the amaxes of delayed scaling.

    Args:
        observe: of this run, in place of that of an earlier run; called with whether the amaxes are those of forward
            passes.
    """
    current = vars(FP8GlobalStateManager)["reduce_and_update_fp8_tensors"].__func__
    # As in `cast_by_kernels`: an earlier run's function is replaced, not called as well.
    plain = getattr(current, "__wrapped__", current)

    @functools.wraps(plain)
    def reduce_and_update(cls: type, forward: bool = True) -> None:
        observe(forward)
        plain(cls, forward=forward)

    FP8GlobalStateManager.reduce_and_update_fp8_tensors = classmethod(reduce_and_update)
