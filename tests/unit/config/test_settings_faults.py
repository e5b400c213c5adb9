"""Values that are invalid with any other settings are refused when they are read."""

from __future__ import annotations

import json

import pytest

from megafp8.config import flags, settings
from megafp8.config.settings import all_settings, settings_by_name
from megafp8.errors import ConfigError

PATHS = [setting for setting in all_settings() if setting.is_path]
SIZES = {"model.num_layers": 10_000, "model.hidden_size": 1 << 20, "data.seq_length": (1 << 63) - 1}


@pytest.mark.parametrize("setting", PATHS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("path", ["runs/" + "x" * 256, "a\udcff", "a\0b"])
def test_paths(setting, path: str) -> None:
    _, problems = flags.parse_with_problems([setting.flags[0], path])
    assert any(problem.startswith(setting.flags[0]) and "is no path of a file" in problem for problem in problems)
    if path.isascii():  # JSON refuses the others earlier
        text = json.dumps({setting.section: {setting.field: [path] if setting.many else path}})
        with pytest.raises(ConfigError, match=f"{setting.name}: .* is no path of a file"):
            settings.read_settings(text)


def test_every_path_setting_is_checked() -> None:
    words = ("folder", "file", "shard")
    texts = [each for each in all_settings() if each.type is str and not each.choices and not each.former]
    assert {setting.name for setting in texts if any(word in setting.help.split() for word in words)} - {
        "data.tiktoken_pattern", "data.split", "data.data_phases",  # the last has the contents of the file
    } <= {setting.name for setting in PATHS}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    setting, most = settings_by_name()[name], SIZES[name]
    for value in (most + 1, 10**60):
        text = f"{str(value)[:60]}{'...' if value > 10**60 - 1 else ''} must be at most {most:,}"
        _, problems = flags.parse_with_problems([setting.flags[0], str(value)])
        assert f"{setting.flags[0]}: {text}" in problems
        with pytest.raises(ConfigError) as caught:
            settings.read_settings(json.dumps({setting.section: {setting.field: value}}))
        assert caught.value.problems == [f"{name}: {text}"]
    assert flags.parse([setting.flags[0], str(most)]).given == {name}
    assert settings.read_settings(json.dumps({setting.section: {setting.field: most}})) == {name: most}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"data": {"seq_length": ' + "9" * 10_000 + "}}", "[NaN]", "[1e999]"])
def test_oversized_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        settings.read_settings(text)


@pytest.mark.parametrize("flag", ["--load", "--save", "--tensorboard-dir"])
def test_an_empty_path(flag: str) -> None:
    assert flags.parse_with_problems([flag, ""])[1] == [f"{flag}: is empty: give a path, or leave the flag out"]
