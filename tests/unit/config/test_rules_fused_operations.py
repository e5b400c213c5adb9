"""Where the MLP runs in fused operations, and SwiGLU quantizes in one pass, unless a flag says otherwise."""

from typing import Any

import pytest

from megafp8.config.model_shapes import PRESETS
from megafp8.config.rules import notices
from megafp8.config.rules.precision import (
    fuses_swiglu_quantization,
    quantize_kernels_have_what_they_quantize,
    residual_fusion_has_its_norm,
    swiglu_fusion_has_what_it_fuses,
    triton_cast_recipes,
    triton_casts_need_amax_pass,
    uses_op_fuser,
)
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import with_values

LLAMA = {"model.swiglu": True, "model.add_bias_linear": False, "precision.bf16": True}
BLOCKWISE = LLAMA | {"precision.fp8_format": "e4m3", "precision.fp8_recipe": "blockwise"}
TENSORWISE = LLAMA | {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "tensorwise"}
DELAYED = LLAMA | {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "delayed"}
FUSED = {"precision.use_transformer_engine_op_fuser": True}
GRAPH = {"training.cuda_graph_impl": "local"}
TRITON, TE = ({"precision.quantize_kernels": kernels} for kernels in ("triton", "te"))
LAYERS = {"precision.use_transformer_engine_op_fuser": False}
SMALL = {"model.num_layers": 2}
FP8_OUTPUT = {"precision.precision_map": ("output_layer=tensorwise",)}
FC2_MAPPED = SMALL | {"precision.precision_map": ("*.linear_fc2=bf16",)}


@pytest.mark.parametrize(
    ("values", "fused", "in_swiglu"),
    [
        ({}, False, False),
        (LLAMA, True, False),
        (TENSORWISE, True, False),
        (BLOCKWISE, True, True),
        (DELAYED, True, True),
        (DELAYED | LAYERS, False, False),
        (BLOCKWISE | LAYERS, False, False),
        (BLOCKWISE | {"precision.swiglu_quantize_fusion": False}, True, False),
        (TENSORWISE | TRITON, True, True),
        (TENSORWISE | GRAPH, True, True),
        (TENSORWISE | GRAPH | TE, True, False),
        (BLOCKWISE | TRITON, True, True),
        (BLOCKWISE | TE, True, True),
        (TENSORWISE | LAYERS | TRITON, False, False),
        (LLAMA | {"model.add_bias_linear": True}, False, False),
        (LLAMA | {"precision.bf16": False, "precision.fp16": True}, False, False),
        (BLOCKWISE | {"precision.fp8_param_gather": True}, True, True),
        (BLOCKWISE | {"precision.first_last_layers_bf16": True}, False, False),
        (BLOCKWISE | {"precision.precision_map": ("layers.0.*=bf16",)}, False, False),
        (BLOCKWISE | SMALL | {"precision.precision_map": ("layers.0.linear_fc2=bf16",)}, False, False),
        (BLOCKWISE | SMALL | {"precision.precision_map": ("*.linear_qkv=bf16", "*.linear_fc1=blockwise")}, True, True),
        (DELAYED | SMALL | FP8_OUTPUT, True, True),
        (BLOCKWISE | {"precision.fp8_schedule": "bf16:9,fp8"}, False, False),
        (BLOCKWISE | {"logging.fp8_log_interval": 10}, False, False),
        (BLOCKWISE | {"training.recompute_activations": True}, False, False),
        (BLOCKWISE | {"parallel.tensor_model_parallel_size": 2}, False, False),
        (BLOCKWISE | {"parallel.pipeline_model_parallel_size": 2}, False, False),
        (BLOCKWISE | {"parallel.tensor_model_parallel_size": 2} | FUSED, True, True),
    ],
)
def test_unless_asked_it_is_where_it_is_known(values: dict[str, Any], fused: bool, in_swiglu: bool) -> None:
    config = with_values(RunConfig(), values)
    assert (uses_op_fuser(config), fuses_swiglu_quantization(config)) == (fused, in_swiglu)


@pytest.mark.parametrize(("seq_length", "fits"), [(64, True), (72, False)])
def test_our_kernels_take_128_tokens_at_a_time(seq_length: int, fits: bool) -> None:
    sizes = PRESETS["tiny"] | {"data.seq_length": seq_length, "training.micro_batch_size": 2}
    config = with_values(RunConfig(), BLOCKWISE | TRITON | sizes)
    found = list(quantize_kernels_have_what_they_quantize(config, 1))
    assert fits or "microbatch, not 144" in found[0]
    assert len(found) == (not fits)


@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ({"data.seq_length": 64}, None),
        ({"data.seq_length": 72}, "144 x 384"),
        ({"data.seq_length": 64, "model.ffn_hidden_size": 320}, "128 x 320"),
    ],
)
@pytest.mark.parametrize("recipe", [DELAYED, BLOCKWISE])
def test_swiglu_takes_128_tokens_and_channels_at_a_time(
    recipe: dict[str, Any], sizes: dict[str, Any], made: str | None
) -> None:
    """Elsewhere it is Transformer Engine's, which is not what was asked for."""
    tiny = PRESETS["tiny"] | {"model.ffn_hidden_size": 384, "training.micro_batch_size": 2} | sizes
    config = with_values(RunConfig(), recipe | tiny)
    assert fuses_swiglu_quantization(config) == (made is None)
    found = list(swiglu_fusion_has_what_it_fuses(with_values(config, {"precision.swiglu_quantize_fusion": True}), 1))
    assert len(found) == (made is not None) and all(f"SwiGLU's output is {made}" in problem for problem in found)


