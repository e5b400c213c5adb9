"""Which encoder runs: gigatoken where it gives the ids of the tokenizer's own library, else the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megafp8.data.encoder_names import GIGATOKEN, LIBRARY
from megafp8.data.encoders import Encoder, LibraryEncoder
from megafp8.data.gigatoken_encoder import EncoderMismatchError, GigatokenEncoder, UnsupportedTokenizerError
from megafp8.data.tokenizer import Tokenizer
from megafp8.errors import CapabilityError

# Characters that are put into one text: a call for each would take longer than what it encodes.
PROBE_CHARACTERS = 32


# Marks and shapes of text on which tokenizers differ, beside every kind of character in `probe_texts`.
SHAPES = (
    "",
    " ",
    "  a  b\t\tc\n\n\nd  \r\n\r\n e",
    "I'll don't WE'RE it's ain''t",
    "123456 1,234.5e-6 \u00bd\u00b2 \u0663\u0664",
    "<s> </s> <unk> <pad> (?P<s>x) <0x0A> <|endoftext|> <|im_end|> <SPECIAL_7>",
    "camelCaseWords HTTPServer snake_case __init__ a=b+c;//x",
    "\0\0 \x1b[0m\x7f",
    "e\u0301a\u0308\u0323 \u2581a \u2581\u2581",
    "a\u00a0b\u2003c\u3000d\u200b\u200d",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u4f60\u597d\u4e16\u754c\u3053\u3093 \uac00\ub098 \u0e2a\u0e27\u0e31\u0e2a",
)


@dataclass(frozen=True)
class Choice:
    """An encoder, its name among ENCODERS, and why it was chosen, for people."""

    encoder: Encoder
    kind: str
    reason: str


def build_encoder(tokenizer: Tokenizer, kind: str) -> Encoder:
    """Build an encoder without any check: GIGATOKEN or LIBRARY.

    Raises:
        UnsupportedTokenizerError: gigatoken is not there, or does not know the tokenizer.
    """
    return GigatokenEncoder(tokenizer) if kind == GIGATOKEN else LibraryEncoder(tokenizer)


def choose_encoder(tokenizer: Tokenizer, asked_for: str, sample: Callable[[], Sequence[str]]) -> Choice:
    """Choose an encoder.

    Args:
        tokenizer: that of the job.
        asked_for: one of ENCODERS; AUTO takes gigatoken when it passes the check.
        sample: gives texts of the job's input.

    Raises:
        CapabilityError: gigatoken was asked for, and is not there or fails the check.
    """
    if asked_for == LIBRARY:
        return Choice(LibraryEncoder(tokenizer), LIBRARY, "as asked for")
    try:
        encoder = GigatokenEncoder(tokenizer)
        encoder.check(list(SHAPES))
        encoder.check(probe_texts())
        texts = sample()
        encoder.check(texts)
    except (UnsupportedTokenizerError, EncoderMismatchError) as error:
        if asked_for == GIGATOKEN:
            raise CapabilityError(f"--encoder gigatoken cannot be used: {error}") from error
        return Choice(LibraryEncoder(tokenizer), LIBRARY, f"gigatoken is not used: {error}")
    reason = f"it gives the ids of the tokenizer's own library on {len(texts)} texts of this input"
    return Choice(encoder, GIGATOKEN, reason)


def probe_texts() -> list[str]:
    """Return texts with characters of all kinds: Latin's and the punctuation's one by one, of others every 41st."""
    numbers = [*range(0x250), *range(0x2000, 0x2100), *range(0x250, 0xD800, 41), *range(0xE000, 0x20000, 41)]
    around = [f"a{chr(number)}b {chr(number)}1{chr(number)}\n{chr(number)}{chr(number)}" for number in numbers]
    return ["".join(around[first : first + PROBE_CHARACTERS]) for first in range(0, len(around), PROBE_CHARACTERS)]
