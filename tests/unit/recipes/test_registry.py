"""The registered recipes and their properties."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from megafp8.config.schema import PrecisionConfig
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand, OperandRule, Recipe

CHANNELS = Path(__file__).with_name("channels.py")
every_recipe = pytest.mark.parametrize("recipe", registry.recipes(), ids=lambda recipe: recipe.name)


@pytest.fixture
def fresh_registry():
    registry.clear_cache()
    yield
    registry.clear_cache()


def test_recipes_are_ordered_from_coarse_to_fine_scales() -> None:
    assert registry.names() == ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", "quartet2")
    assert registry.names("fp4") == ("nvfp4", "quartet2")


def test_an_unknown_name_raises_and_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'tensorwize' is not a recipe; recipes: tensorwise, delayed"):
        registry.get("tensorwize")


@every_recipe
def test_options_are_settings_with_the_same_defaults(recipe: Recipe) -> None:
    """A recipe defines its options without the settings, so both could have different defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(PrecisionConfig)}
    parameters = inspect.signature(recipe.build).parameters.values()
    taken = {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert taken == {name: defaults[name] for name in recipe.option_names}
    assert set(recipe.setting_names) <= set(defaults)
    assert set(recipe.resume_option_names) <= set(recipe.option_names)


@every_recipe
def test_every_format_has_six_rules_and_the_recipe_s_name(recipe: Recipe) -> None:
    assert recipe.default_format in recipe.formats
    for number_format in recipe.formats:
        built = recipe.rules(number_format)
        assert built.name == recipe.name and len(built.rules) == 6 and all(built.is_quantized(gemm) for gemm in Gemm)


@every_recipe
def test_fallbacks_and_export_forms_are_recipes(recipe: Recipe) -> None:
    assert all(name in registry.names() for name, _ in recipe.fallbacks)
    assert registry.get(recipe.exported_as or registry.DEFAULT_EXPORT).export_form is not None


# Written by hand. The objects derive them from their rules.
FACTS = ("cast_bytes", "code_bytes", "block_length", "is_stateful", "supports_param_gather")
FACTS_OF = {
    "tensorwise": (6, 1, None, False, True),
    "delayed": (4, 1, None, True, True),
    "rowwise": (6, 1, None, False, False),
    "blockwise": (4, 1, 128, False, True),
    "mxfp8": (4, 1, 32, False, False),
    "nvfp4": (7, 0.5, 16, False, False),
    "quartet2": (7, 0.5, 16, False, False),
}


@pytest.mark.parametrize("name", FACTS_OF)
def test_properties_derived_from_the_rules(name: str) -> None:
    assert tuple(getattr(registry.get(name), fact) for fact in FACTS) == FACTS_OF[name]


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [("tensorwise", (8, 0), False), ("tensorwise", (8, 9), True), ("blockwise", (8, 9), False),
     ("blockwise", (9, 0), True), ("mxfp8", (9, 0), False), ("mxfp8", (10, 3), True), ("mxfp8", (12, 0), False),
     ("nvfp4", (10, 3), True), ("nvfp4", (12, 1), False),
     ("rowwise", (9, 0), False), ("tensorwise", None, False)],
)  # fmt: skip
def test_where_transformer_engine_has_a_recipe(name: str, capability: tuple[int, int] | None, expected: bool) -> None:
    assert registry.get(name).is_native(capability) == expected


def test_a_full_dimension_becomes_a_length() -> None:
    rules = registry.get("rowwise").rules()
    rule = rules.rule(Operand.INPUT, Gemm.FPROP)
    assert rule is not None and (rule.block, rule.granularity) == ((1, None), "row")
    assert rule.for_shape((24, 48)).block == (1, 48)
    columns = rules.rule(Operand.WEIGHT, Gemm.DGRAD)
    assert columns is not None and columns.for_shape((24, 48)).block == (24, 1) and columns.granularity == "column"
    whole = OperandRule(format=rule.format)
    assert whole.for_shape((24, 48)) is whole


# --- external recipes -------------------------------------------------------------------------------------------------


def test_the_environment_adds_a_recipe(monkeypatch: pytest.MonkeyPatch, fresh_registry: None) -> None:
    monkeypatch.setenv(registry.RECIPES_VARIABLE, str(CHANNELS))
    assert registry.names("fp8") == ("tensorwise", "delayed", "rowwise", "blockwise", "channels", "mxfp8")
    assert registry.get("channels").supports_param_gather


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "must define RECIPE"), ("RECIPE = 3", "must be a megafp8.recipes.base.Recipe"),
     ("1 / 0", "ZeroDivisionError"), ("import sys\nsys.exit(0)", "mine.py: SystemExit: 0; it must define RECIPE"),
     ("class Panic(BaseException): ...\nraise Panic('of a library')", "Panic: of a library"),
     ("from megafp8.recipes.mxfp8 import RECIPE", "a recipe 'mxfp8' already exists"),
     ("import dataclasses\nfrom megafp8.recipes.mxfp8 import RECIPE\nRECIPE = dataclasses.replace(RECIPE, name='a-b')",
      "letters, digits and underscores")],
    ids=["empty", "no recipe", "raises", "exits", "panics", "taken", "name"],
)  # fmt: skip
def test_invalid_external_recipes_are_reported(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_registry: None
) -> None:
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setenv(registry.RECIPES_VARIABLE, str(tmp_path / "mine.py"))
    with pytest.raises(ConfigError, match=message):
        registry.names()


def test_an_interrupt_ends_the_import_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_registry: None
) -> None:
    (tmp_path / "mine.py").write_text("raise KeyboardInterrupt")
    monkeypatch.setenv(registry.RECIPES_VARIABLE, str(tmp_path / "mine.py"))
    with pytest.raises(KeyboardInterrupt):
        registry.names()


def test_a_missing_file_or_module_is_named(monkeypatch: pytest.MonkeyPatch, fresh_registry: None) -> None:
    for source in ("no/such/file.py", "no_such_module"):
        monkeypatch.setenv(registry.RECIPES_VARIABLE, source)
        with pytest.raises(ConfigError, match=source):
            registry.names()