@pytest.mark.parametrize(
    ("values", "recipes"),
    [
        ({}, ("blockwise",)),
        (TE, ()),
        (TRITON, ("tensorwise", "delayed", "blockwise")),
        (PRESETS["tiny"] | {"data.seq_length": 64, "training.micro_batch_size": 2}, ("blockwise",)),
        (PRESETS["tiny"] | {"data.seq_length": 72, "training.micro_batch_size": 2}, ()),
        (GRAPH, ("tensorwise", "delayed", "blockwise")),
        (GRAPH | TE, ()),
        (PRESETS["tiny"] | GRAPH | {"data.seq_length": 72, "training.micro_batch_size": 2}, ()),
    ],
)
def test_our_kernels_are_chosen_for_the_recipes_that_are_faster_with_them(
    values: dict[str, Any], recipes: tuple[str, ...]
) -> None:
    assert triton_cast_recipes(with_values(RunConfig(), values)) == recipes


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (TENSORWISE | TRITON, True),
        (TENSORWISE, False),
        (TENSORWISE | TE, False),
        (BLOCKWISE | TRITON, False),
        (BLOCKWISE | TRITON | SMALL | {"precision.precision_map": ("*.linear_qkv=tensorwise",)}, True),
        (LLAMA, False),
    ],
)
def test_an_amax_is_noted_where_our_kernels_need_it(values: dict[str, Any], expected: bool) -> None:
    assert triton_casts_need_amax_pass(with_values(RunConfig(), values)) == expected


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, None),
        (LAYERS, "without --use-transformer-engine-op-fuser"),
        ({"training.recompute_activations": True}, "without --use-transformer-engine-op-fuser"),
        ({"training.recompute_activations": True} | FUSED, "which runs the MLP's forward pass twice"),
        ({"model.normalization": "LayerNorm"}, "without --normalization RMSNorm"),
    ],
)
def test_a_residual_is_added_in_a_norm_that_can(values: dict[str, Any], problem: str | None) -> None:
    llama = LLAMA | {"model.normalization": "RMSNorm", "precision.residual_norm_fusion": True}
    found = list(residual_fusion_has_its_norm(with_values(RunConfig(), llama | values), 1))
    assert problem in found[0] if problem else not found


@pytest.mark.parametrize(
    ("values", "implementation", "said"),
    [
        (BLOCKWISE, "transformer_engine", True),
        (BLOCKWISE | LAYERS, "transformer_engine", True),
        (TENSORWISE, "transformer_engine", False),
        (TENSORWISE | {"precision.precision_map": ("*.linear_qkv=blockwise",)}, "transformer_engine", True),
        (BLOCKWISE | TE, "transformer_engine", False),
        (BLOCKWISE | TRITON, "transformer_engine", False),
        (BLOCKWISE, "emulated", False),
    ],
)
def test_a_run_says_whose_kernels_were_chosen(values: dict[str, Any], implementation: str, said: bool) -> None:
    found = [notice for notice in notices(with_values(RunConfig(), values), implementation, 1) if "Triton" in notice]
    assert len(found) == said
    assert not said or found[0].startswith("blockwise ") and "--quantize-kernels te" in found[0]


@pytest.mark.parametrize(("size", "is_open"), [(AUTO, True), (2, False)])
def test_a_size_that_is_yet_to_be_found_may_leave_no_whole_tiles(size: int, is_open: bool) -> None:
    tiny = PRESETS["tiny"] | {"data.seq_length": 64, "model.ffn_hidden_size": 384, "training.micro_batch_size": size}
    fused, kernels = notices(with_values(RunConfig(), tiny | BLOCKWISE), "transformer_engine", 1)[:2]
    condition = " if the automatic micro-batch size results in multiples of 128 tokens and channels;"
    assert (f"in megafp8's kernels{condition}" in fused, f"Transformer Engine's{condition}" in kernels) == (
        is_open,
        is_open,
    )
    assert "SwiGLU" in fused and "Triton" in kernels


@pytest.mark.parametrize(
    ("values", "implementation", "said"),
    [
        (BLOCKWISE, "transformer_engine", "fused operations, with SwiGLU and quantization in megafp8's kernels"),
        (LLAMA, "transformer_engine", "fused operations; "),
        (DELAYED, "transformer_engine", "fused operations, with SwiGLU and quantization in megafp8's kernels"),
        (DELAYED | FUSED, "transformer_engine", None),
        (
            DELAYED | SMALL | FP8_OUTPUT,
            "transformer_engine",
            "fused operations, with SwiGLU and quantization in megafp8's kernels",
        ),
        (BLOCKWISE | FC2_MAPPED, "transformer_engine", "instead of its fused operations"),
        (BLOCKWISE | FC2_MAPPED | FUSED, "transformer_engine", None),
        (LLAMA | LAYERS, "transformer_engine", None),
        (BLOCKWISE, "emulated", None),
    ],
)
def test_a_run_says_what_was_chosen_for_it(values: dict[str, Any], implementation: str, said: str | None) -> None:
    found = [notice for notice in notices(with_values(RunConfig(), values), implementation, 1) if "fuser" in notice]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
