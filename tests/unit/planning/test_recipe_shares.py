"""Plans of runs with a precision map: GEMMs and memory of each recipe."""

import pytest
from plans import FP8, run_of

from megafp8.config.layer_backends import EMULATED
from megafp8.config.run_sizes import run_sizes
from megafp8.planning.compute import gemm_s, output_layer_casts_s, output_layer_s
from megafp8.planning.planned_run import output_layer_gemms
from megafp8.planning.step_time import stage_time, weight_casts_s
from megafp8.resources.memory import estimate_memory, layer_activations, parameters_on_stage
from megafp8.resources.recipe_shares import BACKWARD_GEMMS, FORWARD_GEMMS, layers_by_recipe

# Runs whose map changes an MLP have no fused operations. The other runs here do not use them either.
LAYERS = {"precision.use_transformer_engine_op_fuser": False}


def mapped(*entries, gpu="h200", **settings):
    names = {name.replace("__", "."): value for name, value in settings.items()}
    return run_of(FP8 | LAYERS | {"precision.precision_map": entries} | names, gpus=2, gpu=gpu)


def test_a_map_of_all_layers_is_planned_as_the_recipe():
    """A map that returns one in two layers to BF16 is the mean of both."""
    plain, high = run_of(FP8 | LAYERS, gpus=2), run_of(LAYERS, gpus=2)
    for mapped_job, expected in (
        (mapped("layers.*=tensorwise"), plain),
        (mapped("layers.*=bf16"), high),
        (mapped("layers.*=tensorwise", precision__fp8_format=None, precision__fp8_recipe="delayed"), plain),
    ):
        assert stage_time(mapped_job, 0).parts == pytest.approx(stage_time(expected, 0).parts)
        assert weight_casts_s(mapped_job, 0) == pytest.approx(weight_casts_s(expected, 0))
        memory = [estimate_memory(run_sizes(run.config, 2, 128256)).total_bytes for run in (mapped_job, expected)]
        assert memory[0] == pytest.approx(memory[1])
    half = stage_time(mapped("layers.16-31.*=bf16"), 0).parts["linears"]
    assert half == pytest.approx((stage_time(plain, 0).parts["linears"] + stage_time(high, 0).parts["linears"]) / 2)


def test_gradients_in_high_precision_cost_the_backward_pass_alone():
    plain, high, mixed = run_of(FP8 | LAYERS, gpus=2), run_of(LAYERS, gpus=2), mapped("layers.*:dgrad,wgrad=bf16")
    assert stage_time(mixed, 0).forward == pytest.approx(stage_time(plain, 0).forward, rel=0.02)
    assert stage_time(mixed, 0).backward == pytest.approx(stage_time(high, 0).backward, rel=0.02)
    assert layer_activations(run_sizes(mixed.config, 8, 1024)) == layer_activations(run_sizes(high.config, 8, 1024))


OUTPUT = 128256 * 4096


@pytest.mark.parametrize(
    ("recipe", "gpu", "cast_bytes", "most"), [("tensorwise", "h200", 6, 0.6), ("mxfp8", "b200", 4, 0.61)]
)
def test_a_quantized_output_layer_counts_by_its_recipe(recipe, gpu, cast_bytes, most):
    """Its GEMMs at the speed of the recipe, its casts, and two copies of its weight."""
    high, low = (mapped("layers.*=bf16", *more, gpu=gpu) for more in ((), (f"output_layer={recipe}",)))
    times = [stage_time(run, 0) for run in (high, low)]
    products = [
        sum(gemm_s(high, name, *product.shape) for product in output_layer_gemms(high)) for name in ("bf16", recipe)
    ]
    assert [time.parts["output layer"] for time in times] == pytest.approx(products)
    assert products[1] < most * products[0]
    speed = low.gpu.hbm_bytes_per_s * low.calibration.cast_fraction
    assert "casts" not in times[0].parts or times[0].parts["casts"] == 0
    start_s = low.calibration.cast_start_s
    assert times[1].parts["casts"] == pytest.approx(2 * start_s + cast_bytes * 8192 * (4096 + 128256) / speed)
    assert weight_casts_s(low, 0) == pytest.approx(start_s + cast_bytes * OUTPUT / speed)
    before, after = (estimate_memory(run_sizes(run.config, 2, 128256)) for run in (high, low))
    assert (before.fp8_copies_bytes, after.fp8_copies_bytes) == (0, 2 * OUTPUT)
    assert before.logits_bytes - after.logits_bytes == 8192 * 4096  # its input is saved as codes


def test_an_output_layer_with_gradients_in_high_precision_saves_its_input():
    run, high = mapped("layers.*=bf16", "output_layer:fprop=mxfp8"), mapped("layers.*=bf16")
    (forward, backward, _), (_, high_backward, _) = output_layer_s(run), output_layer_s(high)
    assert (
        forward == pytest.approx(gemm_s(run, "mxfp8", *output_layer_gemms(run)[0].shape)) and backward == high_backward
    )
    assert output_layer_casts_s(run)[1] == 0
    memory = [estimate_memory(run_sizes(each.config, 2, 128256)).logits_bytes for each in (run, high)]
    assert memory[0] == memory[1]


def test_only_the_last_stage_has_the_output_layers_copies():
    run = mapped("layers.*=bf16", "output_layer=tensorwise", parallel__pipeline_model_parallel_size=2)
    copies = [estimate_memory(run_sizes(run.config, 2, 128256), stage=stage).fp8_copies_bytes for stage in (0, 1)]
    assert copies == [0, 2 * OUTPUT]
    assert weight_casts_s(run, 0) == 0 < weight_casts_s(run, 1)


def test_the_output_layers_input_is_gathered_as_codes():
    tensor = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
    low, high = (mapped("layers.*=bf16", *entry, **tensor) for entry in (["output_layer=tensorwise"], []))
    saved_s = stage_time(high, 0).parts["tensor parallel"] - stage_time(low, 0).parts["tensor parallel"]
    assert saved_s == pytest.approx(8192 * 4096 / 2 / (450e9 * high.calibration.nvlink_fraction))


def test_linears_count_by_their_size():
    run = mapped("*.linear_fc2=blockwise", "layers.0.*:wgrad=bf16", parallel__pipeline_model_parallel_size=2)
    shares = layers_by_recipe(run.sizes, 0, FORWARD_GEMMS)
    fc2 = 4096 * 14336 / (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336))
    assert shares == {"tensorwise": pytest.approx(16 * (1 - fc2)), "blockwise": pytest.approx(16 * fc2)}
    assert layers_by_recipe(run.sizes, 0, BACKWARD_GEMMS)["bf16"] == pytest.approx(0.5)
    assert "bf16" not in layers_by_recipe(run.sizes, 1, BACKWARD_GEMMS)
    one = mapped("layers.*=bf16", "*.linear_fc2=blockwise")
    quantizable, _ = parameters_on_stage(one.sizes, 0)
    copies = estimate_memory(run_sizes(one.config, 2, 128256), implementation=EMULATED).fp8_copies_bytes
    assert copies == pytest.approx(fc2 * quantizable, rel=1e-6)
