"""Windows over a data set: every token but the first is predicted once, after the tokens before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shard_files import write_shard

from megafp8.config.schema import DataConfig
from megafp8.data.token_windows import microbatches, shard_documents, text_documents, windows
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12, 13, 14, 15, 16], [17, 18]]
STREAM = list(range(5, 19))


def predicted(batches: list[dict]) -> list[tuple[int, int]]:
    """(input, label) of each token with a weight."""
    return [
        (int(token), int(label))
        for batch in batches
        for tokens, labels, mask in zip(batch["tokens"], batch["labels"], batch["loss_mask"], strict=True)
        for token, label, weight in zip(tokens, labels, mask, strict=True)
        if weight
    ]


@pytest.mark.parametrize("length", [1, 2, 4, 13, 14, 50])
@pytest.mark.parametrize("size", [1, 3])
def test_each_token_is_predicted_once(length: int, size: int, tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "a", DOCUMENTS)
    batches = list(microbatches(windows(shard_documents([prefix]), length), size, length, 32))
    assert predicted(batches) == list(zip(STREAM, STREAM[1:], strict=False))
    assert all(batch["tokens"].shape[1] == length and len(batch["tokens"]) <= size for batch in batches)


@pytest.mark.parametrize("limit", [1, 4, 5, 13, 99])
def test_a_limit_is_exact(limit: int) -> None:
    documents = [np.array(document, dtype=np.uint16) for document in DOCUMENTS]
    batches = list(microbatches(windows(documents, 4, limit), 2, 4, 32))
    assert predicted(batches) == list(zip(STREAM, STREAM[1:], strict=False))[:limit]


def test_several_shards_are_one_stream(tmp_path: Path) -> None:
    prefixes = [write_shard(tmp_path / name, [document]) for name, document in (("a", [1, 2]), ("b", [3]))]
    assert [list(window) for window in windows(shard_documents(prefixes), 8)] == [[1, 2, 3]]


def test_one_token_has_nothing_to_predict() -> None:
    assert list(windows([np.array([3])], 4)) == []


def test_text_ends_each_document() -> None:
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="ByteLevelTokenizer"))
    found = np.concatenate(list(text_documents(["ab", "c"], tokenizer)))
    assert list(found) == [*tokenizer.tokenize("ab"), tokenizer.eod, *tokenizer.tokenize("c"), tokenizer.eod]


def test_a_token_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="the data has token 9; the model has 0 to 7"):
        list(microbatches([np.array([1, 9])], 1, 4, 8))


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "a", DOCUMENTS)
    path = tmp_path / "a.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="but its index needs 28"):
        list(shard_documents([prefix]))
