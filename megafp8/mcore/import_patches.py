"""Patches that precede the first import of megatron-core: of runs on a CPU (see `cpu_patches.py`), and of all tests."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import Any

import torch

from megafp8.mcore.patches import Patch, apply_installed

PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


def patch_compile() -> None:
    """Let `torch.compile` return the function it is given, without importing the compiler.

    megatron-core applies it at import. On a CPU the compiled functions would take 10 s and need a C++ compiler. Where
    the environment disables compilation, torch runs plain functions, too, but still imports its compiler, which is a
    third of the time that a command takes to start. TORCH_COMPILE_DISABLE=0 leaves everything as it is.
    """
    if os.environ.setdefault("TORCH_COMPILE_DISABLE", "1") != "1":
        return

    def compile(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = compile


def patch_triton_import() -> None:
    """Without Triton, replace the module of kernels that imports it. Only mixture-of-experts layers call them."""
    if importlib.util.find_spec("triton") is None:
        names = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")
        module = types.ModuleType(PAGED_STASH)
        module.__dict__.update(dict.fromkeys(names))
        sys.modules[PAGED_STASH] = module


IMPORT_PATCHES = (
    Patch(
        "torch.compile",
        "every import waits for torch's compiler, which a CPU does not use",
        (("jit.py", "jit_fuser = torch.compile"), ("fusions/fused_bias_swiglu.py", "@jit_fuser")),
        patch_compile,
    ),
    Patch(
        "Triton",
        "Triton is imported without a test for it, and a CPU build of torch comes without it",
        (("transformer/moe/ops/paged_stash.py", "import triton\n"),),
        patch_triton_import,
        versions=">=0.19",
    ),
)


def apply_import_patches() -> None:
    """Apply them, for a program that imports megatron-core without the other patches."""
    apply_installed(IMPORT_PATCHES)
