"""Where `--cuda-graph-impl auto` chooses a CUDA graph, and the reasons where it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from automatic_runs import DELAYED, MIXTURE, MODEL, chosen, validated

from megafp8.config import flags
from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE, LayerBackend
from megafp8.config.run_sizes import run_sizes
from megafp8.device import capability
from megafp8.device.gpus import GPUS
from megafp8.resources import automatic

TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"

STAGES = "--pipeline-model-parallel-size 2"
DOCUMENTS = "--reset-attention-mask --eod-mask-loss"
FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"


@pytest.mark.parametrize(
    "extra",
    [
        STAGES, "--recompute-activations", "--attention-dropout 0.1", DOCUMENTS,
        f"--context-parallel-size 2 {DOCUMENTS}", f"--context-parallel-size 2 --cp-comm-type a2a {DOCUMENTS}",
    ],
)  # fmt: skip
def test_graphs_that_ran_on_two_gpus_are_chosen(extra: str) -> None:
    assert chosen(f"{DELAYED} {extra}", world_size=2)["--cuda-graph-impl"] == "local"


def test_evaluations_are_a_graph_where_gpus_have_run_them() -> None:
    assert chosen(DELAYED)["--cuda-graph-evaluation"] == "on"
    assert "--cuda-graph-evaluation" not in chosen(DELAYED, world_size=2)
    for extra in ("--cuda-graph-impl none", "--no-cuda-graph-evaluation", MIXTURE, DOCUMENTS):
        assert "--cuda-graph-evaluation" not in chosen(f"{DELAYED} {extra}", world_size=1)


@pytest.mark.parametrize(
    ("extra", "graph"),
    [
        (STAGES, "local"),
        ("--pipeline-model-parallel-size 4", "local"),
        (f"{STAGES} --tensor-model-parallel-size 2 --sequence-parallel", "local"),
        ("--context-parallel-size 2", "local"),
        ("--context-parallel-size 4", "none"),
        (f"{STAGES} --context-parallel-size 2", "none"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", "none"),
    ],
)
def test_layouts_of_four_ranks_are_graphs_where_gpus_have_run_them(extra: str, graph: str) -> None:
    assert chosen(f"{DELAYED} {extra}", world_size=4)["--cuda-graph-impl"] == graph


def test_a_mixture_is_a_graph_where_its_experts_run_in_one_launch_and_memory_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixture = f"{MIXTURE} --fp8-format e4m3 --fp8-recipe tensorwise"
    assert chosen(mixture)["--cuda-graph-impl"] == "local"
    assert chosen(f"{mixture} --moe-expert-kernels te")["--cuda-graph-impl"] == "none"
    assert chosen(f"{mixture} --expert-model-parallel-size 2", world_size=2)["--cuda-graph-impl"] == "none"
    config = validated(mixture).invocation.config
    needed = max(each.total_bytes for each in automatic.estimate_stages(run_sizes(config, 1, 50_304)))
    needed += automatic.non_torch_bytes(config, 1)
    gpu = GPUS["h200"]
    assert gpu is not None
    sized = dataclasses.replace(gpu, memory_bytes=int(1.03 * needed / 0.95))
    monkeypatch.setattr(automatic, "gpu_of", lambda name: sized)
    assert chosen(mixture)["--cuda-graph-impl"] == "none"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            "--attention-dropout 0.1 --recompute-activations",
            "--attention-dropout 0.1: in a CUDA graph, recomputation (--recompute-granularity selective) would draw",
        ),
        (
            f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            "virtual pipeline stages: their graph has been tested in BF16 on two GPUs only; --cuda-graph-impl local",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a",
            "--context-parallel-size 2 with --cp-comm-type a2a: its graph has not been tested",
        ),
        (
            f"--transformer-impl emulated {DOCUMENTS}",
            "--transformer-impl emulated with --reset-attention-mask: its graph has not been tested",
        ),
        ("--no-use-distributed-optimizer", "no --use-distributed-optimizer: CUDA graphs need the one-pass optimizer"),
        (
            "--transformer-impl emulated --tensor-model-parallel-size 2 --sequence-parallel",
            "--transformer-impl emulated: its graphs are of one GPU or data-parallel ranks",
        ),
        (
            "--transformer-impl emulated --fp8-param-gather",
            "--transformer-impl emulated with --fp8-param-gather on several ranks: its graph has not been tested",
        ),
        (
            "--transformer-impl emulated --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "--transformer-impl emulated with recomputation on several ranks: its graph has not been tested",
        ),
        (
            "--transformer-impl emulated --hidden-dropout 0.1",
            "--transformer-impl emulated with dropout on several ranks: its graph has not been tested",
        ),
        (FSDP2, "--use-torch-fsdp2: losses of its graph, which shortens steps only with --fp8-param-gather, have not"),
        (f"{FSDP2} --fp8-recipe tensorwise --fp8-param-gather", "--use-torch-fsdp2: losses of its graph"),
    ],
)
def test_the_reason_for_no_graph_is_reported(extra: str, reason: str) -> None:
    run = validated(f"{DELAYED} {extra}", world_size=2)
    (found,) = (choice for choice in run.choices if choice.flag == "--cuda-graph-impl")
    assert found.value == "none" and found.reason.startswith(reason)


@pytest.mark.parametrize("recipe", ["--fp4-format e2m1 --fp4-recipe nvfp4", f"{DELAYED} --transformer-impl emulated"])
def test_emulated_layers_are_a_graph_with_the_one_pass_optimizer_alone(recipe: str) -> None:
    """Its state is that of Transformer Engine's Adam."""
    assert chosen(recipe)["--cuda-graph-impl"] == "local"
    target = dataclasses.replace(capability.TARGETS["h200"], transformer_engine=None)
    config, choices = automatic.choose(flags.parse([*MODEL.split(), *recipe.split()]).config, target, 1)
    (choice,) = (each for each in choices if each.flag == "--cuda-graph-impl")
    assert config.training.cuda_graph_impl == choice.value == "none" and "one-pass optimizer" in choice.reason


