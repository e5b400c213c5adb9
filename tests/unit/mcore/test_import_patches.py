"""What precedes the import of megatron-core on a CPU: no compiler is imported, and no function is compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megafp8.mcore import cpu_patches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched beside a GPU")


def plain(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_both_forms_of_the_decorator_return_the_function_itself() -> None:
    cpu_patches.install()
    assert torch.compile(plain) is plain
    assert torch.compile(dynamic=True, fullgraph=True)(plain) is plain


def test_a_user_can_keep_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    original = object()
    monkeypatch.setattr(torch, "compile", original)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    cpu_patches.patch_compile()
    assert torch.compile is original


def test_megatron_core_is_imported_without_the_compiler() -> None:
    """In a new interpreter; this process may have it already."""
    code = (
        "from megafp8.mcore import cpu_patches\ncpu_patches.install()\nimport sys, torch\n"
        "from megatron.core.fusions import fused_bias_swiglu\n"
        "print(fused_bias_swiglu.swiglu(torch.ones(1, 2)).item(), 'torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    value, is_imported = done.stdout.split()[-2:]
    assert float(value) == pytest.approx(1 / (1 + 2.718281828**-1)) and is_imported == "False"
