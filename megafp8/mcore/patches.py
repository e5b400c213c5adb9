"""Patches of megatron-core for quantized weights and fused wgrad accumulation, on CPU and GPU.

FP8 weights: megatron-core keeps them in byte buffers, gathers these, and calls a few functions for what depends on the
tensor class. Those support only Transformer Engine's classes, and raise where it is not installed. They are wrapped
here to dispatch on the class of the weight.

Fused wgrad accumulation: megatron-core's own linears import an Apex extension that adds wgrad to `main_grad` inside the
GEMM. Without it wgrad is rounded to BF16 and added in a separate pass. A substitute is provided here. Where Apex is
installed its function is used. It can only add, so a buffer that is to be overwritten is zeroed first (see
`optimizer.gradient_communication.WgradOverwrite`).

`WEIGHT_EVIDENCE` and `WGRAD_EVIDENCE` quote the code that makes the patches necessary. A test fails when a quoted text
is gone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

from packaging.specifiers import SpecifierSet
from torch import Tensor


@dataclass(frozen=True)
class Patch:
    """One patch for megatron-core.

    Attributes:
        name: short name, for messages and tests.
        reason: what goes wrong without it.
        evidence: pairs of a file below `megatron/core/` and a text in it that makes the patch necessary.
        apply: applies it.
        versions: of megatron-core that need it, such as `<0.19`; all supported ones if empty.
    """

    name: str
    reason: str
    evidence: tuple[tuple[str, str], ...]
    apply: Callable[[], None]
    versions: str = ""


def import_core(module: str) -> Any:
    """Import a module of megatron-core by its path below `megatron.core`. Not typed, because patches set attributes."""
    return importlib.import_module(f"megatron.core.{module}")


@functools.cache
def core_folder() -> Path:
    """The folder of the installed megatron-core, found without importing it: it may need a patch first."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def core_version() -> str:
    """The version of the installed megatron-core, such as 0.16.1."""
    text = (core_folder() / "package_info.py").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


@functools.cache
def is_installed(versions: str) -> bool:
    """Whether the installed megatron-core is one of these versions, such as `<0.19`. An empty text means all."""
    return SpecifierSet(versions).contains(core_version())


def apply_installed(patches: Sequence[Patch]) -> None:
    """Apply those of some patches that the installed version needs."""
    for each in patches:
        if is_installed(each.versions):
            each.apply()


WEIGHT_EVIDENCE = (
    ("fp8_utils.py", "FP8_TENSOR_CLASS = None"),
    ("fp8_utils.py", 'raise RuntimeError("Invalid Transformer Engine version for FP8 distributed optimizer")'),
    ("fp8_utils.py", 'if is_te_min_version("2.0"):\n        return fp8_tensor.dequantize()'),
    ("optimizer/distrib_optimizer.py", "dequantize_fp8_tensor(model_param)"),
)
Quantize = Callable[[Sequence[Any], Sequence[Optional[Tensor]], Sequence[Optional[int]], Any], None]


def register_fp8_parameter(parameter_class: type, quantize: Quantize) -> None:
    """Make megatron-core treat parameters of a class as FP8 weights. A later call replaces an earlier one.

    Args:
        parameter_class: has `codes.move_to(uint8 buffer)` and `dequantize()`.
        quantize: called after each update with all FP8 weights of an optimizer, their FP32 shards on this rank (None
            without a shard), the offset of each shard, and the data-parallel group.
    """
    fp8_utils, te_class = import_core("fp8_utils"), original_attribute("fp8_utils", "FP8_TENSOR_CLASS")
    fp8_utils.FP8_TENSOR_CLASS = parameter_class if te_class is None else (parameter_class, te_class)
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    replacements: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("fp8_utils", "_modify_underlying_storage_impl", lambda weight, buffer: weight.codes.move_to(buffer)),
        ("fp8_utils", "_quantize_param_shard_impl", lambda weights, *parts: quantize(weights, *parts[:3])),
        ("fp8_utils", "te_post_all_gather_processing", lambda weights: None),
        ("fp8_utils", "dequantize_fp8_tensor", lambda weight: weight.dequantize()),
        ("optimizer.distrib_optimizer", "dequantize_fp8_tensor", lambda weight: weight.dequantize()),
    )
    for module, name, function in replacements:
        original = original_attribute(module, name)
        setattr(import_core(module), name, dispatch_on_class(parameter_class, function, original))


def dispatch_on_class(cls: type, replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Call `replacement` if the first argument is of a class, or a list of tensors of that class, else `original`."""

    def dispatch(weights: Any, *args: Any) -> Any:
        weight = next(iter(weights), None) if isinstance(weights, (list, tuple)) else weights
        return (replacement if isinstance(weight, cls) else original)(weights, *args)

    return dispatch


@functools.cache
def original_attribute(module: str, name: str) -> Any:
    """megatron-core's own attribute. The first call for each name must come before the attribute is patched."""
    return getattr(import_core(module), name)


@contextlib.contextmanager
def groups_matched_without_rates() -> Iterator[None]:
    """Context in which a load matches parameter groups by other settings than their learning rates, as 0.16 does.

    megatron-core 0.19 refuses a checkpoint that was saved with another learning rate.
    """
    with contextlib.ExitStack() as stack:
        for module in map(import_core, ("optimizer.optimizer", "optimizer.distrib_optimizer")):
            keys = tuple(key for key in module.param_group_identifier_keys if key not in ("max_lr", "min_lr"))
            stack.enter_context(patch.object(module, "param_group_identifier_keys", keys))
        yield


def rows_found_by_identity() -> contextlib.AbstractContextManager[Any]:
    """Context in which megatron-core finds the rows of a parameter in a sharded state dict.

    It compares object identities with what `DTensor.to_local` returns, which is a new parameter in every call since
    torch 2.13.
    """
    module = import_core("dist_checkpointing.optimizer")
    return patch.object(module, "to_local_if_dtensor", lambda tensor: getattr(tensor, "_local_tensor", tensor))


APEX_MODULE = "fused_weight_gradient_mlp_cuda"
WGRAD_FUNCTIONS = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
WGRAD_EVIDENCE = (
    ("tensor_parallel/layers.py", f"import {APEX_MODULE}"),
    ("tensor_parallel/layers.py", f"{APEX_MODULE}.wgrad_gemm_accum_fp32("),
)
AddWgrad = Callable[[Tensor, Tensor, Tensor], None]
"""Called with input [T, K], grad_output [T, N] and `main_grad` [N, K], which it updates in place."""


def provide_wgrad_gemm(add_wgrad: AddWgrad) -> None:
    """Provide the wgrad GEMM of linears with `gradient_accumulation_fusion`; repeated calls do nothing.

    Args:
        add_wgrad: adds to `main_grad`, or overwrites it where `main_grad.is_overwritten`.
    """
    layers = import_core("tensor_parallel.layers")
    apex = getattr(layers, APEX_MODULE, None)
    if not isinstance(apex, types.SimpleNamespace):
        functions = {name: with_overwrite(getattr(apex, name)) if apex else add_wgrad for name in WGRAD_FUNCTIONS}
        setattr(layers, APEX_MODULE, types.SimpleNamespace(**functions))


def with_overwrite(add: AddWgrad) -> AddWgrad:
    """Extend a function that only adds, such as Apex's, to `main_grad.is_overwritten`."""

    def add_or_overwrite(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        if getattr(main_grad, "is_overwritten", False):
            main_grad.zero_()
        add(input, grad_output, main_grad)

    return add_or_overwrite
