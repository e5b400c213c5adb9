"""Settings of precision, quantization and kernels."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Optional

from megafp8.config.schema.setting import AT_LEAST_1, COMMON, NOT_NEGATIVE, OWN, TESTS, Range, Role, setting
from megafp8.recipes import registry
from megafp8.recipes.base import FP4_FORMATS, FP8_FORMATS

EXCLUDED_BY_DEFAULT = ("*norm*", "*embedding*")
NO_PATTERN = "none"


# A table: default and help of each setting, then what else is known about it.
# fmt: off


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    ROLE: ClassVar[Role] = Role.LEARNING | Role.MEMORY

    bf16: bool = setting(False, "train in BF16 with FP32 master weights", audience=COMMON)
    fp16: bool = setting(False, "train in FP16 with FP32 master weights and loss scaling")
    fp8_format: Optional[str] = setting(
        None, "train linear layers in FP8; e4m3: all tensors, hybrid: E4M3 for inputs and weights, E5M2 for output "
        "gradients, e5m2: all tensors (emulated only)",
        choices=FP8_FORMATS,
    )
    fp8_recipe: str = setting(
        registry.DEFAULT_FP8, "FP8 recipe; granularity and computation of the scales",
        choices=functools.partial(registry.names, "fp8"),
    )
    fp4_format: Optional[str] = setting(
        None, "train linear layers in FP4; e2m1: all tensors", choices=FP4_FORMATS
    )
    fp4_recipe: str = setting(
        registry.DEFAULT_FP4, "FP4 recipe; granularity and computation of the scales",
        choices=functools.partial(registry.names, "fp4"),
    )
    fp4_hadamard: bool = setting(
        True, "apply a Hadamard transform to the operands of the wgrad GEMM", off=("--no-fp4-hadamard",), megatron=OWN
    )
    fp4_stochastic_rounding: bool = setting(
        True, "round output gradients stochastically", off=("--no-fp4-stochastic-rounding",), megatron=OWN
    )
    fp4_2d_weights: bool = setting(
        True, "quantize weights in square blocks, so that forward and backward passes use the same values",
        off=("--no-fp4-2d-weights",), megatron=OWN,
    )
    fp4_four_over_six: bool = setting(
        False, "four-over-six scaling with emulated layers: map the largest value of each block that is rounded to "
        "nearest to 4 or to 6, whichever has the smaller error",
        megatron=OWN,
    )
    fp8_lm_level: Optional[str] = setting(
        None, "FP8-LM's level of low precision, which sets other flags; O1: FP8 gradients between ranks, O2: and FP8 "
        "and FP16 moments, O3: and FP8 weights with FP16 master weights (see docs/fp8_lm.md)",
        choices=("O1", "O2", "O3"), megatron=OWN,
    )
    fp8_margin: int = setting(0, "divide quantization scales by 2^margin", range=Range(-126, 126))
    fp8_amax_history_len: int = setting(1, "length of the amax history, in steps", range=AT_LEAST_1, unit="steps")
    fp8_amax_compute_algo: str = setting("most_recent", "amax to use from the history", choices=("most_recent", "max"))
    fp8_delayed_start: str = setting(
        "calibrated", "scales of the first step; calibrated: from an extra forward and backward pass of the first "
        "batch without an update, te: all 1, as in Transformer Engine",
        choices=("calibrated", "te"), megatron=OWN,
    )
    tp_only_amax_red: bool = setting(
        False, "reduce amaxes over tensor- and context-parallel ranks only, not over data-parallel ranks", megatron=OWN
    )
    fp8_wgrad: bool = setting(
        True, "compute the wgrad GEMM in FP8", off=("--no-fp8-wgrad", "--disable-fp8-wgrad"),
        megatron="no effect with most recipes; here refused with Transformer Engine's layers, which cannot do it",
    )
    fp8_param_gather: bool = setting(
        False,
        "store and all-gather the weights of linear layers as FP8 codes and scales, without a BF16 copy (emulated: "
        f"{', '.join(registry.with_param_gather())})",
        flags=("--fp8-param-gather",), off=("--no-fp8-param-gather",),
    )
    fp8_saved_activations: tuple[str, ...] = setting(
        (), "activations that are kept for the backward pass as FP8 codes with a scale for 16 elements; norm: inputs "
        "of the layers' norms, activation: what the activation function of the MLP saves (see docs/fp8_lm.md)",
        many=True, choices=("norm", "activation"), megatron=OWN,
    )
    fp8_power_2_scale: bool = setting(False, "with emulated layers, round scales down to powers of two", megatron=OWN)
    fp8_tensorwise_margin: int = setting(
        0, "with emulated layers, divide tensorwise scales by 2^margin; below 0 the largest values saturate, for "
        "comparisons with a recipe that is known to be worse",
        range=Range(-126, 126), audience=TESTS, megatron=OWN,
    )
    fp8_e8m0_floor: bool = setting(
        False, "with emulated layers, round E8M0 scales down as the OCP specification does, which saturates the "
        "largest values of some blocks, for comparisons",
        audience=TESTS, megatron=OWN,
    )
    fp8_block_scaling_fp32_scales: bool = setting(
        False, "with emulated layers, use FP32 scales instead of powers of two; for Transformer Engine, set the "
        "environment variable NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1",
        megatron=OWN,
    )
    fp8_amax_reduction: str = setting(
        "te", "amax reduction over tensor-parallel ranks with emulated layers; te: the operands that Transformer "
        "Engine reduces, all: every operand, so that scales do not depend on the layout",
        choices=("te", "all"), megatron=OWN,
    )
    first_last_layers_bf16: bool = setting(False, "keep the first and last transformer layers in high precision")
    num_layers_at_start_in_bf16: int = setting(
        1, "first layers in high precision with --first-last-layers-bf16", range=NOT_NEGATIVE, unit="layers"
    )
    num_layers_at_end_in_bf16: int = setting(
        1, "last layers in high precision with --first-last-layers-bf16", range=NOT_NEGATIVE, unit="layers"
    )
    precision_map: tuple[str, ...] = setting(
        (), "recipe of linear layers or of some of their GEMMs: PATTERN[:GEMMS]=RECIPE[/FORMAT], for example "
        "'layers.20-23.*:dgrad,wgrad=bf16'; repeatable, later entries take precedence (see docs/precision.md)",
        flags=("--precision",), many=True, metavar="ENTRY", megatron=OWN,
    )
    fp8_schedule: Optional[str] = setting(
        None, "phases in FP8 or FP4 and in high precision, with last steps and entries as of --precision: "
        "bf16:100,fp4:900,fp4[*:fprop=bf16;layers.30-31.*=bf16]",
        metavar="PHASES", megatron=OWN,
    )
    transformer_impl: str = setting(
        "auto", "layer implementation; transformer_engine: CUDA only, emulated: emulated FP8 and FP4 on any device, "
        "local: megatron-core's layers without FP8, auto: transformer_engine if it supports the recipe on this GPU, "
        "else emulated",
        choices=("auto", "transformer_engine", "emulated", "local"),
        megatron="the default is transformer_engine; there is no auto and no emulated",
    )
    emulation: bool = setting(
        True, "emulate recipes that the device does not support (without emulation, they are an error)",
        off=("--no-emulation",), megatron=OWN,
    )
    attention_backend: str = setting(
        "auto", "attention implementation; layers without Transformer Engine have sdpa and unfused",
        choices=("auto", "flash", "fused", "unfused", "local", "sdpa"), group="speed",
    )
    cross_entropy_loss_fusion: Optional[bool] = setting(
        None, "use a fused cross-entropy loss",
        flags=("--cross-entropy-loss-fusion",), off=("--no-cross-entropy-loss-fusion",),
        role=Role.LEARNING | Role.MEMORY | Role.AUTOMATIC, unset="on with Transformer Engine's layers", group="speed",
        megatron="off by default",
    )
    cross_entropy_fusion_impl: Optional[str] = setting(
        None, "implementation of the fused cross-entropy loss",
        choices=("native", "te"), role=Role.LEARNING | Role.MEMORY | Role.AUTOMATIC,
        unset="native with --cross-entropy-loss-fusion, te where the fusion is on by default", group="speed",
        megatron="the default is native",
    )
    gradient_accumulation_fusion: bool = setting(
        True, "accumulate weight gradients in the wgrad GEMM where the layer supports it; never with --use-torch-fsdp2",
        off=("--no-gradient-accumulation-fusion",), group="speed", megatron="needs Apex in the output layer",
    )
    gradient_overwrite: bool = setting(
        True, "overwrite gradient buffers in the first microbatch instead of zeroing and accumulating (Transformer "
        "Engine's layers without pipeline parallelism)",
        off=("--no-gradient-overwrite",), group="speed", megatron=OWN,
    )
    fp8_dot_product_attention: bool = setting(
        False,
        "compute both attention GEMMs in FP8 (Transformer Engine's layers with cuDNN; "
        f"{', '.join(registry.with_fp8_attention())} only)",
        megatron=OWN,
    )
    masked_softmax_fusion: bool = setting(
        True, "use the fused masked softmax (CUDA)", off=("--no-masked-softmax-fusion",), group="speed"
    )
    bias_swiglu_fusion: bool = setting(True, "fuse bias and SwiGLU", off=("--no-bias-swiglu-fusion",), group="speed")
    bias_gelu_fusion: bool = setting(True, "fuse bias and GELU", off=("--no-bias-gelu-fusion",), group="speed")
    bias_dropout_fusion: bool = setting(
        True, "fuse bias, dropout and residual addition", off=("--no-bias-dropout-fusion",), group="speed"
    )
    apply_rope_fusion: bool = setting(
        True, "use the fused rotary embedding (CUDA)", off=("--no-rope-fusion",), group="speed"
    )
    split_rope_fusion: Optional[bool] = setting(
        None, "split queries, keys and values and apply the rotary embedding in one kernel",
        flags=("--split-rope-fusion",), off=("--no-split-rope-fusion",),
        unset="on with Transformer Engine's layers at --rotary-percent 1", group="speed", megatron=OWN,
    )
    swiglu_quantize_fusion: Optional[bool] = setting(
        None,
        f"compute SwiGLU and quantize its output in one kernel ({', '.join(registry.with_fused_swiglu())}; "
        f"{', '.join(registry.with_triton_casts())} with --quantize-kernels triton)",
        unset="on with fused operations", group="speed", megatron=OWN,
        flags=("--swiglu-quantize-fusion",), off=("--no-swiglu-quantize-fusion",),
    )
    quantize_kernels: Optional[str] = setting(
        None,
        "kernels that quantize activations and gradients in Transformer Engine's layers "
        f"({', '.join(registry.with_triton_casts())}); te: Transformer Engine's, triton: megafp8's, with bitwise "
        "equal results",
        choices=("te", "triton"), unset="the faster one", group="speed", megatron=OWN,
    )
    residual_norm_fusion: bool = setting(
        False, "with fused operations, add the residual's gradient in the backward kernel of the MLP's RMSNorm; the "
        "sum is rounded once instead of twice",
        group="speed", megatron=OWN,
    )
    use_transformer_engine_op_fuser: Optional[bool] = setting(
        None, "use Transformer Engine's fused operations for the MLP",
        flags=("--use-transformer-engine-op-fuser",), off=("--no-use-transformer-engine-op-fuser",),
        unset="on where tests show the same results as its layers", group="speed", megatron="off by default",
    )
    accumulate_allreduce_grads_in_fp32: bool = setting(
        False, "accumulate and reduce gradients in FP32",
        unset="on with --bf16, unless --grad-reduce-in-bf16", group="gradient reduction",
    )
    grad_reduce_in_bf16: bool = setting(False, "reduce gradients in BF16", group="gradient reduction")
    grad_reduce_in_fp8: bool = setting(
        False, "send gradients between data-parallel ranks as FP8 codes, and add them in FP32 (see docs/fp8_lm.md)",
        flags=("--grad-reduce-in-fp8",), off=("--no-grad-reduce-in-fp8",), group="gradient reduction", megatron=OWN,
    )
    grad_reduce_fp8_format: str = setting(
        "e4m3", "format of the codes of gradients",
        choices=("e4m3", "e5m2"), requires="--grad-reduce-in-fp8", group="gradient reduction", megatron=OWN,
    )
    grad_reduce_fp8_scaling: str = setting(
        "block", "scales of the codes of gradients; block: one for 128 elements, tensor: one for each parameter, "
        "common to all ranks, with FP8-LM's automatic factor",
        choices=("block", "tensor"), requires="--grad-reduce-in-fp8", group="gradient reduction", megatron=OWN,
    )
    grad_reduce_fp8_intra_node: str = setting(
        "fp8", "what ranks of one node, or with --use-torch-fsdp2 of one replica, send each other; fp8: codes, as to "
        "the others; bf16, fp32: gradients in that dtype, so that the codes of their sums go to the others",
        choices=("fp8", "bf16", "fp32"), requires="--grad-reduce-in-fp8", group="gradient reduction", megatron=OWN,
    )
    grad_reduce_fp8_error_feedback: bool = setting(
        False, "add the quantization error of a step to the gradients of the next one; 4 bytes a parameter, also saved",
        requires="--grad-reduce-in-fp8", group="gradient reduction", megatron=OWN,
    )
    grad_reduce_fp8_exclude: tuple[str, ...] = setting(
        EXCLUDED_BY_DEFAULT, "parameters whose gradients are not sent as FP8 codes, by patterns of their names; none: "
        "send all as codes",
        many=True, metavar="PATTERN", requires="--grad-reduce-in-fp8", group="gradient reduction", megatron=OWN,
    )
    deterministic_mode: bool = setting(
        False, "use only deterministic kernels, so that runs are bitwise reproducible", group="speed"
    )
