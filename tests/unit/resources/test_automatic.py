"""Automatic settings: the defaults of each machine, flags that override them, and the reasons."""

from __future__ import annotations

import dataclasses
import tarfile
from pathlib import Path
from typing import Optional

import pytest
from automatic_runs import BETA2, DELAYED, MIXTURE, MODEL, chosen, validated

from megafp8.config import flags, settings
from megafp8.config.layer_backends import EMULATED
from megafp8.config.schema.setting import Role
from megafp8.config.settings import settings_with
from megafp8.device import capability
from megafp8.errors import ConfigError
from megafp8.resources import automatic
from megafp8.training import checks
from megafp8.training.checks import check


def test_one_gpu() -> None:
    assert chosen(DELAYED) == {
        "--use-distributed-optimizer": "on",
        "--cross-entropy-loss-fusion": "te",
        "--cuda-graph-impl": "local",
        "--cuda-graph-evaluation": "on",
    }
    config = validated(DELAYED).invocation.config
    assert config.parallel.overlap_grad_reduce is False and config.parallel.overlap_param_gather is False


def test_several_gpus_overlap_their_communication() -> None:
    found = chosen(DELAYED, world_size=8)
    assert found["--overlap-grad-reduce"] == found["--overlap-param-gather"] == "on"
    assert "--overlap-grad-reduce" not in chosen(f"{DELAYED} --tensor-model-parallel-size 8", world_size=8)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_level_on_one_rank_says_that_no_gradients_are_reduced(level: str) -> None:
    """It then has the choices of a run without the reduction, among them a CUDA graph."""
    (warning,) = [text for text in validated(f"--fp8-lm-level {level}").warnings if "one data-parallel rank" in text]
    assert f"--fp8-lm-level {level}" in warning and "--grad-reduce-in-fp8" in warning
    assert chosen(f"--fp8-lm-level {level}") == chosen(f"--fp8-lm-level {level} --no-grad-reduce-in-fp8")
    several = validated(f"--fp8-lm-level {level}", world_size=2)
    assert not [text for text in several.warnings if "one data-parallel rank" in text]
    graph = "none" if level == "O3" else "local"  # O3 has no one-pass update
    assert {choice.flag: choice.value for choice in several.choices}["--cuda-graph-impl"] == graph


@pytest.mark.parametrize("target", ["h200", "cpu"])
def test_fsdp_adds_no_gradients_in_the_wgrad_gemm(target: str) -> None:
    config = validated("--use-torch-fsdp2", target, world_size=2).invocation.config
    assert not config.precision.gradient_accumulation_fusion
    flag = "--no-gradient-accumulation-fusion"
    assert chosen("--use-torch-fsdp2", target, world_size=2)[flag] == "on"
    assert flag not in chosen(f"--use-torch-fsdp2 {flag}", target, world_size=2)
    requested = flags.parse([*MODEL.split(), "--use-torch-fsdp2"]).config
    assert automatic.with_recorded(requested, config).precision == config.precision


def test_weights_that_are_gathered_beside_the_forward_pass_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(DELAYED, world_size=8)["--use-nccl-ub"] == "on"
    assert "--use-nccl-ub" not in chosen(f"{DELAYED} --no-overlap-param-gather", world_size=8)
    assert "--use-nccl-ub" not in chosen(f"{DELAYED} --overlap-grad-reduce --overlap-param-gather")  # one rank
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert chosen(DELAYED, world_size=8)["--use-nccl-ub"] == "off"


def test_fsdp_chooses_nothing_that_it_excludes() -> None:
    """Also where it is refused with the distributed optimizer of a level."""
    with pytest.raises(ConfigError) as refused:
        validated("--use-torch-fsdp2 --fp8-lm-level O2", world_size=2)
    assert [problem.split()[0] for problem in refused.value.problems] == [
        "--use-precision-aware-optimizer",
        "--use-distributed-optimizer",
    ]


def test_a_cpu_keeps_its_settings() -> None:
    run = validated(DELAYED, "cpu", 2)
    config = run.invocation.config
    assert run.choices == () and config.training.cuda_graph_impl == "none"
    values = (config.parallel.use_distributed_optimizer, config.precision.cross_entropy_loss_fusion)
    assert values == (False, False) and config.precision.cross_entropy_fusion_impl == "native"


