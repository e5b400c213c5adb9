"""The function that megatron-core would use from Apex."""

from __future__ import annotations

import types

import pytest
import torch
from test_cpu_patches import core_source

from megafp8.mcore import patches
from megafp8.mcore.patches import import_core


@pytest.mark.parametrize(("file", "text"), patches.WGRAD_EVIDENCE)
def test_megatron_core_still_asks_apex(file: str, text: str) -> None:
    assert text in core_source(file), "megatron-core no longer has this: check for another way to set the function"


class Apex(types.ModuleType):
    """Like its extension: it adds, regardless of the buffer's flag."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_outputs: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(grad_outputs.t(), inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


@pytest.mark.parametrize("has_apex", [False, True])
def test_the_first_gradient_overwrites_the_buffer(has_apex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Apex is installed, its function is called, otherwise the given one."""
    layers, calls = import_core("tensor_parallel.layers"), []
    monkeypatch.setattr(layers, patches.APEX_MODULE, Apex("apex") if has_apex else None, raising=False)
    patches.provide_wgrad_gemm(lambda *tensors: calls.append(tensors))
    given = getattr(layers, patches.APEX_MODULE)
    patches.provide_wgrad_gemm(lambda *tensors: pytest.fail("a second call changes nothing"))
    assert getattr(layers, patches.APEX_MODULE) is given
    main_grad = torch.full((2, 3), 7.0)
    for name in patches.WGRAD_FUNCTIONS:
        main_grad.is_overwritten = True
        getattr(given, name)(torch.ones(4, 3), torch.ones(4, 2), main_grad)
        main_grad.is_overwritten = False
        getattr(given, name)(torch.ones(4, 3), torch.ones(4, 2), main_grad)
    assert len(calls) == (0 if has_apex else 4)
    assert torch.equal(main_grad, torch.full((2, 3), 8.0 if has_apex else 7.0))
