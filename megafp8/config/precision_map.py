"""Which recipe each GEMM of each linear has: pure arithmetic on `--precision`, `--precision-map` and their kin.

Linears are named as in records: `layers.3.linear_fc2`, counted from 0 over the whole model whatever the layout, and
`output_layer`. What is said later wins:

    --fp8-format and --fp8-recipe (--fp4-...)   all linears of the layers; the output layer is in high precision
    --first-last-layers-bf16                    layers at both ends in high precision
    --precision-map FILE                        its entries, from the first to the last
    --precision ENTRY...                        on the command line

An entry is PATTERN[:GEMMS]=RECIPE[/FORMAT], for example `layers.20-23.*:dgrad,wgrad=bf16`.

The quantization rules of linears: recipes with the options that the settings give them.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Optional

from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.recipes import registry
from megafp8.recipes.base import OPERANDS_OF, LinearRecipe

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Those of a layer, in the order of the forward pass."""
MLP_LINEARS = ("linear_fc1", "linear_fc2")
OUTPUT_LAYER = "output_layer"
GEMMS = ("fprop", "dgrad", "wgrad")
HIGH_PRECISION = ("bf16", "fp32")
_ENTRY = re.compile(r"(?P<pattern>[^:=]+)(?::(?P<gemms>[^:=]+))?=(?P<recipe>[^:=/]+)(?:/(?P<format>[^:=/]+))?")
_RANGE = re.compile(r"layers\.(\d+)-(\d+)\.(.+)")


class GemmChoice(NamedTuple):
    """What a GEMM multiplies: codes by a recipe in a format (`e4m3`, `hybrid`, `e5m2`, `e2m1`), or numbers as they are.

    Attributes:
        recipe: None is high precision.
    """

    recipe: Optional[str] = None
    format: Optional[str] = None

    @property
    def name(self) -> str:
        """`tensorwise hybrid`; empty in high precision."""
        if self.recipe is None:
            return ""
        return f"{self.recipe} {self.format}" if len(registry.get(self.recipe).formats) > 1 else self.recipe


class LinearChoice(NamedTuple):
    """The choices for the three GEMMs of one linear."""

    fprop: GemmChoice = GemmChoice()
    dgrad: GemmChoice = GemmChoice()
    wgrad: GemmChoice = GemmChoice()

    def __str__(self) -> str:
        shown = [choice.name or "high precision" for choice in self]
        if len(set(shown)) == 1:
            return shown[0]
        return ", ".join(f"{gemm} {name}" for gemm, name in zip(GEMMS, shown, strict=True))

    @property
    def is_quantized(self) -> bool:
        """Is any GEMM?"""
        return any(choice.recipe is not None for choice in self)

    @property
    def recipes(self) -> tuple[str, ...]:
        """Those of the quantized GEMMs, each once."""
        return tuple(dict.fromkeys(choice.recipe for choice in self if choice.recipe is not None))


class MapFileEntry(str):
    """The text of an entry that stands in a file.

    Attributes:
        place: where, as an error says it: `--precision-map map.yaml: line 3`.
    """

    place: str


@dataclass(frozen=True)
class Entry:
    """One entry of a map.

    Attributes:
        recipe: `bf16` and `fp32` stand for high precision.
        format: None where the entry does not say.
    """

    pattern: str
    gemms: tuple[str, ...]
    recipe: str
    format: Optional[str]

    def choice(self, precision: PrecisionConfig) -> GemmChoice:
        """What it chooses in a run."""
        if self.recipe in HIGH_PRECISION:
            return GemmChoice()
        recipe = registry.get(self.recipe)
        asked = self.format or format_of(precision, recipe.family)
        return GemmChoice(self.recipe, asked or recipe.default_format)

    def matches(self, name: str) -> bool:
        """Is it about this linear?"""
        return is_named(name, self.pattern)


def is_named(linear: str, pattern: str) -> bool:
    """Does a pattern name a linear? It is a shell's, or one behind a range of layers: `layers.1-23.linear_*`."""
    layers = _RANGE.fullmatch(pattern)
    if layers is None:
        return fnmatchcase(linear, pattern)
    first, last, rest = int(layers[1]), int(layers[2]), layers[3]
    return any(fnmatchcase(linear, f"layers.{layer}.{rest}") for layer in range(first, last + 1))


