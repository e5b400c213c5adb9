"""Models with multi-token prediction: their size, what is generated from them, and what is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from saved_run import build_initial, configure, save_initial

from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export
from megafp8.checkpoint.convert.to_megatron import plan_megatron_export
from megafp8.config import model_shapes
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError
from megafp8.resources.memory import parameters_on_stage
from megafp8.training.language_model import load_language_model

LLAMA = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 63 "
    "--make-vocab-size-divisible-by 16 --attention-dropout 0 --hidden-dropout 0"
)
DEPTHS = "--mtp-num-layers 2"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 16"
LATENT = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-layernorm"
STAGES = "--pipeline-model-parallel-size 2"
ROWS = 64


def num_parameters(config: RunConfig) -> int:
    return sum(weight.numel() for chunk in build_initial(config).chunks for weight in chunk.parameters())


@pytest.mark.parametrize("flags", ["", f"{EXPERTS} {LATENT}"])
def test_the_planner_counts_every_parameter(flags: str) -> None:
    one = configure(f"{LLAMA} {DEPTHS} {flags}")
    assert run_ranks(1, num_parameters, one) == [model_shapes.count_parameters(one.model, ROWS).total]
    two = configure(f"{LLAMA} {DEPTHS} {flags} {STAGES}")
    sizes = run_sizes(two, 2, ROWS)
    assert run_ranks(2, num_parameters, two) == [sum(parameters_on_stage(sizes, stage)) for stage in range(2)]


def test_flops_count_layers_and_output_layer_of_each_depth() -> None:
    plain, depths = (configure(f"{LLAMA} {flags}").model for flags in ("", DEPTHS))
    more = model_shapes.count_parameters(depths, ROWS).total - model_shapes.count_parameters(plain, ROWS).total
    difference = model_shapes.flops_per_token(depths, ROWS, 32) - model_shapes.flops_per_token(plain, ROWS, 32)
    assert difference == 6 * (more + 2 * ROWS * 32) + 6 * 2 * 32 * 32


def next_logits(folder: Path) -> tuple[list[float], list[str]]:
    model = load_language_model(folder)
    names = [name for name, _ in model.module.named_parameters() if "mtp" in name]
    return model.next_logits([1, 2, 3], model.build_cache()).tolist(), names


def test_generation_uses_the_main_output(tmp_path: Path) -> None:
    """Initial weights do not depend on multi-token prediction."""
    logits = []
    for name, flags in (("plain", ""), ("depths", DEPTHS)):
        save_initial(tmp_path / name, configure(f"{LLAMA} {flags}"))
        (found,) = run_ranks(1, next_logits, tmp_path / name)
        assert not found[1]
        logits.append(found[0])
    assert logits[0] == logits[1]


def test_export_leaves_it_out_only_by_choice(tmp_path: Path) -> None:
    save_initial(tmp_path, configure(f"{LLAMA} {DEPTHS}"))
    with pytest.raises(CheckpointError, match=r"--mtp-num-layers 2.* --drop-mtp-layers"):
        plan_export(tmp_path, ExportOptions())
    export = plan_export(tmp_path, ExportOptions(drops_mtp=True))
    assert export.fields["num_hidden_layers"] == 2 and "2 layers of multi-token prediction" in " ".join(export.notes)
    with pytest.raises(CheckpointError, match="--mtp-num-layers 2: not converted to Megatron-LM"):
        plan_megatron_export(tmp_path, None)
