"""Questions about a text that every machine has: how does the docstring of a function go on?

The functions are those of Python's standard library. Wrong choices are ends of docstrings of other modules.
"""

from __future__ import annotations

import ast
import json
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.data.preprocessing.corpus import Document
from megafp8.errors import DataError
from megafp8.utils.files import atomic_write_text

NUM_CHOICES = 4
MIN_WORDS, MAX_WORDS = 8, 60
HELD_OUT = 0.1
"""Share of the documents, at the end of a corpus, of which `--split` takes validation and test data."""


@dataclass(frozen=True)
class Description:
    """A function's docstring in two halves, the first one after its signature."""

    source: str
    start: str
    end: str


def held_out(documents: Sequence[Document]) -> Sequence[Document]:
    """The last tenth of a corpus: no training data with `--split 90,10,0`."""
    return documents[len(documents) - int(len(documents) * HELD_OUT) :]


def descriptions(documents: Iterable[Document]) -> Iterator[Description]:
    """The first paragraphs of docstrings, in the order of the documents. Modules that do not parse are left out."""
    for document in documents:
        try:
            with warnings.catch_warnings():  # of escape sequences in modules of others
                warnings.simplefilter("ignore")
                tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            words = (ast.get_docstring(node) or "").partition("\n\n")[0].split()
            if MIN_WORDS <= len(words) <= MAX_WORDS:
                half = len(words) // 2
                signature = f'def {node.name}({ast.unparse(node.args)}):\n    """'
                yield Description(document.source, signature + " ".join(words[:half]), " " + " ".join(words[half:]))


def cloze_questions(documents: Iterable[Document], num_questions: int, seed: int) -> list[dict[str, Any]]:
    """Questions in the format of task files; the same for the same documents and seed.

    Raises:
        DataError: the documents have too few functions with docstrings.
    """
    found = list({each.end: each for each in descriptions(documents)}.values())
    generator = random.Random(seed)
    generator.shuffle(found)
    questions = []
    for right in found[:num_questions]:
        others = [each.end for each in found if each.source != right.source]
        if len(others) < NUM_CHOICES - 1:
            break
        choices = [right.end, *generator.sample(others, NUM_CHOICES - 1)]
        generator.shuffle(choices)
        answer = choices.index(right.end)
        questions.append({"context": right.start, "choices": choices, "answer": answer, "source": right.source})
    if len(questions) < num_questions:
        raise DataError(
            f"the held-out modules give {len(questions)} questions of {num_questions}: raise --max-bytes, or ask for "
            "fewer"
        )
    return questions


def write_questions(path: Path, questions: Iterable[dict[str, Any]]) -> None:
    """Write a task file, atomically."""
    atomic_write_text(path, "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions))