@pytest.mark.parametrize(
    ("extra", "world_size"),
    [
        ("", 1),
        ("", 2),
        ("--fp8-param-gather", 1),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        ("--hidden-dropout 0.1", 1),
    ],
)
def test_emulated_layers_are_a_graph_where_gpus_ran_it(extra: str, world_size: int) -> None:
    text = f"{TENSORWISE} --transformer-impl emulated {extra}"
    assert chosen(text, world_size=world_size)["--cuda-graph-impl"] == "local"


@pytest.mark.parametrize(
    ("extra", "setting"),
    [
        (f"{TENSORWISE} --fp8-saved-activations norm activation", "--fp8-saved-activations"),
        (f"{TENSORWISE} --fp8-guard bf16-layer", "--fp8-guard bf16-layer"),
        (f"{TENSORWISE} --on-nonfinite-activation bf16 --max-skipped-steps 9", "--on-nonfinite-activation bf16"),
        (f"{TENSORWISE} --multi-latent-attention --rope-type rope", "--multi-latent-attention"),
        ("--fp4-format e2m1 --fp4-recipe nvfp4 --fp4-four-over-six", "--fp4-four-over-six"),
    ],
)
def test_untested_graphs_of_emulated_layers_have_to_be_asked_for(extra: str, setting: str) -> None:
    flags_of_run = f"--transformer-impl emulated {extra}"
    (found,) = (choice for choice in validated(flags_of_run).choices if choice.flag == "--cuda-graph-impl")
    assert found.value == "none" and found.reason.startswith(f"--transformer-impl emulated with {setting}: its graph")
    assert validated(f"{flags_of_run} --cuda-graph-impl local").invocation.config.training.cuda_graph_impl == "local"


def test_the_memory_of_a_graph_is_that_of_the_layers_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    requested, estimate_stages = list[LayerBackend](), automatic.estimate_stages

    def recorded(*arguments: Any, implementation: LayerBackend) -> Any:
        requested.append(implementation)
        return estimate_stages(*arguments, implementation=implementation)

    monkeypatch.setattr(automatic, "estimate_stages", recorded)
    for implementation in (TRANSFORMER_ENGINE, EMULATED):
        chosen(f"{DELAYED} --transformer-impl {implementation}")
    assert requested == [TRANSFORMER_ENGINE, EMULATED]


def test_no_graph_where_memory_does_not_suffice_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GPUS["h200"]
    assert gpu is not None
    found = {}
    for gib in (10, 68, 90, 140):
        sized = dataclasses.replace(gpu, memory_bytes=gib * 2**30)
        monkeypatch.setattr(automatic, "gpu_of", lambda name, sized=sized: sized)
        found[gib] = chosen(f"{DELAYED} --fp8-log-interval 10")["--cuda-graph-impl"]
        if gib == 68:
            (choice,) = (each for each in validated(f"{DELAYED} --fp8-log-interval 10").choices if "graph" in each.flag)
            assert "are expected to be free" in choice.reason and "validations that are no graph" in choice.reason
    assert found == {10: "none", 68: "none", 90: "none", 140: "local"}


LONG = (
    f"--model-preset llama3-8b {DELAYED} --num-layers 8 --seq-length 131072 --max-position-embeddings 131072 "
    "--micro-batch-size 1 --global-batch-size 1 --eval-iters 0 --recompute-granularity "
)


@pytest.mark.parametrize(
    ("recomputed", "graph"),
    [
        ("selective --recompute-modules mlp", "none"),
        ("full --recompute-method uniform --recompute-num-layers 1", "local"),
    ],
)
def test_a_graph_leaves_room_for_fragments(recomputed: str, graph: str) -> None:
    """On an H200 launched steps of the first one trained, and the capture failed."""
    (choice,) = (each for each in validated(LONG + recomputed).choices if each.flag == "--cuda-graph-impl")
    assert choice.value == graph
    assert graph == "local" or choice.reason == (
        "2.07 GiB are expected to be free, and a graph needs 3.71 for fragments"
    )


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            f"{MIXTURE} --expert-model-parallel-size 2",
            "--expert-model-parallel-size 2: the host reads how many tokens its ranks exchange",
        ),
        (
            f"{MIXTURE} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            "--expert-tensor-parallel-size 1 with --tensor-model-parallel-size 2: the host reads how many tokens",
        ),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: multi-token prediction is not tested in CUDA graphs"),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "--fp4-recipe nvfp4: Transformer Engine's stochastic rounding"),
    ],
)
def test_the_reason_of_no_graph_is_the_setting_without_suggestion(extra: str, reason: str) -> None:
    found = {choice.flag: choice for choice in validated(extra, "b200", 2).choices}["--cuda-graph-impl"]
    assert found.value == "none" and found.reason.startswith(reason) and "; use " not in found.reason


def test_performance_max_of_a_mixture_is_a_graph() -> None:
    """Its memory is estimated with the precision map that the flag adds."""
    text = f"{MIXTURE} --fp8-format e4m3 --fp8-recipe tensorwise --performance max"
    assert chosen(text)["--cuda-graph-impl"] == "local" and chosen(text)["--precision"] == "output_layer=tensorwise"
