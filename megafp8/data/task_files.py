"""Questions for downstream scores: files of JSON lines, and their token ids.

A line is a question with choices, or a text with its continuation:

    {"context": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
    {"context": "The capital of France is", "target": " Paris"}

Other keys are ignored. Context and choice are encoded together, as in the LM Evaluation Harness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megafp8.data.token_windows import microbatches
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.errors import DataError
from megafp8.utils.files import LIST_BYTES, UnreadableFile, printable, read_text
from megafp8.utils.strict_json import parse_json


@dataclass(frozen=True)
class Question:
    """A context and its possible continuations.

    Attributes:
        choices: the target alone, where there is no choice.
        answer: index of the right choice.
        line: of the file, from 1.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    line: int


@dataclass(frozen=True)
class Row:
    """A context with one choice.

    Attributes:
        ids: tokens of both; all but the last one are inputs.
        num_scored: tokens of the choice, the last ones.
    """

    ids: tuple[int, ...]
    num_scored: int

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads."""
        return len(self.ids) - 1


@dataclass(frozen=True)
class Task:
    """The questions of a file, encoded.

    Attributes:
        name: of the file, without its folder and suffixes.
        rows: of all choices of the first question, of the second one, and so on.
        num_truncated: questions that were longer than the context window, and lost the start of their context.
    """

    name: str
    questions: tuple[Question, ...]
    rows: tuple[Row, ...]
    num_truncated: int


def load_tasks(paths: Sequence[str | Path], tokenizer: Tokenizer, context_tokens: int) -> tuple[Task, ...]:
    """Read and encode task files.

    Args:
        context_tokens: length of the context window.

    Raises:
        DataError: a file cannot be read, a line is no question, a choice has no token of its own or does not fit into
            the context window, or two files have the same name.
    """
    tasks = tuple(encode_task(Path(path), tokenizer, context_tokens) for path in paths)
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two task files are named {twice[0]}, by which scores are reported: rename one")
    return tasks


def truncations(tasks: Sequence[Task]) -> list[str]:
    """A line for each task with questions that do not fit into the context window."""
    return [
        f"task {task.name}: {task.num_truncated} of {len(task.questions)} questions are longer than the context window "
        "and lose the start of their context"
        for task in tasks
        if task.num_truncated
    ]


def read_questions(path: Path) -> tuple[Question, ...]:
    """The questions of a file. Empty lines are left out.

    Raises:
        DataError: see `load_tasks`.
    """
    try:
        lines = read_text(path, LIST_BYTES).split("\n")
    except UnreadableFile as error:
        raise DataError(f"task file {path} cannot be read: {error.reason}") from error
    questions = tuple(parse_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not questions:
        raise DataError(f"task file {path} has no question; a line is {{"
                        '"context": "...", "choices": ["...", "..."], "answer": 0}')  # fmt: skip
    return questions


def parse_question(path: Path, number: int, line: str) -> Question:
    """The question of a line.

    Raises:
        DataError: the line is no question.
    """

    def refuse(reason: str) -> DataError:
        return DataError(f"task file {path}, line {number}: {reason}")

    try:
        content = parse_json(line)
    except UnreadableFile as error:
        raise refuse(error.reason) from error
    if not isinstance(content, dict):
        raise refuse("must be a JSON object")
    context, choices, answer = content.get("context"), content.get("choices"), content.get("answer")
    if not isinstance(context, str):
        raise refuse(f'"context" must be a text, not {printable(repr(context))}')
    if ("choices" in content) == ("target" in content):
        raise refuse('must have either "choices" or "target"')
    if "target" in content:
        choices, answer = [content["target"]], 0
    elif not isinstance(choices, list) or len(choices) < 2:
        raise refuse(f'"choices" must be a list of two or more texts, not {printable(repr(choices))}')
    elif type(answer) is not int or not 0 <= answer < len(choices):
        raise refuse(f'"answer" must be the index of a choice, 0 to {len(choices) - 1}, not {printable(repr(answer))}')
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise refuse(f"a choice and a target must be a text that is not empty, not {printable(repr(choice))}")
    return Question(context, tuple(choices), answer, number)


def encode_task(path: Path, tokenizer: Tokenizer, context_tokens: int) -> Task:
    """Read and encode a task file; errors as of `load_tasks`."""
    questions, rows, num_truncated = read_questions(path), [], 0
    for question in questions:
        is_truncated = False
        for choice in question.choices:
            try:
                context, scored = encode_pair(tokenizer, question.context, choice)
                row = make_row(context, scored, context_tokens)
            except DataError as error:
                raise DataError(f"task file {path}, line {question.line}: {error}") from error
            rows.append(row)
            is_truncated |= len(row.ids) < len(context) + len(scored)
        num_truncated += is_truncated
    return Task(path.name.partition(".")[0], questions, tuple(rows), num_truncated)


def encode_pair(tokenizer: Tokenizer, context: str, choice: str) -> tuple[list[int], list[int]]:
    """The token ids of a context and of its continuation, encoded together as in the LM Evaluation Harness.

    Spaces at the end of the context belong to the continuation, since most tokenizers join them to the next word. An
    empty context is the end of another document, as in training.

    Raises:
        DataError: the tokenizer cannot encode the text.
    """
    start = len(context.rstrip())
    context_ids = tokenizer.tokenize(context[:start]) if start else []
    ids = tokenizer.tokenize(context + choice)
    strange = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if strange:
        raise DataError(f"it has token {strange[0]}; the model has 0 to {tokenizer.vocab_size - 1}")
    return context_ids or [tokenizer.eod], ids[len(context_ids) :]


def make_row(context_ids: Sequence[int], scored_ids: Sequence[int], context_tokens: int) -> Row:
    """A row of at most `context_tokens` inputs, without the first tokens of a longer context.

    Raises:
        DataError: there is no token to score, or there are more than the context window has.
    """
    if not scored_ids:
        raise DataError("a choice has no token of its own: the tokenizer joins it to the last token of the context")
    if len(scored_ids) > context_tokens:
        raise DataError(f"a choice has {len(scored_ids)} tokens, more than the context window of {context_tokens}")
    ids = [*context_ids, *scored_ids][-context_tokens - 1 :]
    return Row(tuple(ids), len(scored_ids))


def groups_of_rows(
    rows: Sequence[Row], size: int, length_multiple: int, context_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Groups of at most `size` rows of similar lengths: the length that they are padded to, and their indices.

    Lengths are `length_multiple` times a power of two, so that there are few shapes, and at most `context_tokens`. The
    longest rows come first, for which memory may be too little.
    """
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        blocks = -(-row.num_inputs // length_multiple)
        length = min(context_tokens, length_multiple << (blocks - 1).bit_length())
        by_length.setdefault(length, []).append(index)
    for length, indices in sorted(by_length.items(), reverse=True):
        for first in range(0, len(indices), size):
            yield length, indices[first : first + size]


def row_batch(rows: Sequence[Row], length: int, vocab_size: int) -> dict[str, Tensor]:
    """A batch of rows in the format of the data loader, [rows, length]; `loss_mask` selects the scored tokens."""
    (batch,) = microbatches((np.array(row.ids) for row in rows), len(rows), length, vocab_size)
    first = torch.tensor([row.num_inputs - row.num_scored for row in rows])
    return batch | {"loss_mask": batch["loss_mask"] * (torch.arange(length) >= first[:, None])}
