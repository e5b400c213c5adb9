"""Questions about docstrings: the same every time, about held-out modules, with one right choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.data.preprocessing.cloze import cloze_questions, held_out, write_questions
from megafp8.data.preprocessing.corpus import Document
from megafp8.data.task_files import read_questions
from megafp8.errors import DataError


def module(number: int) -> Document:
    words = " ".join(f"word{number}x{index}" for index in range(10))
    return Document(f'def f{number}(a, b=1):\n    """{words}\n\n    More.\n    """\n', f"m{number}.py")


DOCUMENTS = [*map(module, range(6)), Document("def broken(:", "broken.py"), Document('"""Short."""', "short.py")]


def test_the_right_choice_is_the_end_of_the_docstring(tmp_path: Path) -> None:
    questions = cloze_questions(DOCUMENTS, 6, seed=1)
    assert questions == cloze_questions(DOCUMENTS, 6, seed=1)
    assert questions != cloze_questions(DOCUMENTS, 6, seed=2)
    for question in questions:
        number = question["source"].strip("m.py")
        start, end = (" ".join(f"word{number}x{index}" for index in part) for part in (range(5), range(5, 10)))
        assert question["context"] == f'def f{number}(a, b=1):\n    """{start}'
        assert question["choices"][question["answer"]] == f" {end}"
        assert len(set(question["choices"])) == 4
    write_questions(tmp_path / "q.jsonl", questions)
    assert [each.answer for each in read_questions(tmp_path / "q.jsonl")] == [each["answer"] for each in questions]
    assert json.loads((tmp_path / "q.jsonl").read_text().splitlines()[0]) == questions[0]


def test_too_few_functions() -> None:
    with pytest.raises(DataError, match="give 6 questions of 7"):
        cloze_questions(DOCUMENTS, 7, seed=1)


def test_held_out_modules_are_the_last_ones() -> None:
    documents = [module(number) for number in range(25)]
    assert held_out(documents) == documents[23:]