def test_fp16_has_no_kernel_for_bf16_logits() -> None:
    """Transformer Engine's loss takes logits in BF16 or FP32."""
    fp16 = f"{MODEL} --fp16 --target h200 --world-size 1".replace("--bf16 ", "").split()
    config = check(*flags.parse_with_problems(fp16)).invocation.config
    assert config.precision.cross_entropy_loss_fusion is False
    with pytest.raises(ConfigError, match="te with --fp16: the kernel takes logits in BF16 or FP32"):
        check(*flags.parse_with_problems([*fp16, "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]))


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--no-use-distributed-optimizer", "parallel.use_distributed_optimizer=False"),
        ("--no-overlap-grad-reduce", "parallel.overlap_grad_reduce=False"),
        ("--no-overlap-param-gather", "parallel.overlap_param_gather=False"),
        ("--no-use-nccl-ub", "parallel.use_nccl_ub=False"),
        ("--no-cross-entropy-loss-fusion", "precision.cross_entropy_loss_fusion=False"),
        ("--cross-entropy-loss-fusion", "precision.cross_entropy_fusion_impl=native"),
        ("--cuda-graph-impl none", "training.cuda_graph_impl=none"),
        ("--cuda-graph-evaluation", "training.cuda_graph_evaluation=True"),
    ],
)
def test_a_flag_wins(flag: str, field: str) -> None:
    name, _, value = field.partition("=")
    section, _, attribute = name.partition(".")
    config = validated(f"{DELAYED} {flag}", world_size=2).invocation.config
    assert str(getattr(getattr(config, section), attribute)) == value


@pytest.mark.parametrize(
    ("flags", "kernels", "reason"),
    [
        ("--fp8-format e4m3", "triton", "all experts in one launch"),
        ("--fp8-format hybrid", "triton", "all experts in one launch"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "triton", "all experts in one launch"),
        ("--fp8-format e4m3 --expert-model-parallel-size 2", "triton", "all experts in one launch"),
        (
            "--fp8-format e4m3 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex",
            "te",
            "--moe-token-dispatcher-type flex with expert-parallel ranks",
        ),
    ],
)
def test_the_kernels_of_experts_are_told_with_the_reason(flags: str, kernels: str, reason: str) -> None:
    text = f"{MIXTURE} --fp8-recipe tensorwise {flags}"
    found = {choice.flag: choice for choice in validated(text, world_size=2).choices}["--moe-expert-kernels"]
    assert found.value == kernels and found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--fp8-format e4m3", "has no effect with --moe-expert-kernels triton on one expert-parallel rank"),
        ("--fp8-format e4m3 --expert-model-parallel-size 2", "only costs time with --moe-expert-kernels triton"),
        ("--fp8-format e4m3 --moe-expert-kernels te", None),
    ],
)
def test_chosen_kernels_of_experts_make_the_padding_of_the_router_unused(flags: str, warning: Optional[str]) -> None:
    text = f"{MIXTURE} --fp8-recipe tensorwise {flags} --moe-router-padding-for-quantization"
    found = [each for each in validated(text, world_size=2).warnings if "--moe-router-padding-for-quantization" in each]
    assert len(found) == (warning is not None) and all(warning in each for each in found)


@pytest.mark.parametrize("target", ["h200", "cpu"])
@pytest.mark.parametrize("parallelism", ["tensor-model", "pipeline-model", "context"])
def test_sizes_of_zero_are_refused(parallelism: str, target: str) -> None:
    with pytest.raises(ConfigError, match=f"--{parallelism}-parallel-size 0 must be at least 1"):
        validated(f"--{parallelism}-parallel-size 0", target)


