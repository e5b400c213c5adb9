"""The search: what it tries, what it excludes, and its report when nothing fits."""

from __future__ import annotations

import pytest
from plans import FP8, config_of

from megafp8.config import dimensions, flags, rules
from megafp8.config.settings import settings_by_name
from megafp8.device.gpus import GPUS
from megafp8.errors import ConfigError
from megafp8.planning import layouts
from megafp8.planning import plan as planning_plan
from megafp8.planning.layouts import find_layouts
from megafp8.planning.plan import make_plan, scaling_limits
from megafp8.planning.report import plan_data, plan_text
from megafp8.planning.step_time import MODEL_GEMM_PARTS
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION


def search(changes=None, *, gpus=8, gpu="h200", given=()):
    return find_layouts(config_of(changes), GPUS[gpu], gpus, lambda c: dimensions.padded_vocab_size(c, 128_256), given)


@pytest.fixture(scope="module")
def eight():
    return search(FP8)


def test_every_layout_breaks_no_rule_and_uses_every_gpu(eight):
    assert len(eight.layouts) > 20
    for layout in eight.layouts:
        run = layout.run
        assert rules.setting_problems(run.config, 8) == []
        assert run.sizes.tensor * run.context * run.pipeline * run.data == 8
        assert run.config.parallel.sequence_parallel == (run.sizes.tensor > 1)


def test_the_fastest_comes_first_and_fits(eight):
    speeds = [layout.step.tokens_per_s_per_gpu for layout in eight.layouts]
    assert speeds == sorted(speeds, reverse=True)
    room = GPUS["h200"].memory_bytes * (1 - FREE_MEMORY_FRACTION)
    assert all(layout.memory_bytes <= room for layout in eight.layouts)
    assert eight.smallest_bytes == min(layout.memory_bytes for layout in eight.layouts)


def test_every_kind_of_splitting_is_tried(eight):
    runs = [layout.run for layout in eight.layouts]
    assert {run.sizes.tensor for run in runs} == {1, 2, 4, 8}
    assert {run.pipeline for run in runs} == {1, 2, 4, 8}
    assert {run.chunks for run in runs if run.pipeline == 4} == {1, 2, 4, 8}
    assert {run.context for run in runs} == {1, 2, 4, 8}
    assert {run.config.training.recompute_granularity for run in runs} == {None, "selective", "full"}
    assert {1, 2, 4} <= {run.config.training.micro_batch_size for run in runs}


def test_given_settings_are_kept():
    given = (layouts.TENSOR, layouts.MICRO, layouts.GRANULARITY)
    found = search({layouts.TENSOR: 2, layouts.MICRO: 2}, given=given)
    for layout in found.layouts:
        assert (layout.run.sizes.tensor, layout.run.config.training.micro_batch_size) == (2, 2)
        assert layout.run.config.training.recompute_granularity is None


def test_a_smaller_gpu_has_fewer_layouts(eight):
    on_h100 = search(FP8, gpu="h100")
    assert on_h100.num_legal == eight.num_legal
    assert len(on_h100.layouts) < len(eight.layouts)


def test_a_model_that_does_not_fit_reports_its_need():
    found = search(gpus=1, gpu="h100")
    assert found.layouts == [] and found.smallest_bytes > GPUS["h100"].memory_bytes
    text = plan_text(invoked("--model-preset llama3-70b", gpus=8, scaling=()), 3)
    assert "0 fit" in text and "the smallest needs" in text


# ---- plans --------------------------------------------------------------------------------------------------------


def invoked(text: str, *, gpu="h200", gpus=8, scaling=(8, 64, 4096)):
    return make_plan(flags.parse(text.split()), GPUS[gpu], gpus, scaling)


@pytest.fixture(scope="module")
def planned():
    return invoked("--model-preset llama3-8b --fp8-recipe tensorwise")


def test_missing_settings_are_assumed_and_reported(planned):
    assert planned.assumed["precision.fp8_format"] == "hybrid"
    assert planned.assumed["data.seq_length"] == 8192
    text = plan_text(planned, 3)
    for name, value in planned.assumed.items():
        flag = settings_by_name()[name].flags[0]
        assert (flag if value is True else f"{flag} {value}") in text
    assert "True" not in text


def test_given_settings_are_not_assumed():
    given = "--fp8-format e4m3 --seq-length 4096 --global-batch-size 32 --lr 1e-4 --train-iters 5 --bf16"
    found = invoked(f"--model-preset llama3-8b --fp8-recipe tensorwise {given}", scaling=()).search
    config = found.layouts[0].run.config
    assert (config.precision.fp8_format, config.data.seq_length) == ("e4m3", 4096)
    assert (config.training.global_batch_size, config.optimizer.lr, config.training.train_iters) == (32, 1e-4, 5)


