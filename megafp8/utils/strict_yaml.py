"""Strict YAML: no custom tags, and limits on nesting and on the number of values with aliases expanded.

PyYAML composes a tree of nodes in which an alias is a second reference to its anchor's node. A few lines of aliases to
lists of aliases expand to billions of values, so the tree is checked before values are constructed. The pure Python
parser is used because the interpreter limits its recursion.
"""

from __future__ import annotations

import math
from typing import Any, Optional

from megafp8.utils.files import AnyPath, UnreadableFile, printable, read_text
from megafp8.utils.strict_json import MAX_DEPTH, check_number, too_deep

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
_TAG = "tag:yaml.org,2002:"
_KNOWN = frozenset(_TAG + name for name in ("str", "seq", "map", "int", "float", "bool", "null", "merge"))


def read_yaml(path: AnyPath, *, as_written: bool = False) -> Any:
    """The content of a YAML file.

    Args:
        path: the file.
        as_written: keep scalars as text. By YAML's rules `24:00:00` is 86400 and `on` is true.

    Raises:
        UnreadableFile: the file cannot be read, or as `parse_yaml`.
    """
    return parse_yaml(read_text(path, MAX_BYTES), path, as_written=as_written)


def parse_yaml(text: str, path: Optional[AnyPath] = None, *, as_written: bool = False) -> Any:
    """Parse YAML text; the arguments are those of `read_yaml`.

    Raises:
        UnreadableFile: the text is not YAML or has several documents, is nested deeper than `MAX_DEPTH`, has more than
            `MAX_NODES` values with aliases expanded, has custom tags, or has numbers that are too long or not finite.
    """
    return _parse(text, path, as_written, has_values=True)


def compose_yaml(text: str) -> Any:
    """The tree of PyYAML nodes, which have line numbers; None for an empty text.

    Raises:
        UnreadableFile: as `parse_yaml`; its cause is a `yaml.YAMLError` for a syntax error.
    """
    return _parse(text, None, as_written=False, has_values=False)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of every key of a valid text's mappings, by the keys that lead to it: `{("model", "hidden_size"): 3}`.

    Mappings in lists are left out.
    """
    lines: dict[tuple[str, ...], int] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), compose_yaml(text))]
    for outer, node in pending:
        for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
            path = (*outer, str(key.value))
            lines[path] = key.start_mark.line + 1
            pending.append((path, value))
    return lines


def _parse(text: str, path: Optional[AnyPath], as_written: bool, has_values: bool) -> Any:
    import yaml  # here, because --help imports this module

    try:
        loader = (yaml.BaseLoader if as_written else yaml.SafeLoader)(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_node(root, {})
        return loader.construct_document(root) if has_values else root
    except RecursionError:  # `from None`, because its traceback has a thousand frames
        raise too_deep(path) from None
    except UnreadableFile as error:
        raise UnreadableFile(error.reason, path, line=error.line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is None:
            raise UnreadableFile(f"not YAML: {error.problem}", path) from error
        written = next(iter(text.splitlines()[mark.line :]), "").strip()
        quoted = f"{printable(written)!r}: " if written else ""  # the end of the file has nothing to quote
        raise UnreadableFile(f"not YAML: {quoted}{error.problem}", path, line=mark.line + 1) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also escapes and numbers that are out of range
        raise UnreadableFile(f"not YAML: {error}", path) from error


def _check_node(node: Any, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Count the values and levels below a node, with aliases expanded.

    Args:
        node: a PyYAML node.
        sizes: results for nodes that were counted before, by identity; (0, 0) while a node is being counted.
    """
    if id(node) in sizes:
        if sizes[id(node)] == (0, 0):
            raise UnreadableFile("an anchor that holds itself", line=node.start_mark.line + 1)
        return sizes[id(node)]
    sizes[id(node)] = (0, 0)
    if node.tag not in _KNOWN:
        raise UnreadableFile(f"{node.tag.replace(_TAG, '!!')} is not supported", line=node.start_mark.line + 1)
    num_nodes, depth = 1, 0
    if isinstance(node.value, str):
        _check_scalar(node)
    else:
        for child in (part for item in node.value for part in (item if isinstance(item, tuple) else (item,))):
            of_child = _check_node(child, sizes)
            num_nodes, depth = num_nodes + of_child[0], max(depth, of_child[1] + 1)
    if depth > MAX_DEPTH:
        raise too_deep(None)
    if num_nodes > MAX_NODES:
        raise UnreadableFile(f"more than {MAX_NODES:,} values with its aliases written out")
    sizes[id(node)] = (num_nodes, depth)
    return num_nodes, depth


def _check_scalar(node: Any) -> None:
    node.value.encode()  # raises for an escape that is a lone surrogate
    if node.tag in (f"{_TAG}int", f"{_TAG}float"):
        check_number(node.value)
    if node.tag == f"{_TAG}float":
        number = node.value.replace("_", "").lower().lstrip("+-")
        if number in (".inf", ".nan") or (":" not in number and not math.isfinite(float(number))):
            raise UnreadableFile(f"{node.value} is not a finite number", line=node.start_mark.line + 1)
