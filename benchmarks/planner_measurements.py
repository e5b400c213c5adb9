"""What the planner is calibrated with and held against: measured steps, and figures that others published.

Measured: up to four H200s (141 GB, 700 W), 2026-11-20, torch 2.11, Transformer Engine 2.20.2, megatron-core 0.16.1.
`mcore` is a bare loop of megatron-core, `megafp8` this project; both have the distributed optimizer, overlapped
reductions, Transformer Engine's loss. Shape A: llama-1b, 8 sequences of 2048 tokens. Shape B: 8 layers of llama3-8b
with a vocabulary of 50,304, 2 sequences of 4096. Shapes M1 to M3: mixtures, 65,536 tokens a GPU (2026-11-29).

A row is `fit` if a constant of the planner was found with it (its profile, or its step), else `held out`; `repeated`
is another run of one of these, and shows how far runs and machines are apart. Rows of other software do the same
arithmetic with other kernels; rows `not modelled` have something that the planner leaves out, which their note says.
None of these three counts for the bars. torchao's rowwise scaling has no recipe here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.config import dimensions
from megafp8.config import flags as config_flags
from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE, LayerBackend
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.device.gpus import GPUS
from megafp8.planning.planned_run import CALIBRATION, Calibration, PlannedRun

COMMON = (
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl te"
)
MIXTURE = (
    "--vocab-size 50304 --seq-length 4096 --global-batch-size 16 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --moe-permute-fusion --micro-batch-size"
)
SHAPES = {
    "A": "--model-preset llama-1b --seq-length 2048 --micro-batch-size 8",
    "B": "--model-preset llama3-8b --num-layers 8 --vocab-size 50304 --seq-length 4096 --micro-batch-size 2",
    "C": "--model-preset llama-1b --hidden-size 1024 --ffn-hidden-size 2816 --seq-length 2048 --micro-batch-size 1 "
    "--global-batch-size 1",
    "M1": f"--model-preset qwen3-30b-a3b --num-layers 6 {MIXTURE} 4",
    "M2": f"--model-preset qwen3-30b-a3b --num-layers 24 --num-experts 16 {MIXTURE} 4",
    "M3": f"--model-preset mixtral-8x7b --num-layers 2 {MIXTURE} 2",
    "small": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 704 --seq-length 256 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 4096 --micro-batch-size 8 --global-batch-size 16",
}
RECIPES = {
    "bf16": "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise-e4m3": "--fp8-format e4m3 --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
}
LAYERS = "--no-use-transformer-engine-op-fuser"
OLD_PASSES = f"--no-one-pass-optimizer --no-split-rope-fusion --no-gradient-overwrite {LAYERS}"
"""Before megafp8 cut its passes over memory; what a bare loop of megatron-core does."""
BARE_LOOP = {"training.calculate_per_token_loss": False}
F = "--use-transformer-engine-op-fuser"
W = "--fp8-param-gather"
G = "--cuda-graph-impl local"
Q, NO_Q = "--swiglu-quantize-fusion", "--no-swiglu-quantize-fusion"
BF16_MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"

FIT, HELD_OUT, REPEATED = "fit", "held out", "repeated"
OTHER, NOT_MODELLED = "other software", "not modelled"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured configuration.

    Attributes:
        step_ms: time of a step; None where memory alone was measured, or the time has no model.
        peak_gib: most that torch had allocated; None where it was not written down.
        memory_role: for the peak, where it differs from `role`.
    """

    name: str
    flags: str
    role: str
    num_gpus: int = 1
    step_ms: Optional[float] = None
    peak_gib: Optional[float] = None
    memory_role: Optional[str] = None
    settings: Iterable[tuple[str, Any]] = ()
    implementation: LayerBackend = TRANSFORMER_ENGINE
    note: str = ""

    @property
    def config(self) -> RunConfig:
        """The settings."""
        parsed, problems = config_flags.parse_with_problems(shlex.split(self.flags))
        assert not problems, problems
        return with_values(parsed.config, dict(self.settings))

    def run(self, calibration: Calibration = CALIBRATION) -> PlannedRun:
        """What the planner takes."""
        return run_of(self.config, "h200", self.num_gpus, calibration)


def run_of(config: RunConfig, gpu: str, num_gpus: int, calibration: Calibration = CALIBRATION) -> PlannedRun:
    """A run for a configuration whose vocabulary is given."""
    assert config.model.vocab_size is not None
    padded = dimensions.padded_vocab_size(config, config.model.vocab_size)
    return PlannedRun(config=config, gpu=GPUS[gpu], world_size=num_gpus, padded_vocab=padded, calibration=calibration)


