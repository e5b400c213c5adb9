"""A key-value cache for one growing text: a new token takes a forward pass over itself alone.

megatron-core's static inference context keeps the keys and values of every layer. Keys are kept before their rotary
embedding, and the keys so far are rotated again in each pass, so that attention computes what it computes without a
cache. The context needs no patch on a CPU, and no flash attention package: megatron-core calls one only for
`flash_decode` and dynamic batching. Attention gets the mask type `no_mask` after the first pass, which Transformer
Engine's attention and `models/attention.py` apply to one query and all keys. megafp8's own RoPE kernel rotates from
position 0 and is therefore off (`language_model.single_device_config`).

FP32 logits differ from those of one pass over the text in the order of sums only. There is no cache for quantized
GEMMs: a scale of one token, or of one block of it, is not the scale that the token gets within its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor


class KeyValueCache:
    """The keys and values of the tokens so far, up to the length of the context window.

    Memory: 2 x max_tokens x kv-heads x channels elements for each layer, in the dtype of the activations.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, max_tokens: int):
        self.module = module
        self.device = device
        self.context = StaticInferenceContext(max_batch_size=1, max_sequence_length=max_tokens)

    @property
    def num_tokens(self) -> int:
        """Length of the text so far."""
        return self.context.sequence_len_offset

    def append(self, ids: Sequence[int]) -> Tensor:
        """Logits of the token after `ids`, which continue the text so far. Shape: (padded vocabulary,).

        Args:
            ids: the prompt in the first call, of any length, then one token.
        """
        start, end = self.num_tokens, self.num_tokens + len(ids)
        assert start == 0 or len(ids) == 1, "after the first pass megatron-core does not mask later tokens"
        assert len(ids) > 0 and end <= self.context.max_sequence_length
        tokens = torch.tensor([list(ids)], device=self.device)
        positions = torch.arange(start, end, device=self.device)[None]
        if start > 0:
            self.context.enable_decode_mode()
        logits = self.module(tokens, positions, None, inference_context=self.context, runtime_gather_output=True)
        self.context.increment_sequence_len_offset(len(ids))
        return logits[0, -1]
