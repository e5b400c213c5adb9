"""Text generation from a checkpoint on one device, token by token, with temperature, top-k and top-p sampling.

With a key-value cache each token takes a forward pass over itself, in high precision. Without one it takes a pass over
the text so far, with the arithmetic of training. A text that outgrows the context window is continued from its last
tokens, in passes over the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Optional, Protocol

import torch
from torch import Tensor

from megafp8.data.tokenizers.build import Tokenizer
from megafp8.errors import DataError
from megafp8.training.key_value_cache import KeyValueCache
from megafp8.training.sampling import Sampling, next_token

INCOMPLETE_CHARACTER = "\ufffd"


class TokenPredictor(Protocol):
    """What continues texts: the model of a checkpoint, or of a run in training."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def build_cache(self) -> Optional[KeyValueCache]:
        """An empty cache for one text; None if texts are generated without."""

    def cached_weights(self) -> AbstractContextManager[None]:
        """A context in which no weight changes."""

    def next_logits(self, ids: Sequence[int], cache: Optional[KeyValueCache] = None) -> Tensor:
        """Logits of the token after `ids`. Shape: (tokenizer's vocabulary,), FP32, on the CPU."""


def padded_window(ids: Sequence[int], context_tokens: int, length_multiple: int) -> tuple[list[int], int]:
    """The last `context_tokens` of `ids`, padded to a multiple, and the position of the last one.

    Attention is causal: padding after the last token affects its logits only through per-tensor scales.
    """
    window = list(ids[-context_tokens:])
    return window + window[-1:] * (-len(window) % length_multiple), len(window) - 1


@dataclass(frozen=True)
class Sample:
    """A generated continuation of a prompt.

    Attributes:
        text: without the prompt.
        num_tokens: generated tokens, without the end of the document.
        ended_by: `eod` for the end of the document, `length` for the requested number of tokens.
    """

    prompt: str
    text: str
    num_prompt_tokens: int
    num_tokens: int
    ended_by: str
    seed: int


def encode_prompt(model: TokenPredictor, prompt: str) -> list[int]:
    """The token ids of a prompt; for an empty one the end-of-document token.

    Raises:
        DataError: ids outside of the vocabulary.
    """
    ids = model.tokenizer.tokenize(prompt) or [model.tokenizer.eod]
    strange = [token for token in ids if not 0 <= token < model.tokenizer.vocab_size]
    if strange:
        raise DataError(f"the prompt has token {strange[0]}; the model has 0 to {model.tokenizer.vocab_size - 1}")
    return ids


def generate_ids(
    model: TokenPredictor, prompt_ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int
) -> Iterator[int]:
    """Yield new tokens up to the end of the document, which is not yielded, or to the maximum number.

    Equal logits and seeds give equal tokens on every device, because sampling is done on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, cache = list(prompt_ids), model.build_cache()
    with model.cached_weights():
        for _ in range(max_new_tokens):
            token = next_token(model.next_logits(ids, cache), sampling, generator)
            if token == model.tokenizer.eod:
                return
            ids.append(token)
            yield token


class TextStream:
    """Incremental decoding of tokens into complete characters, whose bytes may be spread over several tokens.

    All tokens are decoded each time, since the text of a token may depend on those before.

    Attributes:
        text: the text returned so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.ids = list(prompt_ids)
        self.text = ""
        self.prompt_length = len(tokenizer.detokenize(self.ids))

    def add(self, token: int) -> str:
        """Add a token, and return the characters that it completes, if any."""
        self.ids.append(token)
        return self.advance(self.decoded().rstrip(INCOMPLETE_CHARACTER))

    def finish(self) -> str:
        """Return the rest, with bytes that form no character."""
        return self.advance(self.decoded())

    def decoded(self) -> str:
        """The text of all new tokens."""
        return self.tokenizer.detokenize(self.ids)[self.prompt_length :]

    def advance(self, decoded: str) -> str:
        """The part of the decoded text that was not returned before."""
        piece = decoded[len(self.text) :]
        self.text += piece
        return piece


def generate_text(
    model: TokenPredictor,
    prompt: str,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    show: Callable[[str], None],
) -> Sample:
    """Continue a prompt, and show the new text in pieces as it is generated.

    Raises:
        DataError: the prompt has ids outside of the vocabulary.
        NumericsError: the model's logits are not finite.
    """
    prompt_ids = encode_prompt(model, prompt)
    stream = TextStream(model.tokenizer, prompt_ids)
    for token in generate_ids(model, prompt_ids, sampling, max_new_tokens, seed):
        show(stream.add(token))
    show(stream.finish())
    num_tokens = len(stream.ids) - len(prompt_ids)
    return Sample(
        prompt=prompt,
        text=stream.text,
        num_prompt_tokens=len(prompt_ids),
        num_tokens=num_tokens,
        ended_by="length" if num_tokens == max_new_tokens else "eod",
        seed=seed,
    )
