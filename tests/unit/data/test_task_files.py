"""Task files: parsing, errors that name the line, and the token ids of choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.data.task_files import (
    Row,
    encode_pair,
    groups_of_rows,
    load_tasks,
    make_row,
    row_batch,
    truncations,
)
from megafp8.data.tokenizers.libraries import ByteLevelTokenizer, NullTokenizer
from megafp8.errors import DataError

CHOICES = {"context": "2 + 2 =", "choices": [" 4", " five"], "answer": 0, "source": "ignored"}
TARGET = {"context": "", "target": "yes"}


class JoiningTokenizer(ByteLevelTokenizer):
    """Bytes, but a space and the letter after it are one token, as a space and a word are in most vocabularies."""

    def tokenize(self, text: str) -> list[int]:
        return super().tokenize(text.replace(" a", "\x01"))


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_questions_and_continuations(tmp_path: Path) -> None:
    (task,) = load_tasks([write(tmp_path / "sums.jsonl", CHOICES, "", TARGET)], ByteLevelTokenizer(), 32)
    assert (task.name, task.num_truncated, truncations([task])) == ("sums", 0, [])
    assert [question.line for question in task.questions] == [1, 3]
    eod = ByteLevelTokenizer().eod
    assert task.rows == (Row(tuple(b"2 + 2 = 4"), 2), Row(tuple(b"2 + 2 = five"), 5), Row((eod, *b"yes"), 3))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be a JSON object"),
        ({"choices": ["a", "b"], "answer": 0}, '"context" must be a text, not None'),
        ({"context": ""}, 'either "choices" or "target"'),
        (CHOICES | {"target": "a"}, 'either "choices" or "target"'),
        (CHOICES | {"choices": ["a"]}, "two or more texts"),
        (CHOICES | {"choices": ["a", ""]}, "not empty, not ''"),
        (CHOICES | {"choices": ["a", 1]}, "not empty, not 1"),
        (CHOICES | {"answer": 2}, "index of a choice, 0 to 1, not 2"),
        (CHOICES | {"answer": True}, "0 to 1, not True"),
        (CHOICES | {"answer": -1}, "0 to 1, not -1"),
        (
            TARGET | {"target": "much longer than the window"},
            "a choice has 27 tokens, more than the context window of 9",
        ),
    ],
)
def test_a_wrong_line_is_named(line: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "task.jsonl", CHOICES, line)
    with pytest.raises(DataError, match=r"task file .*task\.jsonl, line 2: ") as error:
        load_tasks([path], ByteLevelTokenizer(), 9)
    assert message in str(error.value)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no question"):
        load_tasks([write(tmp_path / "empty.jsonl", "")], ByteLevelTokenizer(), 9)
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read"):
        load_tasks([tmp_path / "nowhere.jsonl"], ByteLevelTokenizer(), 9)
    (tmp_path / "other").mkdir()
    paths = [write(folder / "same.jsonl", TARGET) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(DataError, match="two task files are named same"):
        load_tasks(paths, ByteLevelTokenizer(), 9)


def test_a_tokenizer_that_cannot_encode(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: NullTokenizer expects token ids"):
        load_tasks([write(tmp_path / "words.jsonl", TARGET)], NullTokenizer(255), 9)
    with pytest.raises(DataError, match="line 1: it has token 300; the model has 0 to 255"):
        load_tasks([write(tmp_path / "ids.jsonl", {"context": "1", "target": " 300"})], NullTokenizer(255), 9)


def test_spaces_before_a_choice_belong_to_it() -> None:
    """As in the LM Evaluation Harness: the tokens are those of the whole text."""
    tokenizer = JoiningTokenizer()
    assert encode_pair(tokenizer, "is ", "apt") == (list(b"is"), list(b"\x01pt"))
    assert encode_pair(tokenizer, "is", " apt") == (list(b"is"), list(b"\x01pt"))
    assert encode_pair(tokenizer, "  ", "b") == ([tokenizer.eod], list(b"  b"))


def test_a_choice_without_a_token() -> None:
    with pytest.raises(DataError, match="no token of its own"):
        make_row([1, 2], [], 9)


def test_long_questions_lose_the_start_of_their_context(tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", {"context": "0123456789", "choices": ["ab", "abcd"], "answer": 0}, TARGET)
    (task,) = load_tasks([path], ByteLevelTokenizer(), 5)
    assert task.rows[:2] == (Row(tuple(b"6789ab"), 2), Row(tuple(b"89abcd"), 4))
    assert task.num_truncated == 1
    assert truncations([task]) == [
        "task long: 1 of 2 questions are longer than the context window and lose the start of their context"
    ]


def test_rows_of_similar_length_are_padded_together() -> None:
    rows = [Row(tuple(range(length + 1)), 1) for length in (3, 31, 4, 5, 17, 33, 9)]
    groups = list(groups_of_rows(rows, 2, 4, 36))
    assert groups == [(36, [5]), (32, [1, 4]), (16, [6]), (8, [3]), (4, [0, 2])]


def test_the_mask_selects_the_tokens_of_the_choice() -> None:
    batch = row_batch([Row((1, 2, 3, 4), 2), Row((5, 6), 1), Row((7, 8), 0)], 4, 10)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 6, 6], [7, 8, 8, 8]]
    assert batch["labels"][0].tolist() == [2, 3, 4, 4]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
