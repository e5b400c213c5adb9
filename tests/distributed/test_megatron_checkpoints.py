"""Training continues bitwise from a checkpoint of Megatron-LM, and Megatron-LM's load reads what was exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from megatron_checkpoints import arguments, load_as_megatron, save_as_megatron
from ranks import RankFailed, run_ranks
from small_run import PLAIN, VIRTUAL, build_run, fingerprint, small_config, train, weights

from megafp8.checkpoint.compatibility import with_explicit_sizes
from megafp8.checkpoint.convert.from_megatron import plan_megatron_import
from megafp8.checkpoint.convert.to_megatron import plan_megatron_export
from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.megatron_lm import COMMON_OBJECT
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.standalone import CheckpointTensors
from megafp8.cli import convert
from megafp8.config import flags, rules
from megafp8.config.settings import diff
from megafp8.errors import CheckpointError
from megafp8.training.resume import resume
from megafp8.training.run import Run

BF16 = f"{PLAIN} --bf16"
DISTRIBUTED = f"{BF16} --use-distributed-optimizer"
TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
STEPS = 2


def two_steps(run: Run, first_step: int) -> tuple[list[float], str]:
    """Losses and the hash of the weights after them."""
    return train(run, STEPS, first_step).losses, fingerprint(weights(run))


@pytest.mark.parametrize(
    ("style", "layout", "kind", "is_stacked"),
    [
        pytest.param("llama", f"{DISTRIBUTED} {TENSOR}", "dp_reshardable", True, id="buckets-tp2"),
        pytest.param(
            "gpt2", f"{DISTRIBUTED} {PIPELINE} --ddp-bucket-size 20000", "dp_reshardable", True, id="buckets-pp2"
        ),
        pytest.param(
            "llama", f"{DISTRIBUTED} {VIRTUAL}", "dp_reshardable", True,
            id="buckets-interleaved",
        ),
        pytest.param("llama", f"{DISTRIBUTED} {TENSOR}", "fully_reshardable", False, id="tensors-by-layer-tp2"),
        pytest.param("gpt2", f"{DISTRIBUTED}", "dp_reshardable", True, id="buckets-dp2"),
        pytest.param(
            "gpt2", f"{PLAIN} {TENSOR} --hidden-dropout 0.1", "fully_reshardable", True, id="fp32-dropout-tp2"
        ),
    ],
)  # fmt: skip
def test_training_continues_after_an_import(
    style: str, layout: str, kind: str, is_stacked: bool, tmp_path: Path
) -> None:
    config = small_config(style, layout, 2)

    def save_and_continue() -> tuple[list[float], str]:
        run = build_run(config)
        train(run, STEPS)
        save_as_megatron(run, tmp_path / "megatron", arguments(config, STEPS), kind, is_stacked)
        return two_steps(run, STEPS + 1)

    def load_and_continue() -> tuple[list[float], str]:
        run, found = build_run(config), find_checkpoint(tmp_path / "run")
        assert found is not None
        loaded = load_checkpoint(found[1], config, run.training_state)
        assert loaded.progress == Progress(STEPS, STEPS * run.global_batch_size) and loaded.notes == ()
        return two_steps(run, STEPS + 1)

    expected = run_ranks(2, save_and_continue)
    plan = plan_megatron_import(tmp_path / "megatron", None)
    assert plan.notes == []
    plan.write(tmp_path / "run", lambda num_bytes: None)
    assert run_ranks(2, load_and_continue) == expected
    written = flags.parse(["--config", str(tmp_path / "run" / "config.json"), "--mock-data"]).config
    assert list(rules.problems(written, 2)) == []
    for section in ("model", "optimizer"):
        explicit = (replace(each, model=with_explicit_sizes(each.model)) for each in (written, config))
        assert [line for line in diff(*explicit) if line.startswith(f"{section}.")] == []


@pytest.mark.parametrize(
    ("style", "layout"),
    [
        pytest.param("llama", f"{DISTRIBUTED} {TENSOR}", id="distributed-optimizer-tp2"),
        pytest.param("gpt2", f"{BF16} {PIPELINE}", id="pp2"),
    ],
)
def test_megatron_loads_an_export(style: str, layout: str, tmp_path: Path) -> None:
    config = small_config(style, layout, 2)

    def save_and_continue() -> tuple[list[float], str]:
        run = build_run(config)
        train(run, STEPS)
        save_checkpoint(tmp_path / "run", config, run.training_state, Progress(STEPS, 16))
        return two_steps(run, STEPS + 1)

    def load_and_continue() -> tuple[list[float], str]:
        run, wanted = build_run(config), arguments(config, STEPS)
        state = load_as_megatron(run, tmp_path / "megatron" / "iter_0000002", wanted)
        assert state["checkpoint_version"] == 3.0 and state["iteration"] == STEPS
        ours, theirs = vars(state["args"]), vars(wanted)
        others = {"attention_backend", "transformer_impl", "micro_batch_size"}
        compared = set(ours) & set(theirs) - others
        assert len(compared) > 50
        assert {name: ours[name] for name in compared} == {name: theirs[name] for name in compared}
        return two_steps(run, STEPS + 1)

    expected = run_ranks(2, save_and_continue)
    plan_megatron_export(tmp_path / "run", None).write(tmp_path / "megatron", lambda num_bytes: None)
    assert run_ranks(2, load_and_continue) == expected


def test_an_import_and_its_export_have_the_same_tensors(tmp_path: Path) -> None:
    config = small_config("llama", DISTRIBUTED, 1)

    def save_and_convert() -> None:
        run = build_run(config)
        train(run, 1)
        path = save_as_megatron(run, tmp_path / "a", arguments(config, 1))
        assert convert.main(["from-megatron", str(tmp_path / "a"), str(tmp_path / "none"), "--dry-run"]) == 0
        assert not (tmp_path / "none").exists()
        assert convert.main(["from-megatron", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
        assert convert.main(["to-megatron", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
        assert convert.main(["to-megatron", str(tmp_path / "a"), str(tmp_path / "d")]) == 74
        before, after = CheckpointTensors(path), CheckpointTensors(tmp_path / "c" / path.name)
        assert set(before.locations) == set(after.locations)
        assert all(before.load(name).equal(after.load(name)) for name in before.locations)
        # megatron-core 0.19 saves the plain values among the objects, and reads them from common.pt, too.
        assert set(before.objects) - {COMMON_OBJECT} <= set(after.objects)

    run_ranks(1, save_and_convert)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = small_config("llama", DISTRIBUTED, 1)

    def save_and_convert() -> None:
        run = build_run(config)
        train(run, 1)
        cases = {
            "moe": ("dp_reshardable", {"num_experts": 8}, "--num-experts 8: there is no such model here"),
            "yarn": ("dp_reshardable", {"position_embedding_type": "yarn"}, "yarn: its settings are"),
            "wide": ("dp_reshardable", {"ffn_hidden_size": 192}, r"\(256, 64\), and by the arguments \(384, 64\)"),
            "bias": ("dp_reshardable", {"add_bias_linear": True}, "linear_proj.bias is missing"),
            "heads": ("dp_reshardable", {"qk_layernorm": False}, "q_layernorm.weight is not part of a dense GPT"),
            "order": ("dp_reshardable", {"transformer_impl": "transformer_engine"}, "--no-load-optim imports the"),
            "old": ("dp_zero_gather_scatter", {}, "--dist-ckpt-optim-fully-reshardable"),
            "sizes": ("dp_reshardable", {"num_layers": None}, "the argument num_layers is missing"),
            "samples": ("dp_reshardable", {"consumed_train_samples": -5}, "consumed_train_samples is -5, and has"),
            "ranks": ("dp_reshardable", {"data_parallel_size": 10**8}, "more than 131,072 ranks"),
            "stages": ("dp_reshardable", {"pipeline_model_parallel_size": 2}, "of 1 model chunks, not 2"),
            "muon": ("dp_reshardable", {"optimizer": "muon"}, "the state of Megatron-LM's --optimizer muon"),
            "epsilon": ("dp_reshardable", {"norm_epsilon": -1.0}, "--norm-epsilon -1"),
            "dropout": ("dp_reshardable", {"attention_dropout": 1e308}, r"--attention-dropout 1e\+308"),
        }  # fmt: skip
        for name, (kind, changes, message) in cases.items():
            path = save_as_megatron(run, tmp_path / name, arguments(config, 1, **changes), kind)
            with pytest.raises(CheckpointError, match=message):
                plan_megatron_import(path, None).write(tmp_path / f"{name}-run", lambda num_bytes: None)
        plan = plan_megatron_import(tmp_path / "old", None, with_optimizer=False)
        assert "weights only" in plan.notes[0]
        plan.write(tmp_path / "weights", lambda num_bytes: None)
        given = arguments(config, 1, recompute_granularity="full", rope_fusion=True, log_path=None)
        save_as_megatron(run, tmp_path / "others", given)
        assert plan_megatron_import(tmp_path / "others", None).notes == ["not read: recompute_granularity = full"]
        # A run may have another layout, batch and data than these.
        given = arguments(config, 1, context_parallel_size=3, decoder_first_pipeline_num_layers=1,
                          tokenizer_type="GPT2BPETokenizer", vocab_size=None, train_iters=None)  # fmt: skip
        save_as_megatron(run, tmp_path / "layout", given)
        plan_megatron_import(tmp_path / "layout", None, with_optimizer=False)
        given = arguments(config, 1)
        del given.consumed_train_samples
        save_as_megatron(run, tmp_path / "uncounted", given)
        plan = plan_megatron_import(tmp_path / "uncounted", None)
        assert plan.common["consumed_samples"] == 0
        assert plan.notes[0].startswith("it does not say how many samples its run had read (consumed_train_samples)")

    run_ranks(1, save_and_convert)


def test_the_state_of_muon_is_not_exported(tmp_path: Path) -> None:
    config = small_config("llama", f"{PLAIN} --optimizer muon --muon-nesterov")

    def save_and_export() -> bool:
        run = build_run(config)
        train(run, 1)
        save_checkpoint(tmp_path, config, run.training_state, Progress(1, 8))
        with pytest.raises(CheckpointError, match="the state of --optimizer muon"):
            plan_megatron_export(tmp_path, None)
        args = plan_megatron_export(tmp_path, None, with_optimizer=False).common["args"]
        return args.optimizer == "muon" and args.muon_nesterov and args.muon_split_qkv

    assert run_ranks(1, save_and_export) == [True]


def test_a_run_does_not_load_the_folder_itself(tmp_path: Path) -> None:
    """And renames nothing in it, although it is also the folder that the run saves to."""
    config = small_config("llama", f"{DISTRIBUTED} --load {tmp_path} --save {tmp_path}", 1)

    def save_and_resume() -> None:
        run = build_run(config)
        train(run, 1)
        path = save_as_megatron(run, tmp_path, arguments(config, 1))
        try:
            resume(run)
        finally:
            assert path.exists()

    with pytest.raises(RankFailed) as failed:
        run_ranks(1, save_and_resume)
    assert "megafp8 convert from-megatron" in str(failed.value.__cause__)
