"""What a recipe is: which format, block and scale each operand has in each GEMM, and what else is known of it.

A linear y = x w^T has three GEMMs and three operands, each operand in two of the GEMMs:

    fprop   y  = x  w^T     input, weight
    dgrad   dx = dy w       grad_output, weight
    wgrad   dw = dy^T x     grad_output, input

Hence six rules (`OperandRule`). Two uses of an operand under one rule share their codes: so it is in a per-tensor
recipe, and for weights in square blocks. Other blocks lie along the summed dimension, which is another one in the
second use: the operand is quantized twice, from high precision, into blocks of rows (1 x n) and of columns (n x 1).

    recipe      input, grad_output    weight                scales
    tensorwise  tensor                tensor                FP32, from the current amax (or powers of two)
    delayed     tensor                tensor                FP32, from the amax history
    rowwise     row                   output channel        powers of two (or FP32)
    blockwise   128 along the sum     128 x 128             powers of two (or FP32)
    mxfp8       32 along the sum      32 along the sum      E8M0: powers of two, in a byte
    nvfp4       16 along the sum      16 x 16               E4M3 each, under one FP32 for the tensor

Formats: E4M3 forward; grad_output is E5M2 under `hybrid`, which is Transformer Engine's default for tensorwise and
delayed. nvfp4 is E2M1 throughout; in its wgrad both operands are Hadamard-transformed, and grad_output is rounded
stochastically.

A `Recipe` is what the registry holds: the rules as a function of its options, and every fact that flags, checks, the
planner, checkpoints and exports ask for. Nothing outside this folder branches on a recipe's name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.recipes.formats import E4M3, E5M2, Format


class Operand(enum.Enum):
    """What a linear multiplies."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Gemm(enum.Enum):
    """The three products of a linear."""

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

WHOLE = None
"""As a length of a block: all of that dimension."""
Block = tuple[int, int]
BlockShape = tuple[Optional[int], Optional[int]]


class ScaleRule(enum.Enum):
    """Where scales come from and how they are kept. The arithmetic of each is in `quantization/scaling.py`."""

    FP32 = "fp32"
    POWER_OF_TWO = "power of two"
    E8M0 = "e8m0"
    TWO_LEVEL = "e4m3 x fp32"
    DELAYED = "delayed fp32"


@dataclass(frozen=True, kw_only=True)
class OperandRule:
    """How one operand is quantized for one GEMM.

    Attributes:
        format: of the codes.
        block: (rows, columns) of the part that shares a scale, in the tensor as [rows, columns]; a length of None is
            the whole dimension, and no block at all is the whole tensor.
        scale_rule: where scales come from.
        is_transformed: Hadamard transform along the rows before anything else.
        is_stochastic: round stochastically.
    """

    format: Format
    block: Optional[BlockShape] = None
    scale_rule: ScaleRule = ScaleRule.FP32
    is_transformed: bool = False
    is_stochastic: bool = False

    @property
    def granularity(self) -> str:
        """What shares a scale, the longer side last: blocks of columns are rows' blocks of the transposed tensor."""
        if self.block is None:
            return "tensor"
        if WHOLE in self.block:
            return "row" if self.block[1] is WHOLE else "column"
        return "x".join(map(str, sorted(self.block)))

    @property
    def is_bf16_exact(self) -> bool:
        """Are the codes times their blocks' scales BF16 numbers? Scales of a whole tensor wait until after the GEMM."""
        return self.block is None or self.scale_rule is not ScaleRule.FP32

    def for_shape(self, shape: Block) -> OperandRule:
        """The same rule for a tensor of this many rows and columns: a whole dimension becomes a length."""
        if self.block is None or WHOLE not in self.block:
            return self
        block = tuple(size if length is WHOLE else length for length, size in zip(self.block, shape, strict=True))
        return dataclasses.replace(self, block=block)

    @property
    def extras(self) -> str:
        """What happens besides scaling and rounding to nearest, in words; empty if nothing does."""
        words = ["Hadamard"] * self.is_transformed + ["stochastic rounding"] * self.is_stochastic
        return " and ".join(words)

    def __str__(self) -> str:
        extras = f", {self.extras}" if self.extras else ""
        return f"{self.format.name} per {self.granularity}, {self.scale_rule.value} scale{extras}"