def _row(software: str, shape: str, recipe: str, role: str, extra: str = "", label: str = "", **others: Any):
    """A row on one of the shapes."""
    is_bare = software != "megafp8"
    passes = OLD_PASSES if is_bare else ""
    return Measurement(
        name=" ".join(filter(None, (software, shape, recipe, label))),
        flags=f"{COMMON} {SHAPES[shape]} {RECIPES[recipe]} {passes} {extra}",
        role=role,
        settings=tuple(BARE_LOOP.items()) if is_bare else (),
        **others,
    )


def _peer(*args: Any, **others: Any) -> Measurement:
    return _row("mcore", *args, **others)


def _ours(*args: Any, **others: Any) -> Measurement:
    return _row("megafp8", *args, **others)


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8"
PP4 = "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16"
EP2 = "--expert-model-parallel-size 2 --global-batch-size"
PEER = f"{EP2} 32 --moe-token-dispatcher-type peer {G}"

MEASUREMENTS: tuple[Measurement, ...] = (
    # One GPU, megatron-core's defaults. The profiles of these are in GROUPS.
    _peer("A", "bf16", FIT, step_ms=284.6, peak_gib=52.1),
    _peer("A", "delayed", FIT, step_ms=220.2, peak_gib=51.6),
    _peer("A", "tensorwise", FIT, step_ms=228.5, peak_gib=50.9, memory_role=HELD_OUT),
    _peer("A", "blockwise", FIT, step_ms=244.9, peak_gib=51.0, memory_role=HELD_OUT),
    _peer("B", "bf16", FIT, step_ms=202.8, peak_gib=47.2),
    _peer("B", "delayed", FIT, step_ms=152.0, peak_gib=49.3),
    _peer("B", "tensorwise", HELD_OUT, step_ms=154.3, peak_gib=49.1),
    _peer("B", "blockwise", HELD_OUT, step_ms=168.2, peak_gib=49.1),
    _peer("A", "bf16", HELD_OUT, "--micro-batch-size 16", "16 sequences", step_ms=545.7, peak_gib=79.7,
          memory_role=FIT),
    _peer("A", "delayed", HELD_OUT, "--micro-batch-size 16", "16 sequences", step_ms=410.3, peak_gib=76.4),
    _peer("A", "delayed", HELD_OUT, BF16_MOMENTS, "BF16 moments", step_ms=221.5, peak_gib=43.6),
    _peer("A", "bf16", HELD_OUT, F, "fused operations", step_ms=275.6, peak_gib=52.1),
    _peer("A", "delayed", HELD_OUT, F, "fused operations", step_ms=209.3, peak_gib=50.8),
    _peer("B", "bf16", HELD_OUT, F, "fused operations", step_ms=197.9, peak_gib=47.2),
    _peer("B", "delayed", HELD_OUT, F, "fused operations", step_ms=146.0, peak_gib=48.0),
    # Another run: FP8 weights, their shards cast by rows.
    _peer("A", "delayed", HELD_OUT, W, "FP8 weights", step_ms=219.4, peak_gib=49.3),
    _peer("A", "tensorwise", HELD_OUT, W, "FP8 weights", step_ms=227.5),
    _peer("B", "delayed", HELD_OUT, W, "FP8 weights", step_ms=149.6, peak_gib=46.1),
    _peer("B", "tensorwise", HELD_OUT, W, "FP8 weights", step_ms=153.7),
    _peer("A", "blockwise", HELD_OUT, W, "FP8 weights", step_ms=246.2),
    _peer("A", "delayed", NOT_MODELLED, W, "FP8 weights, upstream", step_ms=306.1,
          note="a cast that transposes a flat shard, mended in megafp8"),
    _peer("A", "delayed", NOT_MODELLED, "", "FP8 attention", step_ms=229.8, note="FP8 attention"),
    _peer("A", "delayed", NOT_MODELLED, "", "CUDA graphs", step_ms=222.8, note="copies to static buffers"),
    _peer("B", "delayed", NOT_MODELLED, "", "CUDA graphs", step_ms=154.1, note="copies to static buffers"),
    _peer("A", "delayed", NOT_MODELLED, "", "gradients added outside the GEMM", step_ms=223.9, note="one more pass"),
    _peer("A", "bf16", NOT_MODELLED, "", "gradients added outside the GEMM", step_ms=287.6, note="one more pass"),
    _peer("B", "delayed", NOT_MODELLED, "", "FP8 attention", step_ms=150.9, note="FP8 attention"),
    # The same settings in other runs.
    _peer("B", "bf16", REPEATED, "", "2nd run", step_ms=196.7),
    _peer("B", "delayed", REPEATED, "", "2nd run", step_ms=148.3),
    _peer("B", "tensorwise", REPEATED, "", "2nd run", step_ms=150.0),
    _peer("A", "delayed", REPEATED, "", "3rd run", step_ms=218.7),
    _peer("A", "tensorwise", REPEATED, "", "3rd run", step_ms=224.6),
    _peer("B", "delayed", REPEATED, "", "3rd run", step_ms=149.7),
    _peer("B", "tensorwise", REPEATED, "", "3rd run", step_ms=152.5),
    _peer("A", "delayed", REPEATED, F, "fused operations, 3rd run", step_ms=210.8),
    _peer("A", "bf16", REPEATED, F, "fused operations, 3rd run", step_ms=278.4),
    _peer("A", "bf16", REPEATED, F, "fused operations, 4th run", step_ms=278.1, peak_gib=51.9),
    _peer("A", "delayed", REPEATED, F, "fused operations, 4th run", step_ms=213.5, peak_gib=50.6),
    _peer("B", "delayed", REPEATED, F, "fused operations, 4th run", step_ms=148.7, peak_gib=47.6),
    _peer("A", "delayed", REPEATED, F, "fused operations, 5th run", step_ms=227.7, peak_gib=50.6),
    _peer("B", "delayed", REPEATED, F, "fused operations, 5th run", step_ms=150.4, peak_gib=47.6),
    # Four GPUs of one host.
    _peer("B", "bf16", HELD_OUT, "", "DP 4", num_gpus=4, step_ms=201.2),
    _peer("B", "delayed", HELD_OUT, "", "DP 4", num_gpus=4, step_ms=146.2),
    _peer("B", "tensorwise", HELD_OUT, "", "DP 4", num_gpus=4, step_ms=149.3),
    _peer("B", "delayed", NOT_MODELLED, W, "DP 4, FP8 weights, upstream", num_gpus=4, step_ms=181.9,
          note="the cast as above"),
    _peer("B", "tensorwise", NOT_MODELLED, W, "DP 4, FP8 weights, upstream", num_gpus=4, step_ms=182.0,
          note="the cast as above"),
    _peer("B", "bf16", HELD_OUT, TP2, "TP 2, DP 2", num_gpus=4, step_ms=114.8),
    _peer("B", "delayed", HELD_OUT, TP2, "TP 2, DP 2", num_gpus=4, step_ms=87.7),
    _peer("B", "bf16", FIT, TP4, "TP 4", num_gpus=4, step_ms=66.6),
    _peer("B", "delayed", HELD_OUT, TP4, "TP 4", num_gpus=4, step_ms=71.0),
    _peer("B", "tensorwise", HELD_OUT, TP4, "TP 4", num_gpus=4, step_ms=63.2),
    _peer("B", "bf16", HELD_OUT, PP4, "PP 4", num_gpus=4, step_ms=539.9),
    _peer("B", "delayed", HELD_OUT, PP4, "PP 4", num_gpus=4, step_ms=424.8),
    # megafp8 before its passes were cut, then after, on two machines. Peaks and steps are medians over rounds.
    _ours("A", "bf16", HELD_OUT, OLD_PASSES, "first version", step_ms=287, peak_gib=51.9),
    _ours("A", "tensorwise", HELD_OUT, OLD_PASSES, "first version", step_ms=234, peak_gib=50.7),
    _ours("A", "delayed", HELD_OUT, OLD_PASSES, "first version", step_ms=225, peak_gib=51.4),
    _ours("A", "blockwise", HELD_OUT, OLD_PASSES, "first version", step_ms=249, peak_gib=50.8),
    _ours("A", "bf16", HELD_OUT, F, "F R", step_ms=262.5, peak_gib=51.9),
    _ours("A", "delayed", HELD_OUT, f"{LAYERS} --no-split-rope-fusion", "", step_ms=221.5, peak_gib=51.4),
    _ours("A", "delayed", HELD_OUT, f"{F} {NO_Q} --no-split-rope-fusion", "F", step_ms=214.1, peak_gib=50.7),
    _ours("A", "delayed", HELD_OUT, f"{F} {NO_Q}", "F R", step_ms=208.5, peak_gib=50.7),
    _ours("A", "tensorwise", HELD_OUT, F, "F R", step_ms=223.9, peak_gib=49.9),
    _ours("A", "tensorwise", HELD_OUT, f"{F} {W}", "F R W", step_ms=238.9, peak_gib=48.4),
    _ours("A", "blockwise", HELD_OUT, f"{F} {NO_Q}", "F R", step_ms=234.5, peak_gib=50.0),
    _ours("A", "blockwise", HELD_OUT, f"{F} {NO_Q} {W}", "F R W", step_ms=231.0, peak_gib=48.5),
    _ours("B", "bf16", HELD_OUT, F, "F R", step_ms=186.7, peak_gib=46.8),
    _ours("A", "delayed", HELD_OUT, f"{F} {Q}", "F R Q", step_ms=205.2, peak_gib=50.9),
    _ours("A", "delayed", HELD_OUT, f"{F} {NO_Q}", "F R, other machine", step_ms=213.9, peak_gib=50.9),
    _ours("A", "delayed", HELD_OUT, f"{F} {Q} {W}", "F R Q W", step_ms=212.5, peak_gib=49.3),
    _ours("A", "tensorwise", HELD_OUT, F, "F R, other machine", step_ms=223.5, peak_gib=50.1),
    _ours("A", "bf16", HELD_OUT, F, "F R, other machine", step_ms=267.4, peak_gib=52.1),
    _ours("B", "delayed", HELD_OUT, f"{F} {Q}", "F R Q", step_ms=138.3, peak_gib=48.0),
    _ours("B", "delayed", HELD_OUT, f"{F} {Q} {W}", "F R Q W", step_ms=138.9, peak_gib=46.1),
    _ours("B", "bf16", HELD_OUT, F, "F R, other machine", step_ms=191.4, peak_gib=47.2),
    # Several GPUs, `gpu_layouts.py`: the first mode of each layout. (Those after it had the memory of those before.)
    _ours("B", "bf16", HELD_OUT, "", "DP 2", num_gpus=2, step_ms=198.0, peak_gib=35.2),
    _ours("B", "bf16", HELD_OUT, TP2, "TP 2", num_gpus=2, step_ms=113.1, peak_gib=23.7),
    _ours("B", "bf16", HELD_OUT, PP2, "PP 2", num_gpus=2, step_ms=447.8, peak_gib=23.0),
    _ours("B", "bf16", HELD_OUT, "", "DP 4", num_gpus=4, step_ms=198.0, peak_gib=29.1),
    _ours("B", "bf16", HELD_OUT, TP2, "TP 2, DP 2", num_gpus=4, step_ms=126.5, peak_gib=17.7),
    _ours("B", "bf16", HELD_OUT, TP4, "TP 4", num_gpus=4, step_ms=83.1, peak_gib=12.0),
    # Steps as CUDA graphs, 2026-11-22, on two more machines of one GPU and one of four.
    _ours("A", "bf16", HELD_OUT, G, "graph", step_ms=268.1, peak_gib=52.2),
    _ours("A", "delayed", HELD_OUT, G, "graph", step_ms=199.2, peak_gib=50.9),
    _ours("A", "tensorwise", HELD_OUT, G, "graph", step_ms=210.2, peak_gib=50.1),
    _ours("A", "blockwise", HELD_OUT, G, "graph", step_ms=228.2, peak_gib=50.2),
    _ours("B", "bf16", HELD_OUT, G, "graph", step_ms=187.3, peak_gib=47.3),
    _ours("B", "delayed", HELD_OUT, G, "graph", step_ms=135.4, peak_gib=48.1),
    _ours("B", "delayed", HELD_OUT, f"{LAYERS} {W} {G}", "W, graph", step_ms=140.1, peak_gib=46.1),
    _ours("B", "bf16", HELD_OUT, f"{TP4} {G}", "TP 4, graph", num_gpus=4, step_ms=60.8, peak_gib=12.0),
    _ours("B", "delayed", HELD_OUT, f"{TP4} {G}", "TP 4, graph", num_gpus=4, step_ms=45.9, peak_gib=12.5),
    _ours("B", "tensorwise", HELD_OUT, f"{TP4} {G}", "TP 4, graph", num_gpus=4, step_ms=47.0, peak_gib=12.5),
    _ours("B", "delayed", HELD_OUT, f"{TP4} {W} {G}", "TP 4, W, graph", num_gpus=4, step_ms=48.5, peak_gib=11.7),
    _ours("B", "bf16", HELD_OUT, G, "DP 4, graph", num_gpus=4, step_ms=196.6, peak_gib=29.2),
    _ours("B", "delayed", HELD_OUT, G, "DP 4, graph", num_gpus=4, step_ms=141.2, peak_gib=30.0),
    _ours("B", "tensorwise", HELD_OUT, G, "DP 4, graph", num_gpus=4, step_ms=145.1, peak_gib=29.7),
    _ours("B", "delayed", HELD_OUT, f"{W} {G}", "DP 4, W, graph", num_gpus=4, step_ms=142.1, peak_gib=28.0),
    # Mixtures, all experts in one launch. GEMMs of M1 gave the speed of experts' products in FP8.
    _ours("M1", "bf16", HELD_OUT, G, "graph", step_ms=525.2, peak_gib=80.3),
    _ours("M1", "tensorwise-e4m3", FIT, G, "graph", step_ms=453, peak_gib=85.0, memory_role=HELD_OUT),
    _ours("M1", "delayed", HELD_OUT, G, "graph", step_ms=446, peak_gib=85.4),
    _ours("M1", "blockwise", FIT, G, "graph", step_ms=508, peak_gib=85.6, memory_role=HELD_OUT),
    _ours("M2", "bf16", HELD_OUT, G, "graph", step_ms=1595.6, peak_gib=87.0),
    _ours("M3", "bf16", HELD_OUT, G, "graph", step_ms=764.6, peak_gib=64.3),
    _ours("M3", "tensorwise-e4m3", HELD_OUT, G, "graph", step_ms=566.8, peak_gib=69.0),
    _ours("M3", "delayed", HELD_OUT, G, "graph", step_ms=558.2, peak_gib=69.1),
    _ours("M3", "blockwise", HELD_OUT, G, "graph", step_ms=704.3, peak_gib=69.3),
    # Their memory gave the uneven load of expert-parallel ranks.
    *(
        _ours(shape, recipe, HELD_OUT, PEER, "EP 2, graph", num_gpus=2, step_ms=step_ms, peak_gib=peak, memory_role=FIT)
        for shape, recipe, step_ms, peak in (
            ("M1", "bf16", 549.8, 53.1), ("M1", "tensorwise-e4m3", 469.7, 54.4),
            ("M3", "bf16", 781, 38.8), ("M3", "delayed", 551, 40.7),
            ("M2", "bf16", 1832, 87.0), ("M2", "tensorwise-e4m3", 1506, 74.2),
            ("M2", "delayed", 1478, 77.5), ("M3", "blockwise", 741, 41.0),
        )
    ),
    # Collectives, 2026-11-30.
    *(
        _ours(shape, recipe, HELD_OUT, f"{EP2} 32 --moe-token-dispatcher-type {dispatcher}", f"EP 2, {dispatcher}",
              num_gpus=2, step_ms=step_ms, peak_gib=peak)
        for dispatcher, shape, recipe, step_ms, peak in (
            ("alltoall", "M1", "bf16", 709, 50.4), ("alltoall", "M1", "delayed", 736, 52.2),
            ("alltoall", "M2", "bf16", 2543, 68.9), ("alltoall", "M2", "tensorwise", 2377, 62.3),
            ("alltoall", "M3", "bf16", 837, 36.9), ("alltoall", "M3", "blockwise", 791, 39.2),
            ("allgather", "M1", "bf16", 664, 50.5), ("allgather", "M1", "delayed", 614, 52.0),
            ("allgather", "M2", "bf16", 2337, 69.0), ("allgather", "M2", "tensorwise", 2036, 62.2),
            ("allgather", "M3", "bf16", 834, 37.0), ("allgather", "M3", "blockwise", 796, 39.3),
        )
    ),
    # An earlier version, whose router's GEMM did not run on tensor cores; twice the tokens.
    _ours("M1", "bf16", HELD_OUT, f"{EP2} 64", "EP 2, all-to-all", num_gpus=2, step_ms=1449, peak_gib=50.9),
    # Emulated layers: their memory only, the planner does not time them.
    *(
        _ours("A", recipe, HELD_OUT, "--transformer-impl emulated", "emulated", peak_gib=peak,
              implementation=EMULATED)
        for recipe, peak in (
            ("mxfp8", 54.5), ("blockwise", 53.3), ("delayed", 53.1), ("tensorwise", 53.1), ("nvfp4", 50.7)
        )
    ),
    # The quickstart's model, 120k and 93k tokens/s: its steps wait for the host.
    _ours("small", "bf16", FIT, step_ms=34.1),
    _ours("small", "tensorwise", FIT, step_ms=44.0),
    _row("Megatron-LM", "A", "delayed", OTHER, "", "full CUDA graph", step_ms=226.3, peak_gib=56.3),
    _row("torchao", "A", "tensorwise", OTHER, "", "FP8 gather", step_ms=257.2, peak_gib=40.8),
    _row("torchao", "B", "tensorwise", OTHER, "", "FP8 gather", step_ms=188.8, peak_gib=34.9),
    # Other software, the same arithmetic.
    *(
        _row(software, shape, recipe, OTHER, step_ms=step_ms, peak_gib=peak)
        for software, shape, recipe, step_ms, peak in (
            ("Megatron-LM", "A", "bf16", 295.2, 56.8), ("Megatron-LM", "B", "bf16", 207.9, 49.6),
            ("Megatron-LM", "A", "delayed", 227.6, 56.3), ("Megatron-LM", "B", "delayed", 157.8, 51.7),
            ("Megatron-LM", "A", "tensorwise", 242.4, 55.5), ("Megatron-LM", "B", "tensorwise", 161.3, 51.4),
            ("Megatron-LM", "A", "blockwise", 255.6, 55.6),
            ("PyTorch", "A", "bf16", 276.3, 47.1), ("PyTorch", "B", "bf16", 210.1, 36.1),
            ("torchao", "A", "tensorwise", 239.5, 40.0), ("torchao", "B", "tensorwise", 172.1, 33.9),
        )
    ),
)  # fmt: skip

