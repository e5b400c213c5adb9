"""Quantization recipes: the format, block and scale of each operand in each GEMM, and properties of a recipe.

A linear y = x w^T has three GEMMs and three operands. Each operand is used in two of the GEMMs:

    fprop   y  = x  w^T     input, weight
    dgrad   dx = dy w       grad_output, weight
    wgrad   dw = dy^T x     grad_output, input

A linear therefore has six rules (`OperandRule`). Uses of an operand with equal rules share codes: per-tensor scales and
weights in square blocks. Other blocks lie along the contracted dimension, which differs between the two uses, so the
operand is quantized twice from high precision, rowwise (1 x n) and columnwise (n x 1).

    recipe      input, grad_output       weight                   scales
    tensorwise  tensor                   tensor                   FP32 or powers of two, from the current amax
    delayed     tensor                   tensor                   FP32, from the amax history
    rowwise     row                      output channel           powers of two
    blockwise   128 along contraction    128 x 128                powers of two or FP32
    mxfp8       32 along contraction     32 along contraction     E8M0: powers of two in one byte
    nvfp4       16 along contraction     16 x 16                  E4M3 per block and FP32 per tensor
    quartet2    16 along contraction     16 along contraction     E4M3 per block and FP32 per tensor

Formats: input and weight are E4M3; grad_output is E5M2 under `hybrid`, Transformer Engine's default for tensorwise and
delayed. All operands of nvfp4 and quartet2 are E2M1. In the wgrad of nvfp4 both are Hadamard-transformed, and
grad_output is rounded stochastically. In dgrad and wgrad of quartet2 both are Hadamard-transformed, their block scales
are rounded stochastically, and weight and input are quantized from what their codes for fprop represent.

A `Recipe` holds the rules as a function of its options, and every property that flags, rules, the planner, checkpoints
and exports depend on. No code outside this package branches on the name of a recipe.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.recipes.export_form import ExportForm
from megafp8.recipes.formats import E4M3, E5M2, Format


class Operand(enum.Enum):
    """The operands of a linear's GEMMs."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Gemm(enum.Enum):
    """The GEMMs of a linear."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


FP8_FORMATS = ("e4m3", "hybrid", "e5m2")
FP4_FORMATS = ("e2m1",)
OPERANDS_OF = (
    (Gemm.FPROP, (Operand.INPUT, Operand.WEIGHT)),
    (Gemm.DGRAD, (Operand.GRAD_OUTPUT, Operand.WEIGHT)),
    (Gemm.WGRAD, (Operand.GRAD_OUTPUT, Operand.INPUT)),
)

FULL_DIM = None  # as a block length: the full dimension
HIGH_PRECISION = "high"  # in place of a recipe's name: GEMMs that are not quantized
HIGH_PRECISION_DTYPES = ("bf16", "fp32")  # the words of users for it; the dtype is that of the weights
Block = tuple[int, int]
BlockShape = tuple[Optional[int], Optional[int]]


class ScaleRule(enum.Enum):
    """How scales are computed and stored. The arithmetic is in `quantization/scaling.py`."""

    FP32 = "fp32"
    POWER_OF_TWO = "power of two"
    E8M0 = "e8m0"
    E8M0_FLOOR = "e8m0, rounded down"
    TWO_LEVEL = "e4m3 x fp32"
    FOUR_OVER_SIX = "e4m3 x fp32, amax to 4 or 6"
    EDEN = "corrected e4m3 x fp32"
    DELAYED = "delayed fp32"

    @property
    def is_two_level(self) -> bool:
        """Whether blocks have E4M3 scales relative to an FP32 scale of the tensor."""
        return self in (ScaleRule.TWO_LEVEL, ScaleRule.FOUR_OVER_SIX, ScaleRule.EDEN)


@dataclass(frozen=True, kw_only=True)
class OperandRule:
    """How one operand is quantized for one GEMM.

    Attributes:
        format: format of the codes.
        block: (rows, columns) that share a scale in the tensor viewed as [rows, columns]. A length of `FULL_DIM` is the
            full dimension; a block of None is the full tensor.
        scale_rule: how scales are computed.
        is_transformed: apply a Hadamard transform before quantization; under `ScaleRule.EDEN` along the blocks and with
            random signs, else along the rows.
        is_stochastic: round stochastically; under `ScaleRule.EDEN` the block scales, else the codes.
        is_requantized: quantize in the backward pass, from what the operand's codes for fprop represent. If fprop is in
            high precision, from the operand itself.
        margin: a scale of the full tensor from its current amax is divided by 2^margin.
    """

    format: Format
    block: Optional[BlockShape] = None
    scale_rule: ScaleRule = ScaleRule.FP32
    is_transformed: bool = False
    is_stochastic: bool = False
    is_requantized: bool = False
    margin: int = 0

    @property
    def granularity(self) -> str:
        """`tensor`, `row`, `column` or the block size. 1x128 and 128x1 are both `1x128`: one transposes the other."""
        if self.block is None:
            return "tensor"
        rows, columns = self.block
        if columns is FULL_DIM:
            return "row"
        return "column" if rows is FULL_DIM else f"{min(rows, columns)}x{max(rows, columns)}"

    @property
    def is_bf16_exact(self) -> bool:
        """Whether codes times block scales are exact in BF16. Per-tensor scales are applied after the GEMM."""
        return self.block is None or self.scale_rule is not ScaleRule.FP32

    def for_shape(self, shape: Block) -> OperandRule:
        """The same rule for a tensor of shape [rows, columns]: `FULL_DIM` is replaced by the size, at least 1."""
        if self.block is None or FULL_DIM not in self.block:
            return self
        num_rows, num_columns = (length or max(1, size or 0) for length, size in zip(self.block, shape, strict=True))
        return dataclasses.replace(self, block=(num_rows, num_columns))

    @property
    def extras(self) -> str:
        """The Hadamard transform, stochastic rounding and the margin in words; empty without them."""
        is_of_scales = self.scale_rule is ScaleRule.EDEN
        transform = "random Hadamard" if is_of_scales else "Hadamard"
        rounding = "stochastic scales" if is_of_scales else "stochastic rounding"
        words = [transform] * self.is_transformed + [rounding] * self.is_stochastic
        return " and ".join(words + [f"margin {self.margin}"] * bool(self.margin))

    def __str__(self) -> str:
        text = f"{self.format.name} per {self.granularity}, {self.scale_rule.value} scale"
        return f"{text}, {self.extras}" if self.extras else text


@dataclass(frozen=True, kw_only=True)
class DelayedOptions:
    """How delayed scaling computes scales from the amax history.

    Attributes:
        history_len: entries of the amax history, including that of the current step.
        algorithm: "max" of the history, or "most_recent".
        margin: quant_scales are divided by 2^margin.
        is_reduced_over_data: reduce amaxes over data-parallel ranks in addition to tensor- and context-parallel ranks.
    """

    history_len: int = 1
    algorithm: str = "most_recent"
    margin: int = 0
    is_reduced_over_data: bool = True


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """The six rules of one linear. Its GEMMs may use different recipes.

    Attributes:
        name: name of the recipe. If the GEMMs differ, one name per GEMM: `tensorwise/high/high`.
        rules: (operand, GEMM, rule) of all six uses; None leaves the GEMM in high precision.
        delayed: options of delayed scaling; None for other recipes.
    """

    name: str
    rules: tuple[tuple[Operand, Gemm, Optional[OperandRule]], ...]
    delayed: Optional[DelayedOptions] = None

    def rule(self, operand: Operand, gemm: Gemm) -> Optional[OperandRule]:
        """The rule of one use of an operand; None is high precision."""
        for each_operand, each_gemm, rule in self.rules:
            if (each_operand, each_gemm) == (operand, gemm):
                return rule
        raise KeyError(f"{operand.value} is no operand of {gemm.value}")

    @property
    def is_stochastic(self) -> bool:
        """Whether any operand is rounded stochastically."""
        return any(rule is not None and rule.is_stochastic for *_, rule in self.rules)

    @property
    def is_rotated(self) -> bool:
        """Whether the operands of any GEMM are transformed with random signs, which the two must share."""
        return any(rule is not None and rule.scale_rule is ScaleRule.EDEN for *_, rule in self.rules)

    @property
    def has_kernels(self) -> bool:
        """Whether a GPU has a kernel for every cast."""
        return not self.is_rotated and all(rule is None or not rule.margin for *_, rule in self.rules)

    def requantizes(self, operand: Operand) -> bool:
        """Whether the backward pass quantizes input or weight again from the codes for fprop."""
        gemm = {Operand.INPUT: Gemm.WGRAD, Operand.WEIGHT: Gemm.DGRAD}[operand]
        rule = self.rule(operand, gemm)
        return rule is not None and rule.is_requantized and self.is_quantized(Gemm.FPROP)

    def is_quantized(self, gemm: Gemm) -> bool:
        """Whether the operands of this GEMM are quantized."""
        return all(self.rule(operand, gemm) is not None for operand in dict(OPERANDS_OF)[gemm])

    def without_wgrad(self) -> LinearRecipe:
        """The same recipe with wgrad in high precision."""
        rules = tuple((operand, gemm, None if gemm is Gemm.WGRAD else rule) for operand, gemm, rule in self.rules)
        return dataclasses.replace(self, rules=rules)


UNQUANTIZED = LinearRecipe(
    name=HIGH_PRECISION, rules=tuple((operand, gemm, None) for gemm, operands in OPERANDS_OF for operand in operands)
)
"""All three GEMMs in high precision."""

CapabilityRanges = tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # of CUDA, the ends excluded
ANY_LATER = (99, 0)
BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe: its rules and properties.

    Attributes:
        name: value of `--fp8-recipe` or `--fp4-recipe`.
        description: one line for `--help` and tables.
        family: "fp8" or "fp4"; it is selected with `--FAMILY-format` and `--FAMILY-recipe`.
        formats, default_format: supported values of `--FAMILY-format`, and the one where none is given.
        build: makes the rules from a format and the options by name. Its keywords have the settings' defaults.
        option_names: settings in `config/schema/precision.py` that `build` takes.
        run_option_names: further settings that have an effect under this recipe only, but do not change the rules.
        tested_options: options by name that `--recipe` sets beside the format: those of the benchmarks and the tests.
        resume_option_names: options that must not change on resume without --override-precision.
        gemm_alignment: every dimension of a quantized GEMM must be a multiple of this. Source: Transformer Engine's
            `get_align_size_for_quantization`, megatron-core's `get_fp8_align_size`.
        native_capabilities: compute capabilities on which Transformer Engine 2.20 supports the recipe.
        beyond_capabilities: why newer GPUs than these are excluded; empty if none is known.
        blackwell_note: what published speeds on Blackwell say about the choice of this recipe; empty if nothing.
        scaled_mm_capabilities: compute capabilities on which emulated layers use `quantization/scaled_gemm.py`.
        te_recipe_class: class in `transformer_engine.common.recipe`; None where there is none.
        te_quantizer: module and class below `transformer_engine.pytorch.tensor` that Triton kernels can replace.
        te_switches: environment variables that change Transformer Engine's recipe, and their effects.
        is_faster_with_kernels: whether the Triton casts are faster even without CUDA graphs.
        fuses_swiglu: whether the Triton SwiGLU can write quantized outputs whichever kernels cast the other operands.
        supports_userbuffers, supports_fp8_attention, supports_op_fuser: support in parts of Transformer Engine.
        export_form: format of exported weights; None exports as `exported_as`.
        exported_as: name of the recipe to export as; None is the registry's default.
        slow_gemm_until: compute capability below which GEMMs run at the speed of FP32 block scales.
        output_layer_recipe: recipe that `--performance max` gives the output layer; None leaves it in high precision.
        slow_cast, is_ranked_on_blackwell: whether casts are as slow as blockwise ones; whether the planner ranks it.
        grouped_gemm_formats: formats in which the experts of a mixture run in one launch (`models/grouped_moe.py`), the
            fastest first.
        fallbacks: finer recipes to try, each with the reason as the end of a sentence.
        variants: forms with names of their own in comparisons, `RECIPE-VARIANT`, each with the flags that it adds.
    """

    name: str
    description: str
    family: str = "fp8"
    formats: tuple[str, ...] = FP8_FORMATS
    default_format: str = "hybrid"
    build: Callable[..., LinearRecipe]
    option_names: tuple[str, ...] = ()
    run_option_names: tuple[str, ...] = ()
    tested_options: tuple[tuple[str, Any], ...] = ()
    resume_option_names: tuple[str, ...] = ()
    gemm_alignment: int = 16
    native_capabilities: CapabilityRanges = ()
    beyond_capabilities: str = ""
    blackwell_note: str = ""
    scaled_mm_capabilities: CapabilityRanges = ()
    te_recipe_class: Optional[str] = None
    te_quantizer: Optional[tuple[str, str]] = None
    te_switches: tuple[tuple[str, str], ...] = ()
    is_faster_with_kernels: bool = False
    fuses_swiglu: bool = False
    supports_userbuffers: bool = False
    supports_fp8_attention: bool = False
    supports_op_fuser: bool = False
    export_form: Optional[ExportForm] = None
    exported_as: Optional[str] = None
    slow_gemm_until: tuple[int, int] = (0, 0)
    slow_cast: bool = False
    output_layer_recipe: Optional[str] = None
    is_ranked_on_blackwell: bool = False
    grouped_gemm_formats: tuple[str, ...] = ()
    fallbacks: tuple[tuple[str, str], ...] = ()
    variants: tuple[tuple[str, str], ...] = ()

    def rules(self, number_format: Optional[str] = None, options: Optional[Mapping[str, Any]] = None) -> LinearRecipe:
        """The rules of a linear.

        Args:
            number_format: one of `formats`; None is the default.
            options: settings by name. Missing options have their defaults; names that are no options are ignored.
        """
        chosen = {name: options[name] for name in self.option_names if name in options} if options else {}
        return self.build(number_format or self.default_format, **chosen)

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, with the values that `--recipe` gives them."""
        parameters = inspect.signature(self.build).parameters
        return {name: parameters[name].default for name in self.option_names} | dict(self.tested_options)

    @property
    def setting_names(self) -> tuple[str, ...]:
        """Settings that have no effect without this recipe."""
        return self.option_names + self.run_option_names

    @functools.cached_property
    def _default_rules(self) -> list[OperandRule]:
        return [rule for *_, rule in self.rules().rules if rule is not None]

    @property
    def is_stateful(self) -> bool:
        """Whether linears keep an amax history between steps (delayed scaling)."""
        return any(rule.scale_rule is ScaleRule.DELAYED for rule in self._default_rules)

    def is_stochastic(self, options: Mapping[str, Any]) -> bool:
        """Whether any operand is rounded stochastically under these options."""
        return self.rules(None, options).is_stochastic

    @property
    def shares_weight_codes(self) -> bool:
        """Whether fprop and dgrad read the same codes of a weight."""
        rules = self.rules()
        return rules.rule(Operand.WEIGHT, Gemm.FPROP) == rules.rule(Operand.WEIGHT, Gemm.DGRAD)

    @property
    def supports_param_gather(self) -> bool:
        """Whether weights can be stored as codes of one byte alone (`--fp8-param-gather`)."""
        return self.shares_weight_codes and all(rule.format.codes_per_byte == 1 for rule in self._default_rules)

    @property
    def has_whole_dimensions(self) -> bool:
        """Whether any scale covers a full row or column."""
        return any(rule.block is not None and FULL_DIM in rule.block for rule in self._default_rules)

    @property
    def block_length(self) -> Optional[int]:
        """The longest side of the blocks; None without blocks of a fixed size."""
        longest = max((side or 1 for rule in self._default_rules for side in rule.block or ()), default=1)
        return longest if longest > 1 else None

    @property
    def code_bytes(self) -> float:
        """Bytes per code."""
        return max(1 / rule.format.codes_per_byte for rule in self._default_rules)

    @property
    def needs_amax_pass(self) -> bool:
        """Whether a cast reads the tensor a first time for its amax."""
        return any(
            rule.scale_rule.is_two_level
            or (rule.scale_rule is not ScaleRule.DELAYED and (rule.block is None or FULL_DIM in rule.block))
            for rule in self._default_rules
        )

    @property
    def cast_bytes(self) -> float:
        """Bytes per element that a cast of a BF16 tensor reads, also for amax and transform, and writes, twice."""
        reads = 1 + self.needs_amax_pass + any(rule.is_transformed for rule in self._default_rules)
        return reads * BF16_BYTES + 2 * self.code_bytes

    def is_native(self, capability: Optional[tuple[int, int]]) -> bool:
        """Whether Transformer Engine supports it on GPUs of a compute capability; None is no GPU."""
        return capability is not None and any(since <= capability < end for since, end in self.native_capabilities)

    def multiplies_codes(self, capability: tuple[int, int]) -> bool:
        """Whether tensor cores multiply its codes on GPUs of a compute capability, and not dequantized values."""
        ranges = self.native_capabilities + self.scaled_mm_capabilities
        return any(since <= capability < end for since, end in ranges)

    @property
    def flag(self) -> str:
        """The flag that selects it, for example `--fp8-recipe mxfp8`."""
        return f"--{self.family}-recipe {self.name}"

    def tested_format(self, has_experts: bool) -> str:
        """The format that `--recipe` sets: the default, or the fastest in which experts run in one launch."""
        return self.grouped_gemm_formats[0] if has_experts and self.grouped_gemm_formats else self.default_format


# ---- helpers for the modules of recipes ---------------------------------------------------------------------------


def linear_recipe(name: str, rule: Callable[[Operand, Gemm], OperandRule]) -> LinearRecipe:
    """A `LinearRecipe` whose six rules come from a function of operand and GEMM."""
    rules = tuple((operand, gemm, rule(operand, gemm)) for gemm, operands in OPERANDS_OF for operand in operands)
    return LinearRecipe(name=name, rules=rules)


def operand_formats(number_format: str) -> Mapping[Operand, Format]:
    """The format of each operand: `e4m3` and `e5m2` apply to all, `hybrid` is E4M3 with E5M2 for grad_output."""
    forward = E5M2 if number_format == "e5m2" else E4M3
    backward = E4M3 if number_format == "e4m3" else E5M2
    return {Operand.INPUT: forward, Operand.WEIGHT: forward, Operand.GRAD_OUTPUT: backward}


def along_sum(length: Optional[int], operand: Operand, gemm: Gemm) -> BlockShape:
    """A block of `length` elements along the contracted dimension of the GEMM; None is the full dimension.

    fprop contracts the columns of x [T, K] and w [N, K]; dgrad the columns of dy [T, N] and the rows of w; wgrad the
    rows of dy and x.
    """
    sums_over_rows = gemm is Gemm.WGRAD or (operand is Operand.WEIGHT and gemm is Gemm.DGRAD)
    return (length, 1) if sums_over_rows else (1, length)
