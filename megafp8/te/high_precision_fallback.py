"""Linears that a run moves to high precision: `--on-nonfinite-activation bf16`, `--fp8-guard bf16-layer`.

Such a linear runs in an autocast of its own that is not quantized, as one that a precision map keeps in high precision.
The others of its layer do not change: a fused MLP, which has one precision, runs linear by linear from then on.

Under delayed scaling Transformer Engine updates the scales of every linear that once quantized, with amaxes of zero
where it does no longer. What is moved is taken out of its lists, so that histories and scales stay as they were: those
of a resumed run, which never lists them, are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megafp8.config.precision_map import name_of_all_experts
from megafp8.mcore.modules import fused_mlps, named_linears
from megafp8.te.fused_mlp import FusedMLP
from megafp8.te.recipes import wrap_with_recipe


def move_to_high_precision(chunks: Sequence[nn.Module], names: Collection[str]) -> None:
    """Compute linears in high precision from now on; moving one again changes nothing.

    Args:
        chunks: the model of this rank.
        names: for example `layers.3.linear_fc2`; others than those of this rank are left out. A grouped linear of
            experts is moved with the first name of one of its experts.
    """
    for linear in separate_linears(chunks, {*names, *map(name_of_all_experts, names)}):
        leave_amax_buffers(linear)
        set_high_precision(linear)


def separate_linears(chunks: Sequence[nn.Module], names: Collection[str]) -> Iterator[Any]:
    """The named linears of this rank. Their MLPs run linear by linear from now on."""
    for chunk in chunks:
        fused = fused_mlps(chunk)
        for name, linear in named_linears(chunk):
            if name not in names or not isinstance(linear, nn.Module):
                continue
            if linear in fused:
                split(fused[linear])
            yield linear


def set_high_precision(linear: Any) -> None:
    """Give a linear its own precision, and free the codes of its weight."""
    linear.is_fallback = True
    if hasattr(linear, "own_recipe"):  # of a precision map; in a phase, perhaps without use
        linear.own_recipe, linear.is_quantizing = None, True
    else:
        wrap_with_recipe(linear, recipe=None, group=None)
    linear._fp8_workspaces.clear()


def split(mlp: FusedMLP) -> None:
    """Run an MLP linear by linear from now on. A linear that still quantizes enters Transformer Engine's lists again
    in its next forward pass, which its fused operation would otherwise have done."""
    if not mlp.is_split:
        mlp.is_split, mlp._fused_impl = True, None
        for linear in (mlp.linear_fc1, mlp.linear_fc2):
            leave_amax_buffers(linear)


def leave_amax_buffers(linear: Any) -> None:
    """Take a linear's state of delayed scaling out of the lists of what Transformer Engine updates."""
    meta, state = linear.fp8_meta, FP8GlobalStateManager.quantization_state
    meta.pop(FP8GlobalStateManager.get_buffer_info(), None)
    directions = [meta[key] for key in ("scaling_fwd", "scaling_bwd") if hasattr(meta.get(key), "amax_history")]
    own = {direction.amax_history.data_ptr() for direction in directions}
    for key, histories in state.global_amax_history_buffer.items():
        kept = [index for index, history in enumerate(histories) if history.data_ptr() not in own]
        for buffer in (state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer):
            buffer[key][:] = [buffer[key][index] for index in kept]
