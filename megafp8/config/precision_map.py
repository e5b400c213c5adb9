"""Precision map: the recipe of each GEMM of each linear, from `--precision`, `--precision-map` and related flags.

Linears are named as in records: `layers.3.linear_fc2`, counted from 0 over the complete model in every layout, and
`output_layer`. Later sources win:

    --fp8-format and --fp8-recipe (--fp4-...)   linears of all layers; the output layer is in high precision
    --first-last-layers-bf16                    first and last layers in high precision
    --precision-map FILE                        its entries, from the first to the last
    --precision ENTRY...                        on the command line
    --fp8-schedule                              entries of a phase

An entry is PATTERN[:GEMMS]=RECIPE[/FORMAT], for example `layers.20-23.*:dgrad,wgrad=bf16`.

`build_linear_recipe` makes the quantization rules of a linear from the recipes of its GEMMs and their options.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple, Optional

from megafp8.config import latent_attention
from megafp8.config.expert_layers import expert_layers
from megafp8.config.precision_schedule import PhaseEntry, phases_with_entries, precisions
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.recipes import registry
from megafp8.recipes.base import HIGH_PRECISION, HIGH_PRECISION_DTYPES, OPERANDS_OF, LinearRecipe
from megafp8.utils.suggestions import did_you_mean

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linears of a dense layer without multi-latent attention, in the order of the forward pass."""
MLP_LINEARS = ("linear_fc1", "linear_fc2")
ATTENTION_LINEARS = ("linear_qkv", *latent_attention.PROJECTIONS, "linear_proj")
"""The linears of any kind of attention, in the order of the forward pass."""
EXPERTS, SHARED_EXPERTS = "experts.", "shared_experts."
"""Before the names of a layer's MLP linears, where it has experts: `layers.3.experts.linear_fc1` is of all experts."""
OUTPUT_LAYER = "output_layer"
GEMMS = ("fprop", "dgrad", "wgrad")
_ENTRY_PATTERN = re.compile(r"(?P<pattern>[^:=]+)(?::(?P<gemms>[^:=]+))?=(?P<recipe>[^:=/]+)(?:/(?P<format>[^:=/]+))?")
_EXPERT_NUMBER = re.compile(r"(\.experts\.)\d+\.")
_LAYER_RANGE = re.compile(r"layers\.([0-9]+)-([0-9]+)\.(.+)")


class GemmChoice(NamedTuple):
    """The recipe and format of one GEMM.

    Attributes:
        recipe: name of the recipe; None is high precision.
        format: `e4m3`, `hybrid`, `e5m2` or `e2m1`; None in high precision.
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
    """The recipes and formats of the three GEMMs of one linear."""

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
        """Whether any GEMM is quantized."""
        return any(choice.recipe is not None for choice in self)

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes of the quantized GEMMs, each once."""
        return tuple(dict.fromkeys(choice.recipe for choice in self if choice.recipe is not None))

    @property
    def is_stateful(self) -> bool:
        """Whether one of the recipes keeps an amax history."""
        return any(registry.get(recipe).is_stateful for recipe in self.recipes)


class MapFileEntry(str):
    """The text of an entry from a file.

    Attributes:
        source: for error messages: `--precision-map map.yaml:3`.
    """

    source: str


@dataclass(frozen=True)
class MapEntry:
    """One entry of a precision map.

    Attributes:
        pattern: linears that it applies to, see `matches_pattern`.
        gemms: some of `GEMMS`.
        recipe: name of a recipe, or one of `HIGH_PRECISION_DTYPES`.
        format: None for the format of the run, or else the default of the recipe.
    """

    pattern: str
    gemms: tuple[str, ...]
    recipe: str
    format: Optional[str]

    def choice(self, precision: PrecisionConfig) -> GemmChoice:
        """The recipe and format that it gives to its GEMMs."""
        if self.recipe in HIGH_PRECISION_DTYPES:
            return GemmChoice()
        recipe = registry.get(self.recipe)
        requested = self.format or format_of(precision, recipe.family)
        return GemmChoice(self.recipe, requested or recipe.default_format)


