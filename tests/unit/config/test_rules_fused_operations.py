"""When the MLP uses fused operations by default, and when SwiGLU quantizes in its own kernel."""

from typing import Any

import pytest

from megafp8.config.layer_backends import LAYER_BACKENDS, TRANSFORMER_ENGINE
from megafp8.config.model_shapes import PRESETS
from megafp8.config.rules import warnings
from megafp8.config.rules.precision import (
    fuses_swiglu_quantization,
    quantize_kernels_have_what_they_quantize,
    residual_fusion_has_its_norm,
    swiglu_fusion_has_what_it_fuses,
    triton_cast_recipes,
    triton_casts_need_amax_pass,
    uses_op_fuser,
)
from megafp8.config.schema import RunConfig
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
        (BLOCKWISE | {"logging.fp8_log_interval": 10}, True, True),
        (BLOCKWISE | {"training.recompute_activations": True}, False, False),
        (TENSORWISE | {"training.on_nonfinite_activation": "skip"}, False, False),
        (TENSORWISE | GRAPH | {"training.on_nonfinite_activation": "skip"}, True, True),
        (DELAYED | {"training.on_nonfinite_activation": "skip"}, True, True),
        (BLOCKWISE | {"parallel.tensor_model_parallel_size": 2}, False, False),
        (BLOCKWISE | {"parallel.pipeline_model_parallel_size": 2}, True, True),
        (BLOCKWISE | {"parallel.context_parallel_size": 2}, True, True),
        (BLOCKWISE | {"parallel.use_torch_fsdp2": True}, False, False),
        (BLOCKWISE | {"parallel.tensor_model_parallel_size": 2} | FUSED, True, True),
    ],
)
def test_fused_mlp_is_on_by_default_where_supported(values: dict[str, Any], fused: bool, in_swiglu: bool) -> None:
    config = with_values(RunConfig(), values)
    assert (uses_op_fuser(config), fuses_swiglu_quantization(config)) == (fused, in_swiglu)


@pytest.mark.parametrize(("seq_length", "fits"), [(64, True), (72, False)])
def test_our_kernels_need_multiples_of_128_tokens(seq_length: int, fits: bool) -> None:
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
def test_swiglu_needs_multiples_of_128_tokens_and_channels(
    recipe: dict[str, Any], sizes: dict[str, Any], made: str | None
) -> None:
    """Elsewhere Transformer Engine's kernel would run instead of the requested one."""
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
def test_our_kernels_are_chosen_for_recipes_where_they_are_faster(
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
def test_an_amax_is_recorded_where_our_kernels_need_it(values: dict[str, Any], expected: bool) -> None:
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
def test_a_residual_is_added_in_a_norm_that_supports_it(values: dict[str, Any], problem: str | None) -> None:
    llama = LLAMA | {"model.normalization": "RMSNorm", "precision.residual_norm_fusion": True}
    found = list(residual_fusion_has_its_norm(with_values(RunConfig(), llama | values), 1))
    assert problem in found[0] if problem else not found


@pytest.mark.parametrize(
    ("values", "implementation", "has_warning"),
    [
        (BLOCKWISE | FC2_MAPPED, "transformer_engine", True),
        (BLOCKWISE | FC2_MAPPED | FUSED, "transformer_engine", False),
        (BLOCKWISE | FC2_MAPPED, "emulated", False),
        (BLOCKWISE, "transformer_engine", False),
        (LLAMA | LAYERS, "transformer_engine", False),
    ],
)
def test_a_map_that_excludes_fused_operations_is_a_warning(
    values: dict[str, Any], implementation: str, has_warning: bool
) -> None:
    found = [
        warning
        for warning in warnings(with_values(RunConfig(), values), LAYER_BACKENDS[implementation], 1)
        if "fuser" in warning
    ]
    assert len(found) == has_warning and all("instead of its fused operations" in warning for warning in found)


def test_the_op_fuser_is_for_the_layers_without_experts() -> None:
    config = with_values(RunConfig(), {"model.num_experts": 4, **FUSED})
    assert [
        text for text in warnings(config, TRANSFORMER_ENGINE, 1) if "fuses the MLPs of layers without experts" in text
    ]
