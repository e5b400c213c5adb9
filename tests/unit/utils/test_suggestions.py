"""Suggestions for misspelled names."""

from __future__ import annotations

import pytest

from megafp8.utils.strict_yaml import key_lines
from megafp8.utils.suggestions import closest, did_you_mean, hub_hint, same_name, unknown_keys


@pytest.mark.parametrize(
    ("text", "known", "near"),
    [
        ("Llama3-8B", ("llama3-70b", "llama3-8b"), ["llama3-8b"]),
        ("tensor", ("delayed", "tensorwise"), ["tensorwise"]),
        ("--seq_lenght", ("--seq-length", "--save"), ["--seq-length"]),
        ("--max_steps", ("--max-crashes",), []),
        ("a100", ("h100", "b200"), []),
        ("fp8", ("fp8-format",), []),
    ],
)
def test_only_near_names_are_suggested(text: str, known: tuple[str, ...], near: list[str]) -> None:
    assert closest(text, known) == near
    assert did_you_mean(text, known) == (f"; did you mean {near[0]}?" if near else "")


def test_the_same_name_may_be_spelled_in_another_case() -> None:
    assert same_name("RTX_4090", ["h100", "rtx-4090"]) == "rtx-4090" and same_name("h10", ["h100"]) is None


def test_unknown_keys_of_a_file_have_lines_and_the_known_keys_are_listed_once() -> None:
    lines = key_lines("nodes: 1\nnode: 2\nplace: {x: 1}\nzone: 3\nuse_fp8: 1\n")
    assert lines[("place", "x")] == 3
    top = {keys[0]: line for keys, line in lines.items() if len(keys) == 1}
    hint = {"use_fp8": "; use recipe"}
    assert unknown_keys(top, ["nodes", "time"], "j.yaml", lambda key: hint.get(key, "")) == [
        "j.yaml:2: unknown key 'node'; did you mean nodes?",
        "j.yaml:3: unknown key 'place'; the keys are nodes, time",
        "j.yaml:4: unknown key 'zone'",
        "j.yaml:5: unknown key 'use_fp8'; use recipe",
    ]


def test_a_download_is_proposed_for_names_of_the_hub_only() -> None:
    assert "hf download owner/model config.json --local-dir model" in hub_hint("owner/model", "config.json")
    assert [hub_hint(path) for path in ("/data/llama3", "./llama3", "data/llama3", "a/b/c")] == [""] * 4
