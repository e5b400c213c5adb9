"""`megafp8 pretrain --help`: one screen of common flags, groups, single flags, and the marks at the declarations."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.config import flags, help
from megafp8.config.flag_parser import cached_parser
from megafp8.config.schema.setting import COMMON, DEPRECATED, TESTS
from megafp8.config.settings import all_settings
from megafp8.errors import ConfigError

DOCS = Path(__file__).resolve().parents[3] / "docs"
PRESENT = [setting for setting in all_settings() if not setting.former]
MOST_LINES, WIDTH = 62, 104  # of the short help; an example may be longer than the texts
FLAG = re.compile(r"^  (--[a-z0-9-]+)", re.MULTILINE)


def shown(topic: str) -> str:
    return help.help_text(topic, cached_parser())


def printed(*argv: str) -> str:
    """What a command line with --help prints, in a process that must not need torch."""
    code = (
        "import sys\nfrom megafp8.config import flags\n"
        "try: flags.parse(sys.argv[1:])\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True).stdout


def test_the_short_help_is_a_screen_and_a_half_of_common_flags() -> None:
    lines = printed("--model-preset", "tiny", "--help").splitlines()
    assert lines[0].startswith("usage: megafp8 pretrain --model-preset NAME --data-path PREFIX")
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= WIDTH
    common = [setting.flags[0] for setting in PRESENT if setting.audience is COMMON]
    assert 25 <= len(common) <= 40
    found = FLAG.findall("\n".join(lines))
    assert set(found) == {*common, *help.COMMON_OPTIONS}
    assert found.index("--model-preset") < found.index("--data-path") < found.index("--lr") < found.index("--save")
    assert all(name in " ".join(lines[-5:]) for name in help.GROUPS if name != "general")


def test_the_examples_of_the_short_help_are_command_lines() -> None:
    first, second = re.findall(r"megafp8 pretrain (.*?)(?:#|$)", help.EXAMPLES.replace("\\\n", ""), re.MULTILINE)
    assert flags.parse_with_problems(first.split())[1] == []
    assert flags.parse_with_problems(second.replace("...", "").split())[1] == []


def test_all_flags_are_shown_with_their_defaults() -> None:
    text = printed("--help-all")
    for setting in PRESENT:
        assert all(flag in text for flag in setting.flags + setting.off), setting.name
    assert "(default: 0.02)" in text and "model: shape of the GPT" in text


def test_a_setting_has_a_group_and_no_default_in_its_text() -> None:
    """The default stands in one place: `default` and `unset`."""
    assert {setting.group for setting in PRESENT} == set(help.GROUPS)
    assert [setting.name for setting in PRESENT if re.search(r"\bdefaults?\b", setting.help)] == []
    twice = [each for each in PRESENT if each.unset and each.default not in (None, (), False)]
    assert [each.name for each in twice] == [], "a default and a text for it"


def test_deprecated_and_test_flags_are_marked_and_not_in_the_short_help() -> None:
    short = shown("")
    for audience, mark in help.MARKS.items():
        marked = [setting for setting in PRESENT if setting.audience is audience]
        assert marked
        for setting in marked:
            flag = (*setting.flags, *setting.off)[0]
            assert flag not in short and "note " in shown(flag)
            assert mark in shown(setting.group)
    assert {DEPRECATED, TESTS} == set(help.MARKS)


def test_a_group_has_all_of_its_flags_and_no_other() -> None:
    text = shown("multi-token prediction")
    assert FLAG.findall(text) == ["--mtp-num-layers", "--mtp-loss-scaling-factor"]
    assert text == shown("mtp") == shown("multi_token_prediction")
    assert FLAG.findall(shown("model"))[0] == "--model-preset"
    pages = [page for _, page in help.GROUPS.values() if page]
    assert [page for page in pages if not (DOCS / page).is_file()] == []


@pytest.mark.parametrize("topic", ["--spike-window", "spike-window", "spike_window", "--spike_window"])
def test_a_flag_is_found_with_and_without_dashes(topic: str) -> None:
    lines = [line.split(None, 1) for line in shown(topic).splitlines() if line]
    assert lines[0] == ["--spike-window", "UPDATES"]
    facts = {name: text for name, text in lines[2:] if name != "in"}
    assert facts["value"] == "whole number of updates, at least 3" and facts["default"] == "32"
    assert facts["needs"] == "--spike-policy (refused without it)" and facts["group"] == "reliability"
    assert " Megatron-LM  no such flag" in shown(topic)


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("--no-fp8-wgrad", "compute the wgrad GEMM in FP8"),
        ("--exit-signal-handler", "Megatron-LM  differs: off by default"),
        ("--num-layers", "Megatron-LM  the same"),
        ("world-size", "number of ranks to plan for"),
        ("--fp8-hybrid", "read as --fp8-format hybrid"),
        ("--use-mcore-models", "A flag of Megatron-LM. --use-mcore-models: no effect"),
        ("--planted-fault", "is gone"),
        ("amax", "--fp8-amax-compute-algo {most_recent,max}"),
    ],
)
def test_what_the_help_says_about_a_word(topic: str, text: str) -> None:
    assert text in shown(topic)


@pytest.mark.parametrize(
    ("topic", "hint"),
    [("--hiden-size", "--help hidden-size?"), ("expert", ""), ("qqqq", "groups: model, rotary embedding,")],
)
def test_an_unknown_word_gets_a_suggestion(topic: str, hint: str) -> None:
    if not hint:
        assert "flags with 'expert'" in shown(topic)
        return
    with pytest.raises(ConfigError) as caught:
        flags.parse(["--help", topic])
    assert hint in str(caught.value) and caught.value.exit_status == 64


@pytest.mark.parametrize(
    ("argv", "topic"),
    [
        ("--lr 1", None), ("-h", ""), ("--lr 1 --help", ""), ("--help latent attention --lr 1", "latent attention"),
        ("--help --lr 1", "--lr"), ("--help=lr", "lr"), ("--help-all", "all"),
    ],
)  # fmt: skip
def test_the_topic_of_a_command_line(argv: str, topic: str | None) -> None:
    assert help.requested_topic(argv.split()) == topic
