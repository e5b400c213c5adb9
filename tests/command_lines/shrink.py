"""Makes a command line small enough for three steps on one or two CPU ranks, with everything that it asks for.

Sizes, lengths and folders change by the tables below. What needs a GPU or a service is removed. Parallelism is kept in
one dimension, because there are at most two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from command_line_corpus import Line

from megafp8.config import flags
from megafp8.config.megatron_flags import NO_EFFECT
from megafp8.config.rules.declared import unused_settings

STEPS = 3

SIZES: Mapping[str, str] = MappingProxyType({
    "--num-layers": "4", "--encoder-num-layers": "4", "--hidden-size": "64", "--ffn-hidden-size": "128",
    "--num-attention-heads": "4", "--kv-channels": "16", "--num-query-groups": "2", "--seq-length": "32",
    "--encoder-seq-length": "32", "--max-position-embeddings": "32", "--vocab-size": "255",
    "--make-vocab-size-divisible-by": "16", "--micro-batch-size": "1", "--global-batch-size": "4",
    "--train-iters": str(STEPS), "--train-samples": str(4 * STEPS), "--lr-warmup-iters": "1",
    "--lr-warmup-samples": "4", "--lr-decay-iters": "8", "--lr-decay-samples": "32", "--lr-wsd-decay-iters": "1",
    "--lr-wsd-decay-samples": "4", "--eval-iters": "1", "--eval-interval": "2", "--save-interval": "2",
    "--log-interval": "1", "--num-workers": "0", "--recompute-num-layers": "1", "--manual-gc-interval": "2",
    "--num-layers-per-virtual-pipeline-stage": "1", "--num-virtual-stages-per-pipeline-rank": "2",
    "--microbatch-group-size-per-virtual-pipeline-stage": "2", "--decoder-first-pipeline-num-layers": "1",
    "--decoder-last-pipeline-num-layers": "3",
    "--fp8-amax-history-len": "4", "--num-layers-at-start-in-bf16": "1", "--num-layers-at-end-in-bf16": "1",
    "--step-batch-size-schedule": "0:2 64:4", "--rampup-batch-size": "2 2 2", "--eval-global-batch-size": "4",
    "--check-weight-hash-across-dp-replicas-interval": "2", "--non-persistent-save-interval": "2",
    "--profile-step-start": "1", "--profile-step-end": "2", "--profile-ranks": "0", "--window-size": "16",
    "--transformer-impl": "auto", "--distributed-backend": "gloo", "--attention-backend": "auto",
    "--q-lora-rank": "32", "--kv-lora-rank": "32", "--qk-head-dim": "16", "--qk-pos-emb-head-dim": "16",
    "--v-head-dim": "16", "--num-experts": "4", "--moe-ffn-hidden-size": "64", "--padded-vocab-size": "256",
    "--moe-shared-expert-intermediate-size": "64", "--moe-router-num-groups": "2", "--moe-router-group-topk": "1",
    "--pipeline-model-parallel-layout": "Ett|ttL",
})  # fmt: skip
"""Flag -> its value in the small run."""

FOLDERS = ("--save", "--load", "--data-cache-path", "--tensorboard-dir", "--non-persistent-global-ckpt-dir")
"""Each becomes a folder of the test; --load is the run's own --save, so it starts from scratch."""

REMOVED: Mapping[str, str] = MappingProxyType({
    "--tp-comm-overlap": "Transformer Engine's user buffers",
    "--cuda-graph-impl": "CUDA graphs",
    "--cuda-graph-scope": "CUDA graphs",
    "--cuda-graph-warmup-steps": "CUDA graphs",
    "--te-rng-tracker": "CUDA graphs",
    "--fine-grained-activation-offloading": "Transformer Engine's layers",
    "--offload-modules": "Transformer Engine's layers",
    "--min-offloaded-tensor-size": "Transformer Engine's layers",
    "--moe-flex-dispatcher-backend": "a library for GPUs",
    "--use-nccl-ub": "NCCL",
    "--cross-entropy-fusion-impl": "Transformer Engine's kernel",
    "--use-transformer-engine-op-fuser": "Transformer Engine's kernels",
    "--overlap-p2p-communication-warmup-flush": "NCCL",
    "--cp-comm-type": "Transformer Engine's attention",
    "--hierarchical-context-parallel-sizes": "Transformer Engine's attention",
    "--wandb-project": "a service",
    "--wandb-entity": "a service",
    "--wandb-exp-name": "a service",
    "--wandb-save-dir": "a service",
    "--exit-interval": "the run is shorter",
    "--exit-duration-in-mins": "the run is shorter",
    "--no-load-optim": "nothing is loaded",
    "--no-load-rng": "nothing is loaded",
    "--ckpt-step": "nothing is loaded",
    "--finetune": "nothing is loaded",
    "--exit-on-missing-checkpoint": "nothing is loaded",
    "--pretrained-checkpoint": "nothing is loaded",
    "--use-checkpoint-opt_param-scheduler": "nothing is loaded",
})  # fmt: skip
"""Flags that the small run does not have, and what they need or why they cannot matter."""