@dataclass(frozen=True, kw_only=True)
class DelayedOptions:
    """How delayed scaling makes scales of amaxes.

    Attributes:
        history_len: entries of the amax history, the one under way included.
        algorithm: "max" of the history, or "most_recent".
        margin: scales are divided by 2^margin.
        is_reduced_over_data: reduce amaxes over data-parallel ranks too, not over tensor and context ranks only.
    """

    history_len: int = 1
    algorithm: str = "most_recent"
    margin: int = 0
    is_reduced_over_data: bool = True


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """How a checkpoint for transformers, vLLM and SGLang holds weights by a recipe: codes beside scales.

    Attributes:
        scale_suffix: follows the weight's name without `weight`.
        quantization_config: what config.json says, but for the modules that are left out.
        excluded_key: the key under which it lists those.
    """

    scale_suffix: str
    quantization_config: Mapping[str, Any]
    excluded_key: str


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """All rules of one linear, whose GEMMs may follow several recipes.

    Attributes:
        name: as `--fp8-recipe` or `--fp4-recipe` spells it; of several, one a GEMM: `tensorwise/high/high`.
        rules: (operand, GEMM, rule) for all six uses; a rule of None leaves the whole GEMM in high precision.
        delayed: with delayed scaling, its options.
    """

    name: str
    rules: tuple[tuple[Operand, Gemm, Optional[OperandRule]], ...]
    delayed: Optional[DelayedOptions] = None

    def rule(self, operand: Operand, gemm: Gemm) -> Optional[OperandRule]:
        """The rule of one use; None is high precision."""
        for each_operand, each_gemm, rule in self.rules:
            if (each_operand, each_gemm) == (operand, gemm):
                return rule
        raise KeyError(f"{operand.value} is no operand of {gemm.value}")

    @property
    def is_stochastic(self) -> bool:
        """Is any operand rounded stochastically?"""
        return any(rule is not None and rule.is_stochastic for *_, rule in self.rules)

    def is_quantized(self, gemm: Gemm) -> bool:
        """Does this GEMM multiply quantized operands?"""
        return all(self.rule(operand, gemm) is not None for operand in dict(OPERANDS_OF)[gemm])

    def without_wgrad(self) -> LinearRecipe:
        """The same with the weight gradient's GEMM in high precision."""
        rules = tuple((operand, gemm, None if gemm is Gemm.WGRAD else rule) for operand, gemm, rule in self.rules)
        return dataclasses.replace(self, rules=rules)


UNQUANTIZED = LinearRecipe(
    name="high", rules=tuple((operand, gemm, None) for gemm, operands in OPERANDS_OF for operand in operands)
)
"""All three GEMMs in high precision."""

