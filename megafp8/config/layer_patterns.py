"""Patterns of layers in Megatron-LM's notation: a number, or a list of numbers with + and *."""

from __future__ import annotations

import ast
from typing import Union

MAX_LIST = 10_000  # layers


def evaluate_pattern(text: str) -> Union[int, list[int]]:
    """Evaluate an expression such as `([0]*3+[1]*58)`.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: it is neither a number nor a list of numbers.
    """
    return _evaluate(ast.parse(text, mode="eval").body)


def _evaluate(node: ast.expr) -> Union[int, list[int]]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List) and len(node.elts) <= MAX_LIST:
        elements = [_evaluate(each) for each in node.elts]
        if all(isinstance(each, int) for each in elements):
            return [each for each in elements if isinstance(each, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            values, count = (left, right) if isinstance(left, list) else (right, left)
            if isinstance(values, list) and isinstance(count, int) and count * len(values) <= MAX_LIST:
                return values * count
    raise ValueError("neither a number nor a list of numbers")