@pytest.mark.parametrize(("gpus", "batch"), [(8, 512), (512, 512), (24, 384), (6, 384), (1000, 500), (16384, 512)])
def test_the_assumed_batch_divides_over_the_gpus(gpus, batch):
    assert planning_plan.default_batch_size(gpus, 512) == batch


def test_any_number_of_gpus_is_planned():
    assert invoked("--model-preset llama3-8b --bf16", gpus=24, scaling=()).search.layouts


def test_null_tokenizer_does_not_change_the_vocabulary(planned):
    assert planned.search.layouts[0].run.padded_vocab == 128_256


def test_the_text_has_every_section(planned):
    text = plan_text(planned, 3)
    for part in (
        "legal layouts", "memory of layout 1", "host memory of layout 1 for checkpoints", "GiB to resume",
        "step time of layout 1", "communication of layout 1",
        "the same batch on more GPUs", "assumptions", "HBM 4.80 TB/s", "flags of layout 1", "--micro-batch-size",
    ):  # fmt: skip
        assert part in text
    assert "speed per GPU falls below 50% of the best at 4,096 GPUs" in text


def test_flags_of_a_layout_are_read_back_as_it(planned):
    for layout in plan_data(planned, 5)["layouts"]:
        assert rules.setting_problems(flags.parse(layout["argv"]).config, 8) == []
    best = planned.search.layouts[0]
    assert flags.parse(plan_data(planned, 1)["layouts"][0]["argv"]).config == best.config
    assert best.config.training.cuda_graph_impl == "auto" and best.run.config.training.cuda_graph_impl == "local"


def test_a_prime_number_of_gpus_is_compared_with_others():
    """Its batch, which no other number divides, is not theirs."""
    few = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
    plan = invoked(f"--model-preset llama3-8b --bf16 {few}", gpus=13, scaling=(8, 13, 4096))
    assert all(plan.scaling.values())
    text = plan_text(plan, 1)
    assert "about the same batch on more GPUs" in text and "of the best at 4,096 GPUs" in text


def test_scaling_limits_are_where_efficiency_drops(planned):
    speeds = {count: layout.step.tokens_per_s_per_gpu for count, layout in planned.scaling.items()}
    assert speeds[8] > speeds[4096]
    limits = scaling_limits(planned.scaling)
    assert [limit.world_size for limit in limits if limit.share == 0.5] == [4096]
    assert all(limit.part not in MODEL_GEMM_PARTS for limit in limits)


def test_slow_small_clusters_are_not_scaling_limits(planned):
    """The best speed is at 64 GPUs. The loss at 8 is not a scaling loss."""
    layouts_of = {8: planned.scaling[4096], 64: planned.scaling[8]}
    assert scaling_limits(layouts_of) == []
    assert scaling_limits({8: None}) == []


@pytest.mark.parametrize(
    ("text", "gpu", "problem"),
    [
        ("--model-preset llama3-8b --fp8-recipe mxfp8", "h200", "needs compute capability 10.0"),
        ("--model-preset llama3-8b --transformer-impl emulated --fp8-recipe tensorwise", "h200", "--no-emulation"),
        ("--model-preset tiny", "h200", "give --vocab-size"),
        ("--fp8-recipe tensorwise", "h200", "--model-preset"),
        ("--model-preset llama3-8b --tensor-model-parallel-size 3", "h200", "are not a multiple"),
        ("--model-preset gpt2-124m --seq-length 2048", "h200", "--max-position-embeddings"),
    ],
)  # fmt: skip
def test_impossible_plans_are_refused_with_the_reason(text, gpu, problem):
    with pytest.raises(ConfigError) as raised:
        invoked(text, gpu=gpu, scaling=())
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("text", "gpus", "problem"),
    [
        ("--cuda-graph-impl local --mtp-num-layers 1", 8, "--mtp-num-layers 1 with"),
        ("--tensor-model-parallel-size 0", 8, "--tensor-model-parallel-size 0 must be at least 1"),
        ("--num-layers 0", 8, "--num-layers 0 must be at least 1"),
        ("--num-layers 9000", 8, "at most 4,096"),
        ("--tensor-model-parallel-size 3", 8, "8 GPUs are not a multiple of --tensor-model-parallel-size 3: use"),
    ],
)
def test_a_refusal_names_given_settings(text, gpus, problem):
    """It does not name recompute, pipelines and contexts that only the search tried."""
    with pytest.raises(ConfigError) as raised:
        invoked(f"--model-preset llama3-8b {text}", gpus=gpus, scaling=())
    assert len(raised.value.problems) == 1 and problem in raised.value.problems[0]