NAMES = ("linears", "output layer", "attention", "passes", "casts", "optimizer")
GROUPS: dict[tuple[str, str], dict[str, float]] = {
    (shape, recipe): {name: milliseconds for name, milliseconds in zip(NAMES, values, strict=True) if milliseconds}
    for (shape, recipe), values in {
        ("A", "bf16"): (172.2, 13.9, 31.2, 39.1, 0, 20.6),
        ("A", "delayed"): (91.8, 13.0, 30.6, 38.9, 15.6, 20.6),
        ("A", "tensorwise"): (92.3, 12.9, 30.7, 39.4, 23.8, 20.8),
        ("A", "blockwise"): (113.8, 13.2, 30.0, 0, 24.9, 0),
        ("B", "bf16"): (119.6, 13.2, 18.7, 14.8, 0, 26.4),
        ("B", "delayed"): (63.6, 13.1, 18.7, 14.8, 6.8, 26.8),
    }.items()
}
"""Milliseconds of a profiled step of `mcore`, by group of kernels. Optimizer: Adam, clipping, norm, the copy to BF16
and zeroing. Passes: rotary embedding, norms, activation, loss, residual additions, other copies, embedding.
Of blockwise only what differs from the others is used."""

SMALL_LINEARS: dict[tuple[str, str], tuple[float, float]] = {
    ("linear_qkv", "bf16"): (68, 0), ("linear_qkv", "tensorwise"): (49, 50.3),
    ("linear_qkv", "delayed"): (49, 35.5), ("linear_qkv", "blockwise"): (57, 35.5),
    ("linear_proj", "bf16"): (35, 0), ("linear_proj", "tensorwise"): (30, 41.2),
    ("linear_proj", "delayed"): (31, 26.0), ("linear_proj", "blockwise"): (33, 25.9),
    ("linear_fc1", "bf16"): (109, 0), ("linear_fc1", "tensorwise"): (72, 65.8),
    ("linear_fc1", "delayed"): (72, 46.2), ("linear_fc1", "blockwise"): (88, 46.6),
    ("linear_fc2", "bf16"): (66, 0), ("linear_fc2", "tensorwise"): (49, 49.7),
    ("linear_fc2", "delayed"): (50, 35.4), ("linear_fc2", "blockwise"): (62, 34.9),
}  # fmt: skip
"""Microseconds of a linear's three GEMMs, and of Transformer Engine's casts for them, alone (`gpu_gemm.py --shapes C`,
one H200, 2026-11-23). Shape C: layers of llama-1b with 1024 channels, 2816 in the MLP, and 2048 tokens."""