@pytest.mark.parametrize("target", ["h200", "cpu"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_optimizer_state_of_a_checkpoint_is_loaded_in_its_form(is_sharded: bool, target: str) -> None:
    run = validated(DELAYED, target)
    parallel = dataclasses.replace(run.invocation.config.parallel, use_distributed_optimizer=None)
    config = dataclasses.replace(run.invocation.config, parallel=parallel)
    saved = settings.with_values(config, {"parallel.use_distributed_optimizer": is_sharded})
    found, choices = automatic.choose(config, run.target, 1, lambda _: saved)
    assert found.parallel.use_distributed_optimizer is is_sharded
    assert [choice.reason for choice in choices if "distributed" in choice.flag] == ["as the checkpoint"] * is_sharded


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("is_saved", [None, True])
def test_moments_of_a_checkpoint_keep_their_dtype(is_saved: Optional[bool], beta2: float) -> None:
    config = flags.parse(f"{MODEL} --performance max --adam-beta2 {beta2}".split()).config
    saved = settings.with_values(config, {"optimizer.use_precision_aware_optimizer": is_saved})
    saved = settings.with_values(saved, {"parallel.use_distributed_optimizer": True})
    found, choices = automatic.choose(config, capability.TARGETS["h200"], 1, lambda _: saved)
    assert found.optimizer.use_precision_aware_optimizer is is_saved
    assert found.optimizer.exp_avg_sq_dtype == ("bf16" if is_saved else "fp32")
    (reason,) = (each.reason for each in choices if each.flag == "--use-precision-aware-optimizer")
    assert reason == "as the checkpoint"


def test_a_checkpoint_decides_the_form_of_the_optimizer_state(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[2] / "fixtures" / "run_of_an_earlier_version.tar.gz") as archive:
        archive.extractall(tmp_path)  # saved without the distributed optimizer
    run = validated(f"{DELAYED} --load {tmp_path / 'run'}")
    config, flags_chosen = run.invocation.config, {choice.flag for choice in run.choices}
    assert config.parallel.use_distributed_optimizer is False and config.training.cuda_graph_impl == "none"
    assert "--use-distributed-optimizer" not in flags_chosen
    for harmless in ("--no-load-optim", "--finetune"):
        config = validated(f"{DELAYED} --load {tmp_path / 'run'} {harmless}").invocation.config
        assert config.parallel.use_distributed_optimizer is True
    assert checks.saved_config(validated(f"{DELAYED} --load {tmp_path / 'empty'}").invocation.config) is None


def test_a_fault_at_a_number_that_the_run_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFP8_FAULTS", "nan:rank=1,step=2,at=step.amax")
    for extra in ("", DELAYED, "--fp8-format hybrid --fp8-recipe tensorwise --transformer-impl emulated"):
        with pytest.raises(ConfigError, match=r"step\.amax is in the histories of emulated layers with --fp8-recipe"):
            validated(extra)
    assert validated(f"{DELAYED} --transformer-impl emulated").implementation is EMULATED


def test_a_bad_plan_of_faults_hides_no_other_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFP8_FAULTS", "kill:at=lunch")
    with pytest.raises(ConfigError) as caught:
        validated("--num-layers 0")
    assert any("at=lunch" in each for each in caught.value.problems)
    assert any("--num-layers 0" in each for each in caught.value.problems)


@pytest.mark.parametrize(
    ("extra", "flag"),
    [
        ("", None),
        ("--grad-reduce-fp8-exclude none", None),
        ("--grad-reduce-fp8-exclude *norm* *linear_fc9*", "--grad-reduce-fp8-exclude *linear_fc9*"),
        ("--grad-reduce-fp8-intra-node fp8", None),
        ("--grad-reduce-fp8-intra-node bf16", "--grad-reduce-fp8-intra-node bf16"),
        (
            "--grad-reduce-fp8-intra-node fp32 --use-torch-fsdp2 --num-distributed-optimizer-instances 2",
            "--grad-reduce-fp8-intra-node fp32",
        ),
    ],
)
def test_a_dry_run_says_what_it_does_not_check(extra: str, flag: Optional[str]) -> None:
    warnings = validated(f"--grad-reduce-in-fp8 {extra}", world_size=4).warnings
    unchecked = [text.partition(":")[0] for text in warnings if text.endswith("a dry run does not check this")]
    assert unchecked == ([] if flag is None else [flag])


def test_wrong_settings_are_still_refused() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        validated(f"{DELAYED} --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32")


def test_a_recorded_run_is_the_same_run(tmp_path: Path) -> None:
    words = f"{MODEL} {DELAYED} {BETA2} --performance max --target h200 --world-size 2".split()
    requested, recorded = flags.parse(words).config, check(*flags.parse_with_problems(words)).invocation.config
    assert requested != recorded and automatic.with_recorded(requested, recorded) == recorded
    other = flags.parse([*words, "--no-overlap-grad-reduce"]).config
    assert automatic.with_recorded(other, recorded) != recorded
    mapped = flags.parse([*words, "--precision", "*.linear_fc2=bf16"]).config
    assert automatic.with_recorded(mapped, recorded) != recorded
    wide = flags.parse([*words, "--no-use-precision-aware-optimizer"]).config
    assert automatic.with_recorded(wide, recorded) != recorded


def test_every_automatic_setting_is_listed() -> None:
    words = f"{MODEL} {DELAYED} --target h200 --world-size 2".split()
    requested, recorded = flags.parse(words).config, check(*flags.parse_with_problems(words)).invocation.config
    experts = [*words, *MIXTURE.split()]
    mixture, chosen_mixture = flags.parse(experts).config, check(*flags.parse_with_problems(experts)).invocation.config
    changed = settings.diff(requested, recorded) + settings.diff(mixture, chosen_mixture)
    assert {line.partition(":")[0] for line in changed} == set(settings_with(Role.AUTOMATIC))


EXPERT_RANKS = f"{MIXTURE.replace('--moe-token-dispatcher-type alltoall', '')} --expert-model-parallel-size"


@pytest.mark.parametrize(
    ("extra", "world_size", "environment", "value", "reason"),
    [
        (f"{EXPERT_RANKS} 2", 2, {}, "peer", "memory"),
        (f"{EXPERT_RANKS} 4", 8, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "peer", "memory"),
        (f"{EXPERT_RANKS} 4", 8, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, "alltoall", "4 ranks on nodes of 2"),
        (f"{EXPERT_RANKS} 4", 8, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "peer", "memory"),  # of another run
        (f"{EXPERT_RANKS} 2 --moe-dispatch-in-fp8 {DELAYED}", 2, {}, "alltoall", "--moe-dispatch-in-fp8"),
        (
            f"{EXPERT_RANKS} 2 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            4, {}, "alltoall", "--tensor-model-parallel-size 2",
        ),
    ],
)  # fmt: skip
def test_ranks_of_a_node_write_into_each_others_memory(
    extra: str, world_size: int, environment: dict[str, str], value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    choices = validated(extra, world_size=world_size).choices
    (choice,) = (each for each in choices if each.flag == "--moe-token-dispatcher-type")
    assert choice.value == value and reason in choice.reason
    assert (chosen(extra, world_size=world_size)["--cuda-graph-impl"] == "local") == (value == "peer")
