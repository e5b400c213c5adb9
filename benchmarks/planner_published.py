"""Speeds that others published, as far as their models have no mixture of experts, and what is known of their runs.

Layouts that were not published are left to the planner, batches are taken to be two sequences a GPU. MB:
Megatron-Bridge's tables of performance, MLM: Megatron-LM's README for Llama, TT: torchtitan's benchmarks, AO: torchao's
documentation. The 405B model has 126 layers, which hardly divide; it is planned with 128. Their software, clocks and
power limits are not ours: fully sharded data parallelism, communication beside GEMMs, CUDA graphs, FP8 attention.
TT and AO compile the model, so their rows are planned without the time that our host takes to start kernels.

The rows `fit` give `block_scaled_gemm_fraction`, which no Hopper can measure: the speed of MXFP8 to tensorwise in one
layout of one software. Each pair has a level of its own, which its two rows share and the fit does not see. Nothing was
fitted to the others.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Optional

from benchmarks.planner_measurements import FIT, HELD_OUT, RECIPES
from megafp8.config import dimensions, flags
from megafp8.config.flags import ParsedArgs
from megafp8.device.gpus import GPUS
from megafp8.planning.layouts import LayoutSearch, find_layouts
from megafp8.planning.plan import assumptions, with_values
from megafp8.planning.planned_run import CALIBRATION

LLAMA_405B = (
    "--num-layers 128 --hidden-size 16384 --num-attention-heads 128 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 53248 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 128256"
)
MODELS = {"8B": "--model-preset llama3-8b", "70B": "--model-preset llama3-70b", "405B": LLAMA_405B}
TP4_PP8_VPP5 = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 5"
)
# What the others do not have, or most of them do not tell.
LAYERS = "--no-use-transformer-engine-op-fuser --cuda-graph-impl none"
WITH_TP = "--tensor-model-parallel-size 8"
TWO_SEQUENCES = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1"
ONE_SEQUENCE = f"{TWO_SEQUENCES} --micro-batch-size 1 --global-batch-size 8"
NO_HOST = dataclasses.replace(CALIBRATION, bf16_host_layer_s=0.0, fp8_host_layer_s=0.0)


@dataclass(frozen=True)
class Published:
    """One row: tokens/s of one GPU.

    Attributes:
        layout: flags of the layout as far as it was published.
        role: whether a constant was fitted to it.
    """

    source: str
    gpu: str
    num_gpus: int
    model: str
    recipe: str
    tokens_per_s: float
    layout: str = ""
    role: str = HELD_OUT

    @property
    def parsed(self) -> ParsedArgs:
        """As flags."""
        model = MODELS[self.model]
        batch = "" if "--global-batch-size" in self.layout else f"--global-batch-size {2 * self.num_gpus}"
        parsed, problems = flags.parse_with_problems(
            shlex.split(f"{model} {LAYERS} {RECIPES[self.recipe]} {self.layout} {batch}")
        )
        assert not problems, problems
        return parsed

    def search(self) -> LayoutSearch:
        """The planner's layouts."""
        parsed = self.parsed
        config = with_values(parsed.config, assumptions(parsed, self.num_gpus))
        return find_layouts(
            config, GPUS[self.gpu], self.num_gpus, lambda found: dimensions.padded_vocab_size(found, 128_256),
            parsed.given, NO_HOST if self.source.startswith(("TT", "AO")) else CALIBRATION,
        )  # fmt: skip


def _rows(
    source: str, gpu: str, num_gpus: int, model: str, layout: Optional[str], role: str = HELD_OUT, **speeds: float
) -> list[Published]:
    return [
        Published(source, gpu, num_gpus, model, recipe, speed, layout or "", role) for recipe, speed in speeds.items()
    ]


