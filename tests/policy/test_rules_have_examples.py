"""Every rule has an example that breaks it, the base configuration breaks none, and no rule ever raises."""

import random
import re

import pytest
from rule_examples import BASE, EXAMPLES, TABLES

from megafp8.config import rules
from megafp8.config.features import has_feature
from megafp8.config.flag_parser import build_parser
from megafp8.config.layer_backends import EMULATED
from megafp8.config.rules.base import UNSUPPORTED_SETTINGS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, settings_by_flag, settings_by_name, with_values


def config_of(changes):
    return with_values(RunConfig(), BASE | changes)


@pytest.mark.parametrize("rule", rules.ALL_RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_an_example_that_breaks_it(rule):
    assert rule.__name__ in EXAMPLES, f"add an example that breaks {rule.__name__}"
    changes, world_size, text = EXAMPLES[rule.__name__]
    found = list(rule(config_of(changes), world_size))
    assert any(text in problem for problem in found), found
    assert set(found) <= set(rules.problems(config_of(changes), world_size))


@pytest.mark.parametrize(("name", "supported", "reason"), UNSUPPORTED_SETTINGS, ids=lambda part: str(part)[:40])
def test_settings_without_effect_are_refused(name, supported, reason):
    found = rules.problems(config_of({name: True}), 1)
    assert any(reason in problem for problem in found), found


def test_no_example_without_a_rule():
    assert set(EXAMPLES) == {rule.__name__ for rule in rules.ALL_RULES}
    assert sum(map(len, TABLES)) == len(EXAMPLES)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_base_configuration_breaks_no_rule(world_size):
    assert rules.problems(config_of({}), world_size) == []


@pytest.mark.parametrize("rule", rules.ALL_RULES, ids=lambda rule: rule.__name__)
def test_rules_have_one_line_docstrings(rule):
    assert rule.__doc__ and "\n" not in rule.__doc__.strip()


def test_problems_name_flags_that_exist():
    known = set(build_parser()._option_string_actions)
    for changes, world_size, _ in EXAMPLES.values():
        for problem in rules.problems(config_of(changes), world_size):
            for flag in re.findall(r"--[a-z0-9][a-z0-9_-]*", problem):
                assert flag in known, f"{flag} in: {problem}"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"data.mock_data": False}, "no training data: give"),
        ({"data.mock_data": False, "data.data_path": ("a",), "data.train_data_path": ("b",)}, "keep one"),
        (
            {"data.mock_data": False, "data.data_path": ("a",), "data.valid_data_path": ("b",)},
            "--valid-data-path needs",
        ),
        ({"data.mock_data": False, "data.train_data_path": ("a",), "data.split": "1,1,1"}, "--split 1,1,1 has no"),
        ({"data.mock_data": False, "data.data_path": ("x", "a", "1", "b")}, "must alternate"),
        ({"data.mock_data": False, "data.train_data_path": ("0", "a", "1", "b")}, "and 0 is not"),
        ({"checkpoint.override_sample_order": True}, "--override-sample-order has no effect without --load"),
        ({"checkpoint.override_precision": True}, "--override-precision has no effect without --load"),
        ({"data.data_cache_path": "/dev/null/cache"}, "--data-cache-path /dev/null/cache"),
    ],
)
def test_contradictory_data_settings(changes, part):
    assert any(part in problem for problem in rules.problems(config_of(changes), 1))


def test_all_problems_are_reported_together():
    changes = {
        "model.num_layers": 3,
        "parallel.pipeline_model_parallel_size": 2,
        "optimizer.lr": None,
        "data.split": "x",
    }
    found = rules.problems(config_of(changes), 3)
    for part in ("world size 3", "--num-layers 3", "--lr is missing", "--split"):
        assert any(part in problem for problem in found), (part, found)


def test_tables_name_settings_and_numbers():
    parser = build_parser()
    for setting in all_settings():
        assert setting.range is None or setting.type in (int, float)
        for feature in filter(None, (setting.needs, setting.requires)):
            flag, *words = feature.split()
            assert flag in parser._option_string_actions, f"{setting.name}: {feature}"
            needed = settings_by_flag()[flag]
            assert not words or words[0] in needed.choices or (needed.auto and words == ["auto"]), feature
            has_feature(RunConfig(), feature)
    for name, supported, _ in UNSUPPORTED_SETTINGS:
        assert settings_by_name()[name].default in supported, f"{name}: the default is refused"
    unchecked = {
        setting.name
        for setting in all_settings()
        if setting.type in (int, float) and not (setting.choices or setting.range or setting.former)
    }
    # Other rules check them.
    assert unchecked == {"parallel.hierarchical_context_parallel_sizes", "training.rampup_batch_size"}


def test_no_rule_raises_on_missing_or_out_of_range_values():
    generator = random.Random(0)
    choices = {
        int: [0, -1, 1, 2, 3, 7, 16, 128],
        float: [0.0, -1.0, 0.5, 1.0, 3e-4],
        bool: [False, True],
        str: ["", "1", "x", "0,0,0", "90,10"],
    }
    base = config_of({})
    for _ in range(300):
        changes = {}
        for setting in generator.sample(all_settings(), 40):
            options = list(setting.choices) or choices[setting.type]
            options = [(), (options[0],), tuple(options)] if setting.many else options
            changes[setting.name] = generator.choice(options + ([None] if setting.optional else []))
        config, world_size = with_values(base, changes), generator.choice([0, 1, 3, 8])
        assert isinstance(rules.problems(config, world_size), list)
        assert isinstance(rules.warnings(config, EMULATED, world_size), list)