NATIVE_NOWHERE: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
ANY_LATER = (99, 0)
BYTES_READ = 2  # of a BF16 number


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe: its rules, and all that is known of it.

    Attributes:
        name: as flags spell it.
        description: one line for `--help` and tables.
        family: "fp8" or "fp4": the flags `--FAMILY-format` and `--FAMILY-recipe` choose it.
        formats: values of `--FAMILY-format` that it has.
        default_format: the one where nothing gives another.
        build: the rules, from a format and the options by name. Its keywords' defaults are the settings' defaults.
        option_names: settings that `build` takes, all of `config/schema/precision.py`.
        run_option_names: further settings that act under this recipe only, but change no rule.
        resume_option_names: options that a resumed run may not change unless told to.
        gemm_alignment: what every dimension of a quantized GEMM must be a multiple of. Source: Transformer Engine's
            `get_align_size_for_quantization`, megatron-core's `get_fp8_align_size`.
        native_capabilities: ranges of compute capabilities, the end not included, for which Transformer Engine has the
            recipe (its FP8 support checks, release 2.20).
        scaled_mm_capabilities: ranges for which the emulated layers multiply its codes through torch's `scaled_mm`
            (`quantization/scaled_gemm.py`) instead of decoding them.
        te_recipe_class: name in `transformer_engine.common.recipe`; None where it has none.
        te_quantizer: module and class, below `transformer_engine.pytorch.tensor`, of the quantizer that Triton kernels
            can stand in for; None where they cannot.
        te_switches: environment variables that change Transformer Engine's recipe, and what they do.
        is_faster_with_kernels: the Triton casts save time even where each is launched by itself.
        fuses_swiglu: SwiGLU kernels write its result quantized, whoever casts the other operands.
        supports_userbuffers, supports_fp8_attention, supports_op_fuser: parts of Transformer Engine that know it.
        export_form: how checkpoints for others hold weights that were quantized so; None takes another recipe's.
        exported_as: that recipe; None is the registry's default.
        slow_gemm_until: compute capability below which its GEMMs run at the rate of FP32 block scales.
        is_ranked_on_blackwell: published speeds compare it there with BF16 or another recipe, and the planner has their
            order.
        slow_cast: its casts run at the rate of casts in blocks.
        fallbacks: recipes to try when it is too coarse, each with the reason as the end of a sentence.
    """

    name: str
    description: str
    family: str = "fp8"
    formats: tuple[str, ...] = FP8_FORMATS
    default_format: str = "hybrid"
    build: Callable[..., LinearRecipe]
    option_names: tuple[str, ...] = ()
    run_option_names: tuple[str, ...] = ()
    resume_option_names: tuple[str, ...] = ()
    gemm_alignment: int = 16
    native_capabilities: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = NATIVE_NOWHERE
    scaled_mm_capabilities: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = NATIVE_NOWHERE
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
    is_ranked_on_blackwell: bool = False
    fallbacks: tuple[tuple[str, str], ...] = ()

    def rules(self, number_format: Optional[str] = None, options: Optional[Mapping[str, Any]] = None) -> LinearRecipe:
        """The rules of a linear.

        Args:
            number_format: one of `formats`; None is the default.
            options: values of the settings `option_names`; others are ignored, missing ones have their defaults.
        """
        chosen = {name: options[name] for name in self.option_names if name in options} if options else {}
        return self.build(number_format or self.default_format, **chosen)

    @property
    def setting_names(self) -> tuple[str, ...]:
        """All settings that have no effect without this recipe."""
        return self.option_names + self.run_option_names

    @functools.cached_property
    def _default_rules(self) -> list[OperandRule]:
        return [rule for *_, rule in self.rules().rules if rule is not None]

    @property
    def is_stateful(self) -> bool:
        """Does a linear remember amaxes from step to step?"""
        return any(rule.scale_rule is ScaleRule.DELAYED for rule in self._default_rules)

    def is_stochastic(self, options: Mapping[str, Any]) -> bool:
        """Does it draw random numbers under these options?"""
        return self.rules(None, options).is_stochastic

    @property
    def shares_weight_codes(self) -> bool:
        """Do fprop and dgrad read the same codes of a weight?"""
        rules = self.rules()
        return rules.rule(Operand.WEIGHT, Gemm.FPROP) == rules.rule(Operand.WEIGHT, Gemm.DGRAD)

    @property
    def supports_param_gather(self) -> bool:
        """Can a weight be its codes alone, a byte each (`--fp8-param-gather`)?"""
        return self.shares_weight_codes and all(rule.format.codes_per_byte == 1 for rule in self._default_rules)

    @property
    def has_whole_dimensions(self) -> bool:
        """Does a scale belong to a whole row or column?"""
        return any(rule.block is not None and WHOLE in rule.block for rule in self._default_rules)

    @property
    def block_length(self) -> Optional[int]:
        """The longest side of its blocks; None without blocks of a fixed size."""
        sides = [side for rule in self._default_rules if rule.block for side in rule.block if side is not WHOLE]
        return max(sides, default=1) if max(sides, default=1) > 1 else None

    @property
    def code_bytes(self) -> float:
        """Bytes of one code."""
        return max(1 / rule.format.codes_per_byte for rule in self._default_rules)

    @property
    def needs_amax_pass(self) -> bool:
        """Is a tensor read once for its amax before it is cast?"""
        return any(
            rule.scale_rule is ScaleRule.TWO_LEVEL
            or (rule.scale_rule is not ScaleRule.DELAYED and (rule.block is None or WHOLE in rule.block))
            for rule in self._default_rules
        )

    @property
    def cast_bytes(self) -> float:
        """Bytes that a cast reads and writes for each BF16 number: one read, one for the amax, one for a transform,
        and codes by rows and by columns."""
        reads = 1 + self.needs_amax_pass + any(rule.is_transformed for rule in self._default_rules)
        return reads * BYTES_READ + 2 * self.code_bytes

    def is_native(self, capability: Optional[tuple[int, int]]) -> bool:
        """Does Transformer Engine run it on GPUs of a compute capability? None is no GPU."""
        return capability is not None and any(since <= capability < end for since, end in self.native_capabilities)

    def multiplies_codes(self, capability: tuple[int, int]) -> bool:
        """Do tensor cores multiply its codes on GPUs of a compute capability? Else they multiply decoded numbers."""
        ranges = self.native_capabilities + self.scaled_mm_capabilities
        return any(since <= capability < end for since, end in ranges)

    @property
    def flag(self) -> str:
        """How the command line chooses it."""
        return f"--{self.family}-recipe {self.name}"


# --- for the recipes' own files ---------------------------------------------------------------------------------------


def linear_recipe(name: str, rule: Callable[[Operand, Gemm], OperandRule], **attributes: Any) -> LinearRecipe:
    """All six rules from a function of operand and GEMM."""
    uses = [(operand, gemm) for gemm, operands in OPERANDS_OF for operand in operands]
    return LinearRecipe(name=name, rules=tuple((*use, rule(*use)) for use in uses), **attributes)


def compressed_tensors(strategy: str) -> Mapping[str, Any]:
    """The quantization_config of compressed-tensors for FP8 weights with one scale a `tensor` or a `channel`."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    activations = numbers | {"strategy": "token" if strategy == "channel" else "tensor", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": strategy, "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def operand_formats(number_format: str) -> Mapping[Operand, Format]:
    """`e4m3` and `e5m2` are for all operands, `hybrid` is E4M3 with E5M2 gradients."""
    forward = E5M2 if number_format == "e5m2" else E4M3
    backward = E4M3 if number_format == "e4m3" else E5M2
    return {Operand.INPUT: forward, Operand.WEIGHT: forward, Operand.GRAD_OUTPUT: backward}


def along_sum(length: Optional[int], operand: Operand, gemm: Gemm) -> BlockShape:
    """A block of `length` elements that one sum of the GEMM runs over; None is all of them.

    fprop sums over the columns of x [T, K] and w [N, K]; dgrad over the columns of dy [T, N] and the rows of w; wgrad
    over the rows of dy and x.
    """
    sums_over_rows = gemm is Gemm.WGRAD or (operand is Operand.WEIGHT and gemm is Gemm.DGRAD)
    return (length, 1) if sums_over_rows else (1, length)