def matches_pattern(linear: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a linear.

    It is a shell pattern, optionally after a range of layers: `layers.1-23.linear_*`.
    """
    layers = _LAYER_RANGE.fullmatch(pattern)
    if layers is None:
        return fnmatchcase(linear, pattern)
    first, last, rest = int(layers[1]), int(layers[2]), layers[3]
    return any(fnmatchcase(linear, f"layers.{layer}.{rest}") for layer in range(first, last + 1))


def parse_entry(text: str) -> MapEntry:
    """Parse `PATTERN[:GEMMS]=RECIPE[/FORMAT]`.

    Raises:
        ValueError: it is not a valid entry, with the reason.
    """
    parts = _ENTRY_PATTERN.fullmatch(text)
    if parts is None:
        raise ValueError("give PATTERN=RECIPE or PATTERN:GEMMS=RECIPE, for example *.linear_fc2:dgrad,wgrad=bf16")
    gemms = tuple(parts["gemms"].split(",")) if parts["gemms"] else GEMMS
    if unknown := [gemm for gemm in gemms if gemm not in GEMMS]:
        raise ValueError(
            f"{unknown[0]!r} is not a GEMM; the GEMMs are {', '.join(GEMMS)}{did_you_mean(unknown[0], GEMMS)}"
        )
    if twice := [gemm for gemm in GEMMS if gemms.count(gemm) > 1]:
        raise ValueError(f"{twice[0]} is given twice")
    recipe, fmt, known = parts["recipe"], parts["format"], (*HIGH_PRECISION_DTYPES, *registry.names())
    if recipe not in known:
        raise ValueError(f"{recipe!r} is not a recipe; the recipes are {', '.join(known)}{did_you_mean(recipe, known)}")
    formats = () if recipe in HIGH_PRECISION_DTYPES else registry.get(recipe).formats
    if fmt is not None and fmt not in formats:
        has = f"has {', '.join(formats)}" if formats else "has a fixed format"
        raise ValueError(f"{fmt!r} is not a format of {recipe}, which {has}")
    return MapEntry(parts["pattern"], gemms, recipe, fmt)


def entries(precision: PrecisionConfig) -> tuple[MapEntry, ...]:
    """The entries of the precision map. A rule reports invalid ones, which are left out here."""
    return tuple(entry for entry, _ in read_entries(precision.precision_map) if entry is not None)


def entries_with_source(precision: PrecisionConfig) -> Iterator[tuple[str, MapEntry]]:
    """The same entries, each with its source for error messages."""
    for text, (entry, _) in zip(precision.precision_map, read_entries(precision.precision_map), strict=True):
        if entry is not None:
            yield entry_source(text), entry


def entry_source(text: str) -> str:
    """Where an entry comes from: `--precision ENTRY`, or the line of a file and the entry."""
    return f"{text.source}: {text}" if isinstance(text, (MapFileEntry, PhaseEntry)) else f"--precision {text}"


@functools.lru_cache(maxsize=64)
def read_entries(texts: tuple[str, ...]) -> tuple[tuple[Optional[MapEntry], str], ...]:
    """Parse entries: each is (entry, "") or (None, what is wrong with it)."""
    found: list[tuple[Optional[MapEntry], str]] = []
    for text in texts:
        try:
            found.append((parse_entry(text), ""))
        except ValueError as error:
            found.append((None, str(error)))
    return tuple(found)


def with_all_phases(precision: PrecisionConfig) -> PrecisionConfig:
    """The precision with the entries of all phases of `--fp8-schedule` in its map."""
    added = (PhaseEntry(entry) for phase in phases_with_entries(precision) for entry in phase.entries)
    return dataclasses.replace(precision, precision_map=(*precision.precision_map, *added))


def linear_names(model: ModelConfig) -> tuple[str, ...]:
    """Names of all linears that a map can quantize, in the order of the forward pass."""
    names: list[str] = []
    for layer, has_experts in enumerate(expert_layers(model)):
        names += [f"layers.{layer}.{linear}" for linear in layer_linears(model, has_experts)]
    return (*names, OUTPUT_LAYER)


def attention_linears(model: ModelConfig) -> tuple[str, ...]:
    """Names of the linears of a layer's attention."""
    return latent_attention.linear_names(model) if latent_attention.is_latent(model) else LINEARS[:2]


def layer_linears(model: ModelConfig, has_experts: bool) -> tuple[str, ...]:
    """Names of the linears of a layer, those of its MLP or of its experts last."""
    attention = attention_linears(model)
    if not has_experts:
        return (*attention, *MLP_LINEARS)
    has_shared = model.moe_shared_expert_intermediate_size is not None
    kinds = (EXPERTS, SHARED_EXPERTS) if has_shared else (EXPERTS,)
    return (*attention, *(kind + linear for kind in kinds for linear in MLP_LINEARS))


def expert_names(model: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Replace names of the linears of all experts by those of each: `layers.3.experts.17.linear_fc1`."""
    expanded: list[str] = []
    for name in names:
        before, experts, linear = name.partition(f".{EXPERTS}")
        numbers = range(model.num_experts or 0) if experts else ()
        expanded += [f"{before}.{EXPERTS}{number}.{linear}" for number in numbers] or [name]
    return tuple(expanded)


def name_of_all_experts(name: str) -> str:
    """The name in a precision map of a linear of one expert; other names are returned unchanged."""
    return _EXPERT_NUMBER.sub(r"\1", name)


def pattern_problem(pattern: str, model: ModelConfig, names: Optional[tuple[str, ...]] = None) -> str:
    """Why a pattern matches no linear of the model, or a part of its range of layers does not exist; else empty.

    Args:
        names: of the linears; by default those that a map can quantize.
    """
    num_layers = model.num_layers
    assert num_layers is not None
    layers = _LAYER_RANGE.fullmatch(pattern)
    if layers is not None and int(layers[1]) > int(layers[2]):
        return f"layers.{layers[1]}-{layers[2]}: a range must be ascending; use layers.{layers[2]}-{layers[1]}"
    if layers is not None and int(layers[2]) >= num_layers:
        return f"layers.{layers[1]}-{layers[2]}: the layers are 0 to {num_layers - 1}"
    names = linear_names(model) if names is None else names
    if any(matches_pattern(name, pattern) for name in names):
        return ""
    linears = (*attention_linears(model), *MLP_LINEARS)
    patterns = (*(f"*.{linear}" for linear in linears), OUTPUT_LAYER, *names)
    return (
        f"{pattern} matches no linear layer; the names are layers.0 to layers.{num_layers - 1} with "
        f"{', '.join(dict.fromkeys(name.split('.', 2)[2] for name in linear_names(model)[:-1]))}, and {OUTPUT_LAYER}"
        f"{did_you_mean(pattern, patterns, 3, similarity=0.6)}"
    )


def format_of(precision: PrecisionConfig, family: str) -> Optional[str]:
    """The value of `--fp8-format` or `--fp4-format`, by recipe family."""
    return {"fp8": precision.fp8_format, "fp4": precision.fp4_format}[family]


def base_choice(precision: PrecisionConfig) -> LinearChoice:
    """The choice for the linears of layers without a precision map."""
    if precision.fp8_format is not None:
        choice = GemmChoice(precision.fp8_recipe, precision.fp8_format)
    elif precision.fp4_format is not None:
        choice = GemmChoice(precision.fp4_recipe, precision.fp4_format)
    else:
        return LinearChoice()
    return LinearChoice(choice, choice, choice if precision.fp8_wgrad else GemmChoice())


def multi_token_choice(precision: PrecisionConfig) -> LinearChoice:
    """The choice for all linears of multi-token prediction, to which a precision map does not apply.

    megatron-core quantizes them in FP8 only: in FP4 runs they are in high precision.
    """
    return base_choice(precision) if precision.fp8_format is not None else LinearChoice()


def unmapped_choice(name: str, num_layers: int, precision: PrecisionConfig) -> LinearChoice:
    """The choice for a linear that no entry matches."""
    if name == OUTPUT_LAYER or is_high_precision_layer(int(name.split(".")[1]), num_layers, precision):
        return LinearChoice()
    return base_choice(precision)


def is_high_precision_layer(layer: int, num_layers: int, precision: PrecisionConfig) -> bool:
    """Whether `--first-last-layers-bf16` keeps a layer in high precision. Layers count from 0 over all stages."""
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return precision.first_last_layers_bf16 and (layer < start or layer >= num_layers - end)


@functools.lru_cache(maxsize=16)
def resolve(model: ModelConfig, precision: PrecisionConfig) -> Mapping[str, LinearChoice]:
    """The choice for every linear of the model, by name, in the order of the forward pass."""
    assert model.num_layers is not None
    chosen = {name: unmapped_choice(name, model.num_layers, precision) for name in linear_names(model)}
    for entry in entries(precision):
        choices = dict.fromkeys(entry.gemms, entry.choice(precision))
        for name in chosen:
            if matches_pattern(name, entry.pattern):
                chosen[name] = chosen[name]._replace(**choices)
    return MappingProxyType(chosen)


def linears_with_statistics(model: ModelConfig, precision: PrecisionConfig) -> tuple[str, ...]:
    """Names of the linears that can have quantization statistics.

    These are the quantized linears. In high precision, where statistics are of --fp8-what-if, the linears of layers.
    """
    chosen = resolve(model, precision)
    if is_quantized(precision):
        return expert_names(model, (name for name, choice in chosen.items() if choice.is_quantized))
    return expert_names(model, (name for name in chosen if name != OUTPUT_LAYER))


@functools.lru_cache(maxsize=16)
def changed_linears(model: ModelConfig, precision: PrecisionConfig) -> tuple[str, ...]:
    """Names of the linears whose choice the precision map changes, or an entry of a phase of `--fp8-schedule`."""
    num_layers = model.num_layers
    assert num_layers is not None
    maps = [resolve(model, each) for each in precisions(precision) if each.precision_map]
    unmapped = {name: unmapped_choice(name, num_layers, precision) for name in linear_names(model) if maps}
    return tuple(name for name, choice in unmapped.items() if any(resolved[name] != choice for resolved in maps))


def changes_mlps(model: ModelConfig, precision: PrecisionConfig) -> bool:
    """Whether the precision map changes a linear of an MLP."""
    return any(name.endswith(MLP_LINEARS) for name in changed_linears(model, precision))


# Cached, because a search over layouts calls it thousands of times with the same arguments.
@functools.lru_cache(maxsize=64)
def recipes_of(model: ModelConfig, precision: PrecisionConfig, linears: tuple[str, ...]) -> tuple[str, ...]:
    """The recipes of linears of these kinds (`linear_qkv`, ...) in all layers and phases, each once."""
    maps = (resolve(model, each) for each in precisions(precision))
    chosen = (choice for each in maps for name, choice in each.items() if name.rpartition(".")[2] in linears)
    return tuple(dict.fromkeys(recipe for choice in chosen for recipe in choice.recipes))


def used_recipes(precision: PrecisionConfig) -> tuple[str, ...]:
    """Names of all recipes of a run, that of `base_choice` first; empty in high precision."""
    named = (*base_choice(precision), *(entry.choice(precision) for entry in entries(with_all_phases(precision))))
    return tuple(dict.fromkeys(choice.recipe for choice in named if choice.recipe is not None))


def is_quantized(precision: PrecisionConfig) -> bool:
    """Whether a run uses any recipe."""
    return bool(used_recipes(precision))


def recipe_source(precision: PrecisionConfig, recipe: str) -> str:
    """Where a recipe comes from, for messages: `--fp8-recipe mxfp8`, or the first map entry with it."""
    if recipe in base_choice(precision).recipes:
        return f"--{'fp4' if precision.fp8_format is None else 'fp8'}-recipe {recipe}"
    return next(words for words, entry in entries_with_source(with_all_phases(precision)) if entry.recipe == recipe)


def build_recipe(precision: PrecisionConfig) -> Optional[LinearRecipe]:
    """The rules of the linears of layers without a precision map; None in high precision."""
    return build_linear_recipe(precision, base_choice(precision))


@functools.lru_cache(maxsize=64)
def build_linear_recipe(precision: PrecisionConfig, chosen: LinearChoice) -> Optional[LinearRecipe]:
    """The rules of one linear, whose GEMMs may use different recipes; None if all are in high precision.

    Args:
        precision: gives the options of the recipes, such as the length of the amax history.
        chosen: the choice for the linear.
    """
    if not chosen.is_quantized:
        return None
    if chosen == base_choice(precision):
        recipe = _rules(precision, chosen.fprop)
        assert recipe is not None
        return recipe if precision.fp8_wgrad else recipe.without_wgrad()
    parts = [_rules(precision, choice) for choice in chosen]
    rules = tuple(
        (operand, gemm, None if part is None else part.rule(operand, gemm))
        for (gemm, operands), part in zip(OPERANDS_OF, parts, strict=True)
        for operand in operands
    )
    names = [choice.recipe or HIGH_PRECISION for choice in chosen]
    options = next((part.delayed for part in parts if part is not None and part.delayed is not None), None)
    return LinearRecipe(name="/".join(names) if len(set(names)) > 1 else names[0], rules=rules, delayed=options)


def _rules(precision: PrecisionConfig, choice: GemmChoice) -> Optional[LinearRecipe]:
    if choice.recipe is None:
        return None
    return registry.get(choice.recipe).rules(choice.format, vars(precision))