PARALLEL = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
OF_PIPELINE = (
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-virtual-pipeline-stage", "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split", "--pipeline-model-parallel-layout",
)  # fmt: skip


def shrink(line: Line, folder: Path) -> tuple[int, list[str]]:
    """The ranks and the words of the small run.

    Args:
        folder: for its files.
    """
    options = options_of(line.argv)
    given = {option[0] for option in options}
    selected = parallel_dimension(line, options)
    small = []
    for flag, *values in options:
        if flag in REMOVED or (flag in OF_PIPELINE and selected != "--pipeline-model-parallel-size"):
            continue
        if flag in PARALLEL:
            values = ["2" if flag == selected else "1"]
        elif flag in FOLDERS:
            values = [str(folder / ("save" if flag == "--load" else flag.strip("-")))]
        elif flag in SIZES and values not in (["0"], ["local"], ["unfused"]):
            has_depth = flag == "--pipeline-model-parallel-layout" and "m" in values[0]  # multi-token prediction
            values = ["Ett|ttmL"] if has_depth else SIZES[flag].split()
            if flag == "--num-layers" and "--account-for-loss-in-pipeline-split" in given:
                values = ["6"]  # and two more for the embedding and the loss
        small += [flag, *small_expert_values(flag, values, selected, options)]
    missing = {"--save": str(folder / "save"), "--log-interval": "1", "--num-workers": "0"}
    small += [word for flag, value in missing.items() if flag not in given for word in (flag, value)]
    return 1 if selected == "" else 2, [*small, "--num-threads", "1", "--no-progress-bar"]


def small_expert_values(flag: str, values: list[str], selected: str, options: Sequence[Sequence[str]]) -> list[str]:
    """The values of a flag of experts for the sizes above and the ranks of one dimension; other flags keep theirs.

    Two tensor-parallel ranks divide each expert, or with --expert-tensor-parallel-size 1 the experts, as in the line.
    """
    given = {name: words for name, *words in options}
    splits_experts = given.get("--expert-tensor-parallel-size") == ["1"]
    if flag == "--expert-model-parallel-size":
        has_ranks = selected == "data" or (selected == "--tensor-model-parallel-size" and splits_experts)
        return ["2" if has_ranks and values != ["1"] else "1"]
    if flag == "--expert-tensor-parallel-size":
        return ["2" if selected == "--tensor-model-parallel-size" and not splits_experts else "1"]
    if flag == "--moe-layer-freq":
        return values if values[0].isdigit() else ["([0]*1+[1]*3)"]
    if flag == "--moe-router-topk":
        return [str(min(2, int(values[0])))]
    if flag == "--moe-token-dispatcher-type":
        return ["alltoall" if values == ["flex"] else values[0]]
    if flag == "--recompute-modules":  # the activation of experts needs Transformer Engine's layers
        return [word for word in " ".join(values).strip("[]").split() if word != "moe_act"] or ["core_attn"]
    return values


def parallel_dimension(line: Line, options: Sequence[Sequence[str]]) -> str:
    """The dimension in which the two ranks work: the flag, `data`, or an empty string for one rank.

    An interleaved pipeline is kept; else a line's number chooses, so that all of them occur.
    """
    sizes = {flag: int(values[0]) for flag, *values in options if flag in PARALLEL}
    if any(flag in OF_PIPELINE for flag, *_ in options):
        return "--pipeline-model-parallel-size"
    used = [flag for flag in PARALLEL if sizes.get(flag, 1) > 1]
    model_ranks = 1
    for size in sizes.values():
        model_ranks *= size
    if line.world_size > model_ranks:
        used.append("data")
    return used[line.number % len(used)] if used else ""


def without_unused_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without the flags that are accepted without effect, and those flags."""
    parsed = flags.parse_with_problems(words)[0]
    warnings = [warning for warning in parsed.warnings if NO_EFFECT in warning]
    warnings += unused_settings(parsed.config)
    unused = {warning.split()[0].rstrip(":") for warning in warnings}
    options = options_of(words)
    return [word for option in options if option[0] not in unused for word in option], sorted(unused)


def options_of(words: Sequence[str]) -> list[list[str]]:
    """Each flag with its values."""
    return flags._options_of(words)