def parse_entry(text: str) -> Entry:
    """Read `PATTERN[:GEMMS]=RECIPE[/FORMAT]`.

    Raises:
        ValueError: it is none; the message says why and what there is.
    """
    parts = _ENTRY.fullmatch(text)
    if parts is None:
        raise ValueError("give PATTERN=RECIPE or PATTERN:GEMMS=RECIPE, for example *.linear_fc2:dgrad,wgrad=bf16")
    gemms = tuple(parts["gemms"].split(",")) if parts["gemms"] else GEMMS
    if unknown := [gemm for gemm in gemms if gemm not in GEMMS]:
        raise ValueError(f"{unknown[0]!r} is no GEMM: they are {', '.join(GEMMS)}{_nearest(unknown[0], GEMMS)}")
    if twice := [gemm for gemm in GEMMS if gemms.count(gemm) > 1]:
        raise ValueError(f"{twice[0]} is there twice")
    recipe, fmt, known = parts["recipe"], parts["format"], (*HIGH_PRECISION, *registry.names())
    if recipe not in known:
        raise ValueError(f"{recipe!r} is no recipe: they are {', '.join(known)}{_nearest(recipe, known)}")
    formats = () if recipe in HIGH_PRECISION else registry.get(recipe).formats
    if fmt is not None and fmt not in formats:
        has = f"has {', '.join(formats)}" if formats else "has no format of its own"
        raise ValueError(f"{fmt!r} is no format of {recipe}, which {has}")
    return Entry(parts["pattern"], gemms, recipe, fmt)


def entries(precision: PrecisionConfig) -> tuple[Entry, ...]:
    """The map's entries, those aside that cannot be read, which are a rule's problem."""
    return tuple(entry for entry, _ in read_entries(precision.precision_map) if entry is not None)


def said_entries(precision: PrecisionConfig) -> Iterator[tuple[str, Entry]]:
    """The same entries, each after the words that it was given by."""
    for text, (entry, _) in zip(precision.precision_map, read_entries(precision.precision_map), strict=True):
        if entry is not None:
            yield said(text), entry


def said(text: str) -> str:
    """How an entry was given: `--precision ENTRY`, or the place in a file and the entry."""
    return f"{text.place}: {text}" if isinstance(text, MapFileEntry) else f"--precision {text}"


@functools.lru_cache(maxsize=64)
def read_entries(texts: tuple[str, ...]) -> tuple[tuple[Optional[Entry], str], ...]:
    """Each text as an entry, or None and what is wrong with it."""
    found: list[tuple[Optional[Entry], str]] = []
    for text in texts:
        try:
            found.append((parse_entry(text), ""))
        except ValueError as error:
            found.append((None, str(error)))
    return tuple(found)


def linear_names(num_layers: int) -> tuple[str, ...]:
    """All that a map can name, in the order of the forward pass."""
    layers = (f"layers.{layer}.{linear}" for layer in range(num_layers) for linear in LINEARS)
    return (*layers, OUTPUT_LAYER)


def why_nothing(pattern: str, num_layers: int) -> str:
    """Why a pattern names none of the model's linears, or not all that it says; empty if it does."""
    layers = _RANGE.fullmatch(pattern)
    if layers is not None and int(layers[1]) > int(layers[2]):
        return f"layers.{layers[1]}-{layers[2]}: a range goes up; give layers.{layers[2]}-{layers[1]}"
    if layers is not None and int(layers[2]) >= num_layers:
        return f"layers.{layers[1]}-{layers[2]}: the layers are 0 to {num_layers - 1}"
    names = linear_names(num_layers)
    if any(is_named(name, pattern) for name in names):
        return ""
    patterns = (*(f"*.{linear}" for linear in LINEARS), OUTPUT_LAYER, *names)
    return (
        f"{pattern} names no linear: they are layers.0 to layers.{num_layers - 1} with {', '.join(LINEARS)}, and "
        f"{OUTPUT_LAYER}{_nearest(pattern, patterns)}"
    )


