"""Sampling of the next token: temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.errors import NumericsError


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token: the top k are selected, temperature is applied, then the top p are selected.

    Attributes:
        temperature: divides the logits; above 0.
        top_k: number of most probable tokens to sample from; 0 for all, 1 for greedy decoding.
        top_p: sample from the fewest most probable tokens with at least this total probability, in (0, 1].
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def problems(self) -> list[str]:
        """Problems of the values, in words."""
        found = []
        if not 0 < self.temperature < float("inf"):
            found.append(f"--temperature {self.temperature:g}: must be above 0; for the most probable token: --greedy")
        if self.top_k < 0:
            found.append(f"--top-k {self.top_k}: must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"--top-p {self.top_p:g}: must be above 0 and at most 1 (off)")
        return found


GREEDY = Sampling(top_k=1)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The ids to sample from, the most probable first and of equal ones the lowest, and their probabilities.

    Shapes: logits (vocabulary,); both results (C,), 1 <= C <= vocabulary.
    Numerics: FP32; the probabilities add up to 1.
    Source: top-p is nucleus sampling (Holtzman et al., arXiv:1904.09751).
    """
    ranked, ids = torch.sort(logits.float(), descending=True, stable=True)
    if sampling.top_k > 0:
        ranked, ids = ranked[: sampling.top_k], ids[: sampling.top_k]
    probabilities = torch.softmax(ranked / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        num_selected = int((before < sampling.top_p).sum())
        ids, probabilities = ids[:num_selected], probabilities[:num_selected] / probabilities[:num_selected].sum()
    return ids, probabilities


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token. Both arguments are on the same device; a single candidate draws no random number.

    Raises:
        NumericsError: the logits are not finite.
    """
    if not torch.isfinite(logits).all():
        raise NumericsError("the model's logits are not finite: its weights have diverged, or its precision overflows")
    ids, probabilities = candidates(logits, sampling)
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
