"""YAML of files of a limited size, with errors that name the line."""

from __future__ import annotations

from typing import Any, Optional

from megafp8.utils.files import AnyPath, UnreadableFile, printable, read_text

MAX_BYTES = 1 << 20


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
        UnreadableFile: the text is not YAML, or has several documents or tags that no YAML has.
    """
    return _parse(text, path, as_written, has_values=True)


def compose_yaml(text: str) -> Any:
    """The tree of PyYAML nodes, which have line numbers; None for an empty text.

    Raises:
        UnreadableFile: as `parse_yaml`, but for tags, which nodes keep; its cause is a `yaml.YAMLError` for a syntax
            error.
    """
    return _parse(text, None, as_written=False, has_values=False)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of every key of a valid text's mappings, by the keys that lead to it: `{("model", "hidden_size"): 3}`.

    Mappings in lists are left out.
    """
    lines: dict[tuple[str, ...], int] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), compose_yaml(text))]
    seen = set[int]()  # an anchor may hold itself
    for outer, node in pending:
        is_new = getattr(node, "id", "") == "mapping" and id(node) not in seen
        seen.add(id(node))
        for key, value in node.value if is_new else ():
            path = (*outer, str(key.value))
            lines[path] = key.start_mark.line + 1
            pending.append((path, value))
    return lines


def _parse(text: str, path: Optional[AnyPath], as_written: bool, has_values: bool) -> Any:
    import yaml  # here, because --help imports this module

    try:
        loader = (yaml.BaseLoader if as_written else yaml.SafeLoader)(text)
        root = loader.get_single_node()
        return loader.construct_document(root) if has_values and root is not None else root
    except RecursionError:  # `from None`, because its traceback has a thousand frames
        raise UnreadableFile("nested too deeply", path) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is None:
            raise UnreadableFile(f"not YAML: {error.problem}", path) from error
        written = next(iter(text.splitlines()[mark.line :]), "").strip()
        quoted = f"{printable(written)!r}: " if written else ""  # the end of the file has nothing to quote
        raise UnreadableFile(f"not YAML: {quoted}{error.problem}", path, line=mark.line + 1) from error
    # Also escapes and numbers that are out of range, and texts that are not of the type of their tag.
    except (yaml.YAMLError, ValueError, OverflowError, AttributeError, LookupError) as error:
        raise UnreadableFile(f"not YAML: {error}", path) from error