def test_a_refusal_without_one_cause_is_about_the_nearest_layout():
    """Every layout breaks the batch in its own way. One is reported, with the settings that the search chose for it."""
    with pytest.raises(ConfigError) as raised:
        invoked("--model-preset llama3-8b --global-batch-size 64 --micro-batch-size 3", gpus=8, scaling=())
    (problem,) = raised.value.problems
    chosen = [f"--{name}-parallel-size 1" for name in ("tensor-model", "pipeline-model", "context")]
    assert "layouts of 8 GPUs is compatible with the given flags" in problem
    assert f"The nearest layout, {', '.join(chosen)}: --global" in problem
    assert problem.endswith("--global-batch-size 64 is not a multiple of --micro-batch-size x data-parallel size = "
                            "3 x 8 = 24 (64 / 24 = 2.667): use --global-batch-size 72")  # fmt: skip


def test_mxfp8_is_planned_where_it_is_native():
    assert invoked("--model-preset llama3-8b --fp8-recipe mxfp8", gpu="b200", scaling=()).search.layouts


def test_a_slower_network_costs_speed_between_nodes_only():
    def speed(gbit_per_s, gpus):
        gpu = planning_plan.with_network(GPUS["h200"], gbit_per_s)
        found = find_layouts(config_of(FP8), gpu, gpus, lambda c: 128_256)
        return found.layouts[0].step.tokens_per_s_per_gpu

    assert speed(50, 8) == speed(None, 8)
    assert speed(50, 64) < speed(None, 64)


def test_a_cuda_graph_reduces_the_memory_for_eager_steps() -> None:
    """A micro-batch that fits without it may not fit."""
    text = "--model-preset llama-1b --seq-length 2048 --global-batch-size 64 --fp8-format hybrid --fp8-log-interval 100"
    plain, graph = (
        make_plan(flags.parse(f"{text} {extra}".split()), GPUS["h200"], 1, ())
        for extra in ("--cuda-graph-impl none", "--cuda-graph-impl local")
    )
    alone = {each.name: each.memory_bytes for each in plain.search.layouts}
    beside = {each.name: each.memory_bytes - each.cuda_graph_bytes for each in graph.search.layouts}
    assert beside.items() < alone.items()
    best = plan_data(graph, 1)["layouts"][0]
    assert best["memory_parts_bytes"]["beside the graph"] > 2**30
    assert sum(best["memory_parts_bytes"].values()) == best["memory_bytes"]
    assert "in addition to it, the first statistics step" in plan_text(
        graph, 1
    ) and "in addition to it, the first statistics step" not in plan_text(plain, 1)


def test_a_plan_has_the_settings_that_a_run_chooses() -> None:
    """Without a graph, small layers wait for the host."""
    text = "--model-preset llama-1b --seq-length 2048 --global-batch-size 64 --fp8-format hybrid --eval-iters 0"
    found = {
        extra: invoked(f"{text} {extra}", gpus=64, scaling=()).search.layouts
        for extra in ("", "--cuda-graph-impl local", "--cuda-graph-impl none")
    }
    plain, graph, launched = ({each.name: each.step.seconds for each in layouts} for layouts in found.values())
    assert plain.keys() == launched.keys()
    assert all(seconds in (graph.get(name), launched[name]) for name, seconds in plain.items())
    assert "host" not in found[""][0].step.parts and found["--cuda-graph-impl none"][0].step.parts["host"] > 0
    assert min(launched.values()) > 2 * min(plain.values())


def test_performance_max_of_a_mixture_is_planned() -> None:
    """The output layer is in FP8, too."""
    text = "--model-preset qwen3-30b-a3b --fp8-format e4m3 --fp8-recipe tensorwise --micro-batch-size 1"
    given = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1"
    plain, most = (invoked(f"{text} {given} {extra}", gpus=64, scaling=()) for extra in ("", "--performance max"))
    assert most.search.layouts[0].step.seconds < plain.search.layouts[0].step.seconds


@pytest.mark.parametrize(
    ("text", "has_it"),
    [("", True), ("--optimizer muon", False), ("--use-torch-fsdp2", False), ("--deterministic-mode", True)],
)
def test_the_optimizer_of_a_plan_is_that_of_the_run(text: str, has_it: bool) -> None:
    size = (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 --micro-batch-size 1"
    )
    layout = invoked(f"--model-preset llama-1b --bf16 {size} {text}", gpus=8, scaling=()).search.layouts[0]
    assert layout.run.config.parallel.use_distributed_optimizer == has_it
    assert "--use-distributed-optimizer" not in flags.to_argv(layout.config)


def test_an_automatic_micro_batch_is_searched() -> None:
    plain = invoked("--model-preset llama3-8b", gpus=8, scaling=())
    auto = invoked("--model-preset llama3-8b --micro-batch-size auto", gpus=8, scaling=())
    assert [layout.name for layout in auto.search.layouts] == [layout.name for layout in plain.search.layouts]
