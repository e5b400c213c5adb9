"""Settings of precision, quantization and kernels."""

import functools
from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting
from megafp8.recipes import registry
from megafp8.recipes.base import FP4_FORMATS, FP8_FORMATS


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    bf16: bool = setting(False, "BF16 weights and activations with FP32 master weights")
    fp16: bool = setting(False, "FP16 weights and activations with loss scaling")
    fp8_format: Optional[str] = setting(
        None,
        "FP8 in the linears: e4m3 for all tensors, hybrid: e4m3 forward and e5m2 gradients, e5m2 for all tensors "
        "(emulated only: Transformer Engine has no such format)",
        choices=FP8_FORMATS,
    )
    fp8_recipe: str = setting(
        registry.DEFAULT_FP8, "how FP8 scales are found", choices=functools.partial(registry.names, "fp8")
    )
    fp4_format: Optional[str] = setting(None, "FP4 in the linears: e2m1 for all tensors", choices=FP4_FORMATS)
    fp4_recipe: str = setting(
        registry.DEFAULT_FP4, "how FP4 scales are found", choices=functools.partial(registry.names, "fp4")
    )
    fp4_hadamard: bool = setting(
        True, "nvfp4: Hadamard-transform the operands of the weight gradient", off=("--no-fp4-hadamard",)
    )
    fp4_stochastic_rounding: bool = setting(
        True, "nvfp4: round gradients stochastically", off=("--no-fp4-stochastic-rounding",)
    )
    fp4_2d_weights: bool = setting(
        True, "nvfp4: 16 x 16 blocks for weights, the same values forward and backward", off=("--no-fp4-2d-weights",)
    )
    fp8_margin: int = setting(0, "delayed: scale is divided by 2^margin")
    fp8_amax_history_len: int = setting(1, "delayed: steps of amax history")
    fp8_amax_compute_algo: str = setting(
        "most_recent", "delayed: amax from the history", choices=("most_recent", "max")
    )
    fp8_delayed_start: str = setting(
        "calibrated",
        "delayed: scales of the first step. calibrated = from the first batch, which runs forward and backward before "
        "the first step without an update; te = all 1, as Transformer Engine starts",
        choices=("calibrated", "te"),
    )
    tp_only_amax_red: bool = setting(
        False, "delayed: reduce amaxes over tensor- and context-parallel ranks only, not over data-parallel ones"
    )
    fp8_wgrad: bool = setting(True, "weight gradient GEMM in FP8", off=("--no-fp8-wgrad", "--disable-fp8-wgrad"))
    fp8_param_gather: bool = setting(
        False,
        "keep the linears' weights as FP8 codes and scales, without a BF16 copy, and gather those: half the "
        "bytes; emulated with tensorwise, delayed and blockwise",
    )
    fp8_power_2_scale: bool = setting(False, "tensorwise: round scales down to powers of two")
    fp8_block_scaling_fp32_scales: bool = setting(
        False,
        "blockwise: FP32 scales instead of powers of two (emulated; in Transformer Engine the environment "
        "variable NVTE_FP8_BLOCK_SCALING_FP32_SCALES does it)",
    )
    fp8_amax_reduction: str = setting(
        "te",
        "emulated amax reduction over tensor-parallel ranks: te = where Transformer Engine reduces, "
        "all = every operand, so that scales do not depend on the layout",
        choices=("te", "all"),
    )
    first_last_layers_bf16: bool = setting(False, "keep the first and last layers in high precision")
    num_layers_at_start_in_bf16: int = setting(1, "layers at the start, with --first-last-layers-bf16")
    num_layers_at_end_in_bf16: int = setting(1, "layers at the end, with --first-last-layers-bf16")
    precision_map: tuple[str, ...] = setting(
        (),
        "recipes by linear and GEMM: PATTERN[:GEMMS]=RECIPE[/FORMAT], for example '*.linear_fc2=blockwise' "
        "'layers.20-23.*:dgrad,wgrad=bf16' output_layer=mxfp8; adds up, later entries win (see docs/precision.md)",
        flags=("--precision",),
        many=True,
        metavar="ENTRY",
    )
    fp8_schedule: Optional[str] = setting(
        None,
        "steps in FP8 and steps in high precision, each stretch with its last step: bf16:100,fp8:900,bf16",
        metavar="STRETCHES",
    )
    transformer_impl: str = setting(
        "auto",
        "layer implementation: transformer_engine (CUDA), emulated (any device; FP8 by emulation), local "
        "(megatron-core's own layers, no FP8), auto = transformer_engine where it has the recipe, else emulated",
        choices=("auto", "transformer_engine", "emulated", "local"),
    )
    emulation: bool = setting(
        True, "emulate a recipe that the device does not have; without, that is an error", off=("--no-emulation",)
    )
    attention_backend: str = setting(
        "auto", "attention kernels", choices=("auto", "flash", "fused", "unfused", "local", "sdpa")
    )
    cross_entropy_loss_fusion: Optional[bool] = setting(
        None,
        "fused cross entropy; default Transformer Engine's with its layers, else none",
        flags=("--cross-entropy-loss-fusion",),
        off=("--no-cross-entropy-loss-fusion",),
    )
    cross_entropy_fusion_impl: Optional[str] = setting(
        None,
        "which fused cross entropy; default native with --cross-entropy-loss-fusion",
        choices=("native", "te"),
    )
    gradient_accumulation_fusion: bool = setting(
        True,
        "accumulate weight gradients inside the GEMM where the layer can",
        off=("--no-gradient-accumulation-fusion",),
    )
    gradient_overwrite: bool = setting(
        True,
        "a step's first weight gradients overwrite their buffers instead of being added to zeros "
        "(Transformer Engine's linears, without pipeline stages)",
        off=("--no-gradient-overwrite",),
    )
    fp8_dot_product_attention: bool = setting(
        False, "both products of attention in FP8, too, under delayed scaling (Transformer Engine's layers, cuDNN)"
    )
    masked_softmax_fusion: bool = setting(True, "fused masked softmax (CUDA)", off=("--no-masked-softmax-fusion",))
    bias_swiglu_fusion: bool = setting(True, "fused bias and SwiGLU", off=("--no-bias-swiglu-fusion",))
    bias_gelu_fusion: bool = setting(True, "fused bias and GELU", off=("--no-bias-gelu-fusion",))
    bias_dropout_fusion: bool = setting(True, "fused bias, dropout and residual add", off=("--no-bias-dropout-fusion",))
    apply_rope_fusion: bool = setting(True, "fused rotary embedding (CUDA)", off=("--no-rope-fusion",))
    split_rope_fusion: Optional[bool] = setting(
        None,
        "one kernel splits queries, keys and values and rotates them; default where Transformer Engine's layers "
        "rotate whole heads",
        flags=("--split-rope-fusion",),
        off=("--no-split-rope-fusion",),
    )
    swiglu_quantize_fusion: Optional[bool] = setting(
        None,
        "SwiGLU writes both FP8 copies of its result by kernels of ours (delayed, blockwise, and tensorwise "
        "where these quantize it, see --quantize-kernels); default with fused operations",
        flags=("--swiglu-quantize-fusion",),
        off=("--no-swiglu-quantize-fusion",),
    )
    quantize_kernels: Optional[str] = setting(
        None,
        "who quantizes activations and gradients in Transformer Engine's layers, tensorwise, delayed and "
        "blockwise: its kernels (te), or ours to the same bytes; default triton for blockwise and in graphs, else te",
        choices=("te", "triton"),
    )
    residual_norm_fusion: bool = setting(
        False,
        "with fused operations: the kernel of the MLP's RMSNorm adds the residual's gradient to its own, which "
        "rounds their sum once instead of twice",
    )
    use_transformer_engine_op_fuser: Optional[bool] = setting(
        None,
        "Transformer Engine's fused operations for the MLP; default where they are known to train as its layers",
        flags=("--use-transformer-engine-op-fuser",),
        off=("--no-use-transformer-engine-op-fuser",),
    )
    accumulate_allreduce_grads_in_fp32: bool = setting(
        False, "FP32 gradient buffers and reduction; with --bf16 they are FP32 unless --grad-reduce-in-bf16"
    )
    grad_reduce_in_bf16: bool = setting(False, "reduce gradients in BF16")
    deterministic_mode: bool = setting(False, "only kernels that give the same bits every time")
