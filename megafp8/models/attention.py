"""Causal attention in torch with context parallelism, for layers without Transformer Engine's attention.

Context-parallel ranks share each sequence in zigzag order (`mcore/zigzag.py`). Queries stay local. Keys and values are
all-gathered, and their gradients are reduce-scattered. The gather takes 2 x S x kv-heads x channels elements per rank
and layer, which is little compared with the activations.

Sliding windows and borders of documents are masks for torch's SDPA. It has no softcapping and no additional term in the
softmax; with one of them, and with `--attention-backend unfused`, `explicit_attention` computes all scores, in memory
that grows with S^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megafp8.kernels.cpu_matmul import multiplied
from megafp8.mcore.zigzag import gathered, zigzag_positions


def visible_keys(
    query_positions: Tensor, key_positions: Tensor, window: Optional[int], documents: Optional[Tensor]
) -> Tensor:
    """Mask of the keys that each query attends to.

    Args:
        query_positions, key_positions: (queries,) and (keys,), positions in the sequence.
        window: number of tokens before its own that a query attends to; None for all.
        documents: (B, S), the number of each token's document, by position.

    Returns:
        Boolean (queries, keys), or (B, 1, queries, keys) with documents.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance <= window
    if documents is not None:
        of_queries, of_keys = documents[:, query_positions], documents[:, key_positions]
        mask = mask & (of_queries[:, None, :, None] == of_keys[:, None, None, :])
    return mask


def document_numbers(ends: Tensor, batch_size: int, length: int) -> Tensor:
    """The number of each token's document. Shape (batch_size, length), int64.

    Args:
        ends: the borders of documents (`loss.document_ends`).
    """
    tokens = torch.arange(batch_size * length, device=ends.device)
    return torch.bucketize(tokens, ends[1:], right=True).view(batch_size, length)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcapping: Optional[float] = None,
    offset: Optional[Tensor] = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap(Q K^T scale) + mask) V with an optional term exp(offset) in the denominator of the softmax.

    Args:
        query, key, value: (B, heads, tokens, channels); keys and values may have fewer heads.
        mask: boolean, True for the keys that a query attends to; broadcast to (B, heads, queries, keys).
        softcapping: C of cap(x) = C tanh(x / C).
        offset: (heads,).

    Numerics: scores, probabilities and sums in FP32; the result has the dtype of the query.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.to(dtype).repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.transpose(-1, -2) * scale
    if softcapping is not None:
        scores = softcapping * torch.tanh(scores / softcapping)
    scores = scores.masked_fill(~mask, -torch.inf)
    if offset is not None:
        column = offset.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:2], scores.shape[2], 1)
        scores = torch.cat((scores, column), dim=-1)
    probabilities = scores.softmax(-1)
    if offset is not None:
        probabilities = probabilities[..., :-1]
    if dropout > 0:
        probabilities = F.dropout(probabilities, dropout)
    return (probabilities @ value).to(query.dtype)


WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CausalAttention(torch.nn.Module):
    """softmax(Q K^T / sqrt(channels) + causal mask) V.

    Shapes: query (S, B, heads, channels), key and value (S, B, kv-heads, channels), output (S, B, heads * channels),
    where S counts the tokens of this context-parallel rank and heads those of this tensor-parallel rank.
    Numerics: those of the SDPA kernel, with FP32 probabilities; unfused those of `explicit_attention`.

    Args:
        is_unfused: compute all scores although SDPA could compute the attention (`--attention-backend unfused`).
        k_channels, v_channels: of a head in multi-latent attention, which passes them together with the scale.

    Attributes:
        window: number of tokens before its own that a query attends to; None for all.
        softmax_offset: (heads,), the parameter of `--softmax-type learnable`, else None: logarithm of a term in the
            denominator of the softmax.
    """

    softmax_offset: Optional[Tensor]

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
        logit_softcapping: Optional[float] = None,
        is_unfused: bool = False,
        k_channels: Optional[int] = None,
        v_channels: Optional[int] = None,
    ):
        super().__init__()
        assert pg_collection is not None, "megatron-core's attention passes its groups"
        self.groups = pg_collection
        self.context_group = pg_collection.cp
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.is_sequence_parallel = config.sequence_parallel
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if is_windowed else None
        self.logit_softcapping = logit_softcapping
        self.is_unfused = is_unfused
        self.softmax_type = config.softmax_type
        self.softmax_offset = self.build_softmax_offset(config) if config.softmax_type == "learnable" else None

    def build_softmax_offset(self, config: TransformerConfig) -> torch.nn.Parameter:
        """An uninitialized parameter for the heads of this tensor-parallel rank."""
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        num_heads = config.num_attention_heads // self.groups.tp.size()
        return torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype, device=device))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor] = None,
        attn_mask_type: Any = None,
        attention_bias: Optional[Tensor] = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        """Compute causal attention.

        Args:
            attention_mask: the borders of documents in the complete sequences (`loss.document_ends`), which attention
                does not cross; None for one document.
            attn_mask_type: with `no_mask` the query is the last token and attends to all keys, or those of its window.
                megatron-core passes it for the one token that follows a key-value cache
                (`training/key_value_cache.py`).
        """
        assert attention_bias is None and packed_seq_params is None, "not passed by this project's models"
        is_last = attn_mask_type is AttnMaskType.no_mask
        if self.context_group.size() > 1:
            assert not is_last, "a key-value cache is for one rank"
            key, value, positions = self.gather_key_value(query, key, value)
        else:
            keys = torch.arange(key.shape[0], device=query.device)
            positions = keys[-query.shape[0] :] if is_last else keys, keys
        mask = self.mask(positions, query.shape[1], attention_mask)
        probability = self.dropout if self.training else 0.0
        # Tensor-parallel ranks drop probabilities of different heads, so they use the tensor-parallel random state.
        # With sequence parallelism the transformer block has forked into it already; forking again would rewind it.
        forks = probability > 0 and not self.is_sequence_parallel
        fork = tensor_parallel.get_cuda_rng_tracker().fork() if forks else nullcontext()
        heads_first = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        with fork:
            output = self.attend(heads_first, mask, probability, is_last)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    @property
    def is_explicit(self) -> bool:
        """Whether all scores are computed: torch's SDPA cannot compute this attention, or shall not."""
        return self.is_unfused or self.logit_softcapping is not None or self.softmax_type != "vanilla"

    def mask(
        self, positions: tuple[Tensor, Tensor], batch_size: int, document_ends: Optional[Tensor]
    ) -> Optional[Tensor]:
        """The mask of `visible_keys`; None where SDPA's causal attention, or one query without a mask, suffices."""
        is_split = self.context_group.size() > 1
        if not (is_split or self.is_explicit or self.window is not None or document_ends is not None):
            return None
        documents = None
        if document_ends is not None:
            documents = document_numbers(document_ends, batch_size, len(positions[1]))
        return visible_keys(*positions, self.window, documents)

    def attend(self, tensors: Sequence[Tensor], mask: Optional[Tensor], dropout: float, is_last: bool) -> Tensor:
        """Attention of query, key and value of shape (B, heads, tokens, channels)."""
        query, key, value = tensors
        if self.is_explicit:
            assert mask is not None
            offset = self.softmax_offset
            if self.softmax_type == "off-by-one":
                offset = query.new_zeros(query.shape[1])
            return explicit_attention(
                query, key, value, mask, self.softmax_scale, self.logit_softcapping, offset, dropout
            )
        # cuDNN builds a plan for each number of keys, which takes 0.1 s for every token after a key-value cache.
        with sdpa_kernel(WITHOUT_PLANS) if is_last else nullcontext():
            return multiplied(
                F.scaled_dot_product_attention, query, key, value, attn_mask=mask,
                is_causal=mask is None and not is_last, dropout_p=dropout, scale=self.softmax_scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )  # fmt: skip

    def gather_key_value(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Keys and values of all ranks, and the positions of local queries and of these keys."""
        group, local_length = self.context_group, query.shape[0]
        positions = [zigzag_positions(r, group.size(), local_length, query.device) for r in range(group.size())]
        return gathered(group, key), gathered(group, value), (positions[group.rank()], torch.cat(positions))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Optional[dict[str, Any]] = None,
    ) -> dict[str, Any]:
        """The parameter of the softmax, split over the heads, under the key of Transformer Engine's attention."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self.groups.tp, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