GBS128 = "--micro-batch-size 1 --global-batch-size 128"
MBS2 = f"{TWO_SEQUENCES} --micro-batch-size 2 --global-batch-size 128"
TP4_PP8_CP2_VPP8 = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --context-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 8 --micro-batch-size 1 --global-batch-size 64"
)
TP4_PP16_VPP8 = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 16 --context-parallel-size 1 "
    "--num-virtual-stages-per-pipeline-rank 8 --micro-batch-size 1 --global-batch-size 1536"
)
PUBLISHED: tuple[Published, ...] = (
    *_rows("MB 25.11", "h100", 8, "8B", GBS128, tensorwise=14_451),
    *_rows("MB 25.09", "h100", 8, "8B", GBS128, tensorwise=14_079),
    *_rows("MLM", "h100", 8, "8B", f"--context-parallel-size 2 {GBS128}", delayed=13_812),
    *_rows("MLM", "h100", 64, "70B", None, delayed=1_621),
    *_rows("MLM", "h100", 1024, "405B", None, delayed=315),
    *_rows("MB 26.04.01", "h100", 64, "70B", f"{TP4_PP8_VPP5} {GBS128}", tensorwise=1_664),
    *_rows("MB 26.04.01", "h100", 1024, "405B", None, tensorwise=328),
    *_rows("MB 25.11", "b200", 8, "8B", MBS2, FIT, tensorwise=30_624, mxfp8=29_521),
    *_rows("MB 25.11", "gb200", 8, "8B", MBS2, FIT, tensorwise=31_508, mxfp8=29_789),
    *_rows("MB 25.11", "gb300", 8, "8B", MBS2, FIT, tensorwise=37_556, mxfp8=36_108),
    *_rows("MB 25.11", "b200", 128, "405B", TP4_PP8_CP2_VPP8, FIT, tensorwise=661, mxfp8=624),
    *_rows("MB 25.09", "b200", 8, "8B", MBS2, tensorwise=29_994, mxfp8=29_388),
    *_rows("MB 25.09", "gb200", 8, "8B", MBS2, tensorwise=31_357, mxfp8=29_925),
    *_rows("MB 25.09", "b200", 128, "405B", TP4_PP8_CP2_VPP8, tensorwise=664, mxfp8=622),
    *_rows("MB 26.02", "gb200", 256, "405B", TP4_PP16_VPP8, tensorwise=793, mxfp8=786, nvfp4=1_076),
    *_rows("MB 26.04.01", "gb200", 64, "70B", None, tensorwise=4_224, mxfp8=3_712, nvfp4=4_864),
    *_rows("MB 26.04.01", "gb300", 64, "70B", None, tensorwise=5_248, mxfp8=4_864, nvfp4=7_296),
    *_rows("TT 2024-12, 500 W", "h100", 8, "8B", TWO_SEQUENCES, bf16=6_667, tensorwise=8_532),
    *_rows("TT 2024-12, 500 W", "h100", 128, "8B", TWO_SEQUENCES, bf16=6_514, tensorwise=8_380),
    *_rows("AO", "h100", 8, "8B", TWO_SEQUENCES, bf16=6_150, tensorwise=7_689),
    *_rows("AO, power-limited", "b200", 8, "8B", ONE_SEQUENCE, bf16=8_307, tensorwise=10_417, mxfp8=9_969),
    *_rows("TT 2025-06", "h100", 256, "70B", WITH_TP, bf16=652, tensorwise=942),
    *_rows("TT 2025-06", "h100", 64, "8B", WITH_TP, bf16=4_378),
    *_rows("TT 2025-06", "h200", 32, "8B", TWO_SEQUENCES, tensorwise=10_938),
    *_rows("TT 2025-06", "h200", 64, "8B", TWO_SEQUENCES, tensorwise=10_753),
    *_rows("TT nvfp4.md, Blackwell not named", "b200", 4, "8B", f"--seq-length 2048 {TWO_SEQUENCES}",
           bf16=21_919, mxfp8=28_084, nvfp4=30_040),
)  # fmt: skip


def groups() -> list[tuple[Published, ...]]:
    """The rows that differ in recipe alone."""
    found: dict[tuple, list[Published]] = {}
    for row in PUBLISHED:
        found.setdefault((row.source, row.gpu, row.num_gpus, row.model), []).append(row)
    return [tuple(rows) for rows in found.values() if len(rows) > 1]


LEFT_OUT = (
    "Left out: DeepSeek-V3, Qwen3-30B-A3B, Nemotron3 Nano and Llama 4 Scout (mixtures of experts), rowwise scaling "
    "(only emulated here), eager mode, and Megatron-LM's table of 1.7B to 462B models in BF16, which has no shapes."
)
