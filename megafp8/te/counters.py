"""Non-finite and saturated tensors among what Transformer Engine's linears quantize, from amaxes.

`quantization/counters.py` counts values, since emulated linears read them anyway. Here no tensor is read again:

    delayed scaling   Just before Transformer Engine makes new scales, every amax and the scale that was used are read,
                      whoever cast the tensor. An infinite amax is a non-finite tensor. One that its scale puts beyond
                      the format is a saturated tensor.
    other recipes     A cast sets a flag of the quantizer if an amax is infinite: our kernels while they cast, and after
                      Transformer Engine's casts a check of the scales (`te/quantizers.py`). What its fused kernels
                      quantize has no flag: results of norms, weights after their first cast, gradients beside those of
                      a bias, and SwiGLU in a fused MLP without our kernels, and weights that are gathered as codes.

Attention in FP8 is no linear. Under delayed scaling each layer has one more row for it: amaxes of the forward pass
(queries, keys, values, probabilities and output) count as its input, those of their gradients as its output gradient.
Under other recipes it is not counted.

A NaN does not raise an amax. It becomes a NaN in FP8, and the check of loss and gradients finds it. Counts are sums on
the device, also inside a CUDA graph, and nothing waits for them. They count tensors of microbatches, not values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_fp8_te_dtype
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from megafp8.mcore.modules import fused_mlps, named_attentions, named_linears
from megafp8.quantization.counters import NON_FINITE, QUANTIZERS, count_amaxes, saturation_threshold
from megafp8.recipes.base import Gemm, Operand
from megafp8.te import patches
from megafp8.te.fused_mlp import of_linears
from megafp8.te.quantizers import FORMATS, INFINITY

# Transformer Engine's order: input, weight, output; then gradients of the output and of the input.
QUANTIZER_POSITIONS = ((Operand.INPUT, "fwd", 0), (Operand.WEIGHT, "fwd", 1), (Operand.GRAD_OUTPUT, "bwd", 0))
MODES = {"fwd": "forward", "bwd": "backward"}
OPERANDS = tuple(operand for operand, _, _ in QUANTIZER_POSITIONS)
ATTENTION_OPERANDS = ((Operand.INPUT, "fwd"), (Operand.GRAD_OUTPUT, "bwd"))
WGRAD_COLUMNS = [column for column, (_, gemm) in enumerate(QUANTIZERS) if gemm is Gemm.WGRAD]


class AmaxCounters:
    """The `OperandDetector` of all linears of a model. Every rank has rows for all linears, and adds to its own.

    Args:
        linears: names, and those of attention in FP8, the same on all ranks.
        chunks: the model of this rank.
    """

    def __init__(self, linears: Sequence[str], chunks: Sequence[Any], device: torch.device):
        self.linears = tuple(linears)
        named = [pair for chunk in chunks for pair in named_linears(chunk)]
        # Grouped linears of experts have several weights, and other positions.
        self.modules = {name: module for name, module in named if name in self.linears and hasattr(module, "weight")}
        attentions = [pair for chunk in chunks for pair in named_attentions(chunk)]
        self.attentions = {name: module for name, module in attentions if name in self.linears}
        layers = [name.split(".")[:2] for name in self.modules]
        self.first_layer = [name for name in self.modules if name.split(".")[:2] == layers[0]]
        self.fused = {linear: mlp for chunk in chunks for linear, mlp in fused_mlps(chunk).items()}
        self.flags = torch.zeros(len(self.linears), len(QUANTIZER_POSITIONS), dtype=torch.int32, device=device)
        self.amax_counts: dict[str, Tensor] = {}  # int64 [2, amaxes], by Transformer Engine's key
        self.keeps_amaxes = False  # as `delayed_scaling.keeps_amaxes`
        patches.observe_amaxes(self.count_amaxes)

    def reset(self) -> None:
        """Set all counts to zero before a step, and give new quantizers their flags."""
        self.flags.zero_()
        for counts in self.amax_counts.values():
            counts.zero_()
        # Transformer Engine makes the quantizers of all layers in the same step, and later those of a split MLP or of a
        # linear with another recipe in a phase. Looking at all of them takes a millisecond of the host.
        others = [
            name for name, module in self.modules.items() if self._is_split(name) or hasattr(module, "own_recipe")
        ]
        if self._give_flags([*self.first_layer, *others]):
            self._give_flags(self.modules)

    def count_amaxes(self, is_forward: bool) -> None:
        """Count the amaxes of one direction, before Transformer Engine makes scales of them and removes them."""
        state = FP8GlobalStateManager.quantization_state
        for key, amaxes in state.global_amax_buffer.items():
            is_key_forward, autocast_key = FP8GlobalStateManager.split_key_in_buffer(key)
            if is_key_forward is not is_forward or not amaxes:
                continue
            amax, scale = torch.cat(amaxes), torch.cat(state.global_scale_buffer[key])
            counts = self.amax_counts.get(key)
            if counts is None or counts.shape[1] != len(amax):  # in the first steps, before a CUDA graph
                counts = self.amax_counts[key] = torch.zeros(2, len(amax), dtype=torch.int64, device=amax.device)
            recipe, _ = state.autocast_arguments[autocast_key]
            self.keeps_amaxes = recipe.amax_compute_algo == "max" and recipe.amax_history_len > 1
            threshold = saturation_threshold(FORMATS[get_fp8_te_dtype(recipe, is_forward).name])
            count_amaxes(amax, scale, threshold, counts)

    def counts(self) -> Tensor:
        totals = torch.zeros(3, dtype=torch.int64, device=self.flags.device)
        for counts in self.amax_counts.values():
            totals[:2] += counts.sum(dim=1)
        if self.keeps_amaxes:
            totals[2] = totals[NON_FINITE]
        totals[NON_FINITE] += self.flags.sum()
        return totals

    def find(self) -> Tensor:
        """As of an `OperandDetector`; a cast serves all GEMMs that read it."""
        by_operand = torch.zeros(*self.flags.shape, 2, dtype=torch.int64, device=self.flags.device)
        cells = list(by_operand.view(-1, 2).unbind())
        for row, column, counts in self._positions_of_amaxes():
            cells[row * len(OPERANDS) + column] = counts
        if cells:  # one copy: the host needs longer to start an addition for each operand than the device to add
            by_operand = torch.stack(cells).view_as(by_operand)
        by_operand[:, :, NON_FINITE] += self.flags
        table = torch.stack([by_operand[:, OPERANDS.index(operand)] for operand, _ in QUANTIZERS], dim=1)
        for name in self.attentions:
            table[self.linears.index(name), WGRAD_COLUMNS] = 0  # attention has no weight
        return table

    def clear_infinite_amaxes(self) -> list[str]:
        """Clear them in all histories, so that the next update makes scales of the other amaxes."""
        for histories in FP8GlobalStateManager.quantization_state.global_amax_history_buffer.values():
            for history in histories:
                history.masked_fill_(history == torch.inf, 0.0)
        return [
            f"{self.linears[row]}.{OPERANDS[column].value}"
            for row, column, counts in self._positions_of_amaxes()
            if counts[NON_FINITE]
        ]

    def _give_flags(self, names: Iterable[str]) -> bool:
        """Give the quantizers of some linears their flags; returns whether any had none."""
        is_new = False
        for name in names:
            row = self.linears.index(name)
            for column, (_, direction, index) in enumerate(QUANTIZER_POSITIONS):
                quantizer = self._quantizer(name, direction, index)
                is_counted = isinstance(quantizer, Float8Quantizer)  # delayed scaling, by its amaxes
                if quantizer is not None and not is_counted and not hasattr(quantizer, INFINITY):
                    setattr(quantizer, INFINITY, self.flags[row, column : column + 1])
                    is_new = True
        return is_new

    def _positions_of_amaxes(self) -> Iterator[tuple[int, int, Tensor]]:
        """Row, column and counts [2] of the amaxes that belong to an operand of a linear, or to attention."""
        starts: dict[int, tuple[str, int]] = {}
        for key, amaxes in FP8GlobalStateManager.quantization_state.global_amax_buffer.items():
            start = 0
            for amax in amaxes:
                starts[amax.data_ptr()] = key, start
                start += amax.numel()
        for name, module in self.modules.items():
            for column, (_, direction, index) in enumerate(QUANTIZER_POSITIONS):
                if (counts := self._counts_of(module, direction, starts)) is not None:
                    yield self.linears.index(name), column, counts[:, index]
        for name, module in self.attentions.items():
            for operand, direction in ATTENTION_OPERANDS:
                if (counts := self._counts_of(module, direction, starts)) is not None:
                    yield self.linears.index(name), OPERANDS.index(operand), counts.sum(dim=1)

    def _counts_of(self, module: Any, direction: str, starts: Mapping[int, tuple[str, int]]) -> Optional[Tensor]:
        """The counts of a module's amaxes of one direction, [2, amaxes]; None before its first pass.

        Args:
            starts: key and index of the first amax of each module, by its address.
        """
        meta = module.fp8_meta.get(f"scaling_{direction}")
        if not hasattr(meta, "amax_history") or meta.amax_history[0].data_ptr() not in starts:
            return None
        key, start = starts[meta.amax_history[0].data_ptr()]
        counts = self.amax_counts.get(key)
        return None if counts is None else counts[:, start : start + meta.amax_history.shape[1]]

    def _is_split(self, name: str) -> bool:
        """Whether a linear is called that was part of a fused MLP before."""
        mlp = self.fused.get(self.modules[name])
        return mlp is not None and mlp.is_split

    def _quantizer(self, name: str, direction: str, index: int) -> Optional[Any]:
        """The quantizer of an operand; None before the first pass, or without quantization."""
        module = self.modules[name]
        mlp = self.fused.get(module)
        if mlp is None or mlp.is_split:
            found = module.quantizers[f"scaling_{direction}"]
        elif mlp._fused_impl is None:
            return None
        else:
            first, second = of_linears(mlp._fused_impl[0])
            found = ((first if module is mlp.linear_fc1 else second)._quantizers or {}).get(MODES[direction], [])
        return found[index] if index < len(found) else None