def _nearest(text: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(text, known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def format_of(precision: PrecisionConfig, family: str) -> Optional[str]:
    """`--fp8-format` or `--fp4-format`, by family."""
    return {"fp8": precision.fp8_format, "fp4": precision.fp4_format}[family]


def base_choice(precision: PrecisionConfig) -> LinearChoice:
    """A layer's linears without a map."""
    if precision.fp8_format is None and precision.fp4_format is None:
        return LinearChoice()
    if precision.fp8_format is not None:
        choice = GemmChoice(precision.fp8_recipe, precision.fp8_format)
    else:
        choice = GemmChoice(precision.fp4_recipe, precision.fp4_format)
    return LinearChoice(choice, choice, choice if precision.fp8_wgrad else GemmChoice())


def unmapped_choice(name: str, num_layers: int, precision: PrecisionConfig) -> LinearChoice:
    """What a linear has where no entry names it."""
    if name == OUTPUT_LAYER or is_kept_high(int(name.split(".")[1]), num_layers, precision):
        return LinearChoice()
    return base_choice(precision)


def is_kept_high(layer: int, num_layers: int, precision: PrecisionConfig) -> bool:
    """Whether `--first-last-layers-bf16` keeps a layer (counted from 0 over the whole model) out of FP8."""
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return precision.first_last_layers_bf16 and (layer < start or layer >= num_layers - end)


def resolve(model: ModelConfig, precision: PrecisionConfig) -> dict[str, LinearChoice]:
    """The choices for every linear of the model, by name, in the order of the forward pass."""
    assert model.num_layers is not None
    return dict(_resolved(model.num_layers, precision))


@functools.lru_cache(maxsize=16)
def _resolved(num_layers: int, precision: PrecisionConfig) -> tuple[tuple[str, LinearChoice], ...]:
    return tuple(_choices(num_layers, precision))


def observable_linears(model: ModelConfig, precision: PrecisionConfig) -> tuple[str, ...]:
    """The linears whose quantization can be looked at, by name: the quantized ones. In a run in high precision recipes
    are tried on the linears of all layers."""
    chosen = resolve(model, precision)
    if is_quantized(precision):
        return tuple(name for name, choice in chosen.items() if choice.is_quantized)
    return tuple(name for name in chosen if name != OUTPUT_LAYER)


def changed_linears(model: ModelConfig, precision: PrecisionConfig) -> tuple[str, ...]:
    """The linears to which the map gives other choices than they have without one, by name."""
    assert model.num_layers is not None
    return _changed(model.num_layers, precision) if precision.precision_map else ()


@functools.lru_cache(maxsize=16)
def _changed(num_layers: int, precision: PrecisionConfig) -> tuple[str, ...]:
    resolved = _resolved(num_layers, precision)
    return tuple(name for name, choice in resolved if choice != unmapped_choice(name, num_layers, precision))


def changes_mlps(model: ModelConfig, precision: PrecisionConfig) -> bool:
    """Whether a linear of an MLP is among them."""
    return any(name.endswith(MLP_LINEARS) for name in changed_linears(model, precision))


def recipes_of(model: ModelConfig, precision: PrecisionConfig, linears: tuple[str, ...]) -> tuple[str, ...]:
    """The recipes of linears of these kinds (`linear_qkv`...) in whichever layers, each once."""
    assert model.num_layers is not None
    return _recipes_of(model.num_layers, precision, linears)


# A search over layouts asks for the same ones thousands of times.
@functools.lru_cache(maxsize=64)
def _recipes_of(num_layers: int, precision: PrecisionConfig, linears: tuple[str, ...]) -> tuple[str, ...]:
    chosen = (choice for name, choice in _resolved(num_layers, precision) if name.rpartition(".")[2] in linears)
    return tuple(dict.fromkeys(recipe for choice in chosen for recipe in choice.recipes))


def _choices(num_layers: int, precision: PrecisionConfig) -> Iterator[tuple[str, LinearChoice]]:
    for name in linear_names(num_layers):
        chosen = unmapped_choice(name, num_layers, precision)
        for entry in entries(precision):
            if entry.matches(name):
                chosen = chosen._replace(**dict.fromkeys(entry.gemms, entry.choice(precision)))
        yield name, chosen


def used_recipes(precision: PrecisionConfig) -> tuple[str, ...]:
    """Every recipe that a run names, that of all linears first; none in high precision."""
    named = (*base_choice(precision), *(entry.choice(precision) for entry in entries(precision)))
    return tuple(dict.fromkeys(choice.recipe for choice in named if choice.recipe is not None))


def is_quantized(precision: PrecisionConfig) -> bool:
    """Does a run name any recipe?"""
    return bool(used_recipes(precision))


def asked_by(precision: PrecisionConfig, recipe: str) -> str:
    """What asked for a recipe: `--fp8-recipe mxfp8`, or the first entry of the map that names it."""
    if recipe in base_choice(precision).recipes:
        return f"--{'fp4' if precision.fp8_format is None else 'fp8'}-recipe {recipe}"
    return next(words for words, entry in said_entries(precision) if entry.recipe == recipe)


def build_recipe(precision: PrecisionConfig) -> Optional[LinearRecipe]:
    """The rules of a layer's linears without a precision map, or None in high precision."""
    return build_linear_recipe(precision, base_choice(precision))


@functools.lru_cache(maxsize=64)
def build_linear_recipe(precision: PrecisionConfig, chosen: LinearChoice) -> Optional[LinearRecipe]:
    """The rules of one linear, whose GEMMs may each have another recipe; None where all are in high precision.

    Args:
        precision: has the recipes' options, such as the amax history's length.
    """
    if not chosen.is_quantized:
        return None
    if chosen == base_choice(precision):
        whole = _rules(precision, chosen.fprop)
        assert whole is not None
        return whole if precision.fp8_wgrad else whole.without_wgrad()
    parts = [_rules(precision, choice) for choice in chosen]
    rules = tuple(
        (operand, gemm, None if part is None else part.rule(operand, gemm))
        for (gemm, operands), part in zip(OPERANDS_OF, parts, strict=True)
        for operand in operands
    )
    names = [choice.recipe or "high" for choice in chosen]
    options = next((part.delayed for part in parts if part is not None and part.delayed is not None), None)
    return LinearRecipe(name="/".join(names) if len(set(names)) > 1 else names[0], rules=rules, delayed=options)


def _rules(precision: PrecisionConfig, choice: GemmChoice) -> Optional[LinearRecipe]:
    if choice.recipe is None:
        return None
    return registry.get(choice.recipe).rules(choice.format, vars(precision))
