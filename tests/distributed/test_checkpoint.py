"""A resumed run equals the unbroken run: bitwise in the same layout, up to rounding in another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from ranks import RankFailed, run_ranks
from small_run import (
    FOUR_LAYERS,
    FP8,
    PLAIN,
    VIRTUAL,
    Curve,
    build_run,
    curve_of,
    fingerprint,
    layers_of,
    small_config,
    train,
    weights,
)
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.manifest import MANIFEST
from megafp8.checkpoint.metadata import read_config
from megafp8.checkpoint.optimizer_state import MOMENTS, local_state
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.state_dict import EMBEDDING, OUTPUT_LAYER, chained_optimizers, model_state, rng_state
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError
from megafp8.optimizer.schedules import current_learning_rate
from megafp8.training.run import Run

STEPS = 2
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
CONTEXT_OF_FOUR = f"{FOUR_LAYERS} --context-parallel-size 2"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
BF16_FP8 = f"--bf16 {FP8}"


@dataclass(frozen=True)
class Leg:
    """What a rank recorded in some steps, and its weights afterwards."""

    curve: Curve
    weights: str


def run_leg(config: RunConfig, num_steps: int, load: Optional[Path], save: Optional[Path]) -> Leg:
    """Load, train, save: one start of a run."""
    run, progress = build_run(config), Progress()
    if load is not None:
        progress = load_newest(run, load)
    curve = train(run, num_steps, progress.step + 1)
    if save is not None:
        step = progress.step + num_steps
        path = save_checkpoint(save, config, run.training_state, Progress(step, step * run.global_batch_size))
        assert find_checkpoint(save) == (step, path), "every rank finds it when save returns"
    return Leg(curve, fingerprint(weights(run)))


def save_between(config: RunConfig, folder: Path) -> Leg:
    """An unbroken run that saves after half of its steps."""
    run = build_run(config)
    before = train(run, STEPS)
    save_checkpoint(folder, config, run.training_state, Progress(STEPS, STEPS * run.global_batch_size))
    after = train(run, STEPS, STEPS + 1)
    curve = Curve(before.losses + after.losses, before.grad_norms + after.grad_norms)
    return Leg(curve, fingerprint(weights(run)))


def load_newest(run: Run, folder: Path, weights_only: bool = False) -> Progress:
    found = find_checkpoint(folder)
    assert found is not None
    loaded = load_checkpoint(found[1], run.config, run.training_state, weights_only)
    assert weights_only or loaded.progress == Progress(found[0], found[0] * run.global_batch_size)
    return loaded.progress


@pytest.mark.parametrize(
    ("style", "world_size", "flags"),
    [
        pytest.param("llama", 1, PLAIN, id="llama-fp32"),
        pytest.param("gpt2", 1, f"--bf16 {DROPOUT}", id="gpt2-bf16-dropout"),
        pytest.param("llama", 1, f"{BF16_FP8} {DISTRIBUTED}", id="llama-bf16-fp8-distributed-optimizer"),
        pytest.param("gpt2", 1, f"{FP8} {DROPOUT}", id="gpt2-fp8-dropout"),
        pytest.param("llama", 2, f"{PLAIN} {TENSOR} {DROPOUT}", id="llama-fp32-tp2-sp-dropout"),
        pytest.param("llama", 2, f"{BF16_FP8} {TENSOR}", id="llama-bf16-fp8-tp2-sp"),
        pytest.param("gpt2", 2, f"{PLAIN} {OVERLAP} {DROPOUT}", id="gpt2-fp32-dp2-overlap-dropout"),
        pytest.param("llama", 2, f"{BF16_FP8} {OVERLAP}", id="llama-bf16-fp8-dp2-overlap"),
        pytest.param("gpt2", 2, f"--bf16 {VIRTUAL}", id="gpt2-bf16-pp2-virtual2"),
        pytest.param("gpt2", 1, "--fp16 --initial-loss-scale 256", id="gpt2-fp16"),
        pytest.param("gpt2", 1, f"{PLAIN} --optimizer sgd", id="gpt2-sgd"),
        pytest.param("gpt2", 1, "--bf16 --optimizer sgd", id="gpt2-bf16-sgd"),
        pytest.param("llama", 1, f"{PLAIN} --optimizer muon", id="llama-muon"),
        pytest.param("gpt2", 1, "--optimizer muon --fp16 --initial-loss-scale 256", id="gpt2-fp16-muon"),
        pytest.param("llama", 2, f"--optimizer muon {BF16_FP8} {TENSOR}", id="llama-bf16-fp8-tp2-sp-muon"),
        pytest.param("gpt2", 2, f"--optimizer muon {BF16_FP8} {DISTRIBUTED} {DROPOUT}", id="gpt2-bf16-fp8-dp2-muon"),
    ],
)
def test_resume_is_bit_equal(style: str, world_size: int, flags: str, tmp_path: Path) -> None:
    config = small_config(style, flags, world_size)
    unbroken = run_ranks(world_size, save_between, config, tmp_path)
    resumed = run_ranks(world_size, run_leg, config, STEPS, tmp_path, None)
    for whole, after in zip(unbroken, resumed, strict=True):
        assert after.curve.losses == whole.curve.losses[STEPS:]
        assert after.curve.grad_norms == whole.curve.grad_norms[STEPS:]
        assert after.weights == whole.weights


def test_saving_does_not_change_training(tmp_path: Path) -> None:
    """Training continues after a save as if there had been none."""
    config = small_config("llama", f"--bf16 {OVERLAP} {DROPOUT}", 2)

    assert run_ranks(2, save_between, config, tmp_path) == run_ranks(2, run_leg, config, 2 * STEPS, None, None)


def generators() -> dict[str, torch.Tensor]:
    state = rng_state()
    return {"cpu": state["cpu"], "device": state["device"], **state["tracker"]}


# The size in bytes of a CUDA generator's state. A CPU's has 5056.
OF_CUDA = 16


@pytest.mark.parametrize(
    ("flags", "drawn"),
    [
        pytest.param(f"{PLAIN} {DROPOUT}", "dropout", id="dropout"),
        pytest.param("--bf16 --fp4-format e2m1", "stochastic rounding", id="nvfp4"),
        pytest.param("--bf16 --fp4-format e2m1 --no-fp4-stochastic-rounding", "", id="nothing"),
    ],
)
def test_generators_of_another_device_type_are_not_loaded(flags: str, drawn: str, tmp_path: Path) -> None:
    """The run keeps the generators that it seeded, and reports what draws from them. The CPU's own are loaded."""
    config = small_config("llama", flags)

    def save(folder: Path, num_bytes: Optional[int] = None) -> Path:
        run = build_run(config)
        torch.randn(1)
        if num_bytes is not None:
            tracker, state = tensor_parallel.get_cuda_rng_tracker(), torch.zeros(num_bytes, dtype=torch.uint8)
            tracker.set_states(dict.fromkeys(tracker.get_states(), state))
            torch.cuda.get_rng_state = lambda: state
        return save_checkpoint(folder, config, run.training_state, Progress(1, run.global_batch_size))

    def load(path: Path) -> tuple[tuple[str, ...], bool]:
        run = build_run(config)
        seeded = fingerprint(generators())
        notes = load_checkpoint(path, config, run.training_state).notes
        is_seeded = fingerprint(generators()) == seeded
        train(run, 1, first_step=2)
        return notes, is_seeded

    (on_gpu,), (on_cpu,) = run_ranks(1, save, tmp_path / "gpu", OF_CUDA), run_ranks(1, save, tmp_path / "cpu")
    told = f"different kind of device: random-number state is initialized again, so the random numbers for {drawn}"
    ((notes, is_seeded),) = run_ranks(1, load, on_gpu)
    assert is_seeded and len(notes) == bool(drawn) and all(note.startswith(told) for note in notes)
    assert run_ranks(1, load, on_cpu) == [((), False)]


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(2, TENSOR), (2, PIPELINE), (1, "")], id="tp2-pp2-one"),
        pytest.param([(2, OVERLAP), (2, f"{TENSOR} {DISTRIBUTED}"), (1, DISTRIBUTED)], id="dp2-tp2-one-distributed"),
        pytest.param([(1, FOUR_LAYERS), (2, VIRTUAL), (2, CONTEXT_OF_FOUR)], id="one-virtual-cp2"),
    ],
)
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_resume_in_another_layout_follows_one_rank(style: str, legs: list[tuple[int, str]], tmp_path: Path) -> None:
    """One training over three layouts follows the training on one rank."""
    reference = run_ranks(1, curve_of, small_config(style, f"{PLAIN} {layers_of(legs[0][1])}"), STEPS * len(legs))[0]
    losses, norms = [], []
    for number, (world_size, flags) in enumerate(legs):
        config = small_config(style, f"{PLAIN} {flags}", world_size)
        load = tmp_path if number else None
        curve = run_ranks(world_size, run_leg, config, STEPS, load, tmp_path)[0].curve
        losses, norms = losses + curve.losses, norms + curve.grad_norms
    assert losses == pytest.approx(reference.losses, abs=LAYOUT_LOSS, rel=0)
    assert norms == pytest.approx(reference.grad_norms, rel=LAYOUT_GRAD_NORM[style])


@pytest.mark.parametrize(("before", "after"), [("--bf16", BF16_FP8), (BF16_FP8, "--bf16"), (PLAIN, "--bf16")])
def test_resume_in_another_precision(before: str, after: str, tmp_path: Path) -> None:
    """With the distributed optimizer, weights are loaded in the saved run's format, and then rounded to the next."""
    saved = small_config("llama", f"{before} {DISTRIBUTED}")
    run_ranks(1, run_leg, saved, STEPS, None, tmp_path)

    def load(config: RunConfig) -> dict[str, torch.Tensor]:
        run = build_run(config)
        load_newest(run, tmp_path)
        return weights(run)

    old = run_ranks(1, load, saved)[0]
    new = run_ranks(1, load, small_config("llama", f"{after} {DISTRIBUTED}"))[0]
    assert old.keys() == new.keys()
    for name, weight in new.items():
        assert torch.equal(weight, old[name].to(weight.dtype)), name


# ---- the content of a checkpoint -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig, Leg]:
    """A checkpoint at step 3, its configuration and its last steps. Tests must not write to it."""
    folder, config = tmp_path_factory.mktemp("saved"), small_config("llama", PLAIN)
    return folder, config, run_ranks(1, run_leg, config, STEPS, None, folder)[0]


def test_checkpoint_contains_the_configuration(saved: tuple[Path, RunConfig, Leg]) -> None:
    folder, config, _ = saved
    assert run_ranks(1, lambda: read_config(find_checkpoint(folder)[1]) == config) == [True]


def test_incomplete_checkpoint_is_ignored(saved: tuple[Path, RunConfig, Leg]) -> None:
    folder, config, leg = saved
    half = folder / "iter_0000009"
    half.mkdir()
    (half / "common.pt").write_bytes(b"half")
    try:
        again = run_ranks(1, run_leg, config, 1, folder, None)[0]
    finally:
        (half / "common.pt").unlink()
        half.rmdir()
    assert again.curve.losses[0] < leg.curve.losses[0]


def test_finetune_loads_only_the_weights(saved: tuple[Path, RunConfig, Leg]) -> None:
    """`--finetune` loads the weights of the checkpoint. Everything else is as at the start."""
    folder, config, leg = saved

    def finetune() -> tuple[str, Progress, float, int]:
        run = build_run(config)
        rate = current_learning_rate(run.training_state.optimizer)
        progress = load_newest(run, folder, weights_only=True)
        assert current_learning_rate(run.training_state.optimizer) == rate
        return fingerprint(weights(run)), progress, run.training_state.schedule.num_steps, len(optimizer_moments(run))

    assert run_ranks(1, finetune) == [(leg.weights, Progress(), 0, 0)]


@pytest.mark.parametrize("distributed", ["", DISTRIBUTED], ids=["replicated", "distributed"])
@pytest.mark.parametrize(
    ("flag", "expected"),
    [("--override-opt_param-scheduler", 2e-4), ("--use-checkpoint-opt_param-scheduler", 1e-3)],
    ids=["override", "use-checkpoint"],
)
def test_optimizer_settings_come_from_the_flags(distributed: str, flag: str, expected: float, tmp_path: Path) -> None:
    """A state dictionary also contains the settings of the run that was saved."""
    shape = f"{PLAIN} {distributed} --lr-decay-style constant --lr-warmup-iters 0"
    run_ranks(1, run_leg, small_config("llama", f"{shape} --lr 1e-3"), 1, None, tmp_path)
    flags = f"{shape} --lr 2e-4 --adam-beta1 0.5 --adam-beta2 0.25 --adam-eps 1e-3 --load {tmp_path} {flag}"

    def load() -> list[tuple[float, tuple[float, float], float]]:
        run = build_run(small_config("llama", flags))
        load_newest(run, tmp_path)
        return [(group["lr"], group["betas"], group["eps"]) for group in run.training_state.optimizer.param_groups]

    assert set(run_ranks(1, load)[0]) == {(expected, (0.5, 0.25), 1e-3)}


def test_a_saved_schedule_shorter_than_the_run_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(1, run_leg, small_config("llama", f"{PLAIN} --lr-decay-iters 4 --min-lr 1e-5"), 1, None, tmp_path)
    flag = f"{PLAIN} --min-lr 1e-5 --load {tmp_path} --use-checkpoint-opt_param-scheduler"

    def load(extra: str) -> None:
        load_newest(build_run(small_config("llama", f"{flag} {extra}")), tmp_path)

    run_ranks(1, load, "--lr-decay-iters 4")
    assert "notice" not in capfd.readouterr().out
    run_ranks(1, load, "--lr-decay-iters 9")
    assert "after the end of the checkpoint's schedule the learning rate is 1e-05" in capfd.readouterr().out


def optimizer_moments(run: Run) -> list[torch.Tensor]:
    """Adam's nonzero moments."""
    states = run.training_state.optimizer.optimizer.state.values()
    return [moment for state in states for moment in (state["exp_avg"], state["exp_avg_sq"]) if moment.any()]


@pytest.mark.parametrize("flags", ["--bf16", f"--bf16 {DISTRIBUTED}"])
def test_master_weights_are_set_from_loaded_weights(flags: str, tmp_path: Path) -> None:
    """Otherwise the first update would restore the untrained model."""
    config = small_config("llama", f"{flags} --lr-warmup-iters 0 --lr 1e-5")
    leg = run_ranks(1, run_leg, config, STEPS, None, tmp_path)[0]

    def finetune() -> tuple[str, float]:
        run = build_run(config)
        fresh = fingerprint(weights(run))
        load_newest(run, tmp_path, weights_only=True)
        loaded = weights(run)
        assert fresh != fingerprint(loaded) == leg.weights
        train(run, 1)
        moved = [(after.float() - loaded[name].float()).abs().max() for name, after in weights(run).items()]
        return float(max(moved))

    # One step of 1e-5, and weights near 1 that round to BF16's next number.
    assert run_ranks(1, finetune)[0] <= 2.0**-7


# ---- a vocabulary with other padding, and damage --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "flags"),
    [
        pytest.param("llama", PLAIN, id="fp32"),
        pytest.param("gpt2", "--bf16", id="bf16-tied"),
        pytest.param("llama", f"--bf16 {DISTRIBUTED}", id="bf16-distributed"),
        pytest.param("gpt2", f"{PLAIN} {DISTRIBUTED}", id="fp32-tied-distributed"),
    ],
)
def test_new_vocabulary_padding_rows_start_as_the_mean(style: str, flags: str, tmp_path: Path) -> None:
    """300 rows become 400. The second rank has the last 100. Zeros would take part in the softmax."""
    flags += " --make-vocab-size-divisible-by 100"
    run_ranks(1, run_leg, small_config(style, flags), STEPS, None, tmp_path)
    config = small_config(style, f"{flags} {TENSOR}", 2)

    def resume() -> None:
        run = build_run(config)
        load_newest(run, tmp_path)
        (model,) = model_state(run.training_state.chunks).values()
        tables = [leaf.data for leaf in nested_values(model) if getattr(leaf, "key", "") in (EMBEDDING, OUTPUT_LAYER)]
        assert len({*map(id, tables)}) == (1 if style == "gpt2" else 2)
        new_row = 100 if dist.get_rank() else 200
        for table in tables:
            total = table[:new_row].float().sum(0)
            dist.all_reduce(total)
            mean = (total / 300).to(table.dtype).expand(200 - new_row, -1)
            torch.testing.assert_close(table[new_row:].detach(), mean, rtol=2**-7, atol=1e-6)
            stored = stored_state(run, table)
            assert all(not stored[name].view(200, -1)[new_row:].any() for name in MOMENTS)
            assert torch.equal(stored["param"].view(200, -1)[new_row:], table[new_row:].float())
        before = [table.detach().float().clone() for table in tables]
        train(run, 1, STEPS + 1)
        for table, old in zip(tables, before, strict=True):
            torch.testing.assert_close(table.detach().float(), old, rtol=2**-7, atol=3e-3)  # steps of at most 1e-3

    run_ranks(2, resume)


def stored_state(run: Run, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Master weight and moments."""
    (part,) = chained_optimizers(run.training_state.optimizer)
    if run.config.parallel.use_distributed_optimizer:
        return {name: value.detach() for name, value in local_state(part, parameter).items()}
    master = getattr(parameter, "main_param", None)
    master = parameter if master is None else master
    return {"param": master.detach(), **{name: part.optimizer.state[master][name] for name in MOMENTS}}


@pytest.mark.parametrize("damage", ["truncated", "missing", "config"])
def test_a_damaged_checkpoint_is_an_error(damage: str, tmp_path: Path) -> None:
    config = small_config("llama", PLAIN)
    run_ranks(1, run_leg, config, 1, None, tmp_path)
    path = find_checkpoint(tmp_path)[1]
    shard = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif damage == "missing":
        shard.unlink()
    else:
        (path / "common.pt").write_bytes(b"not a checkpoint")
    assert (path / MANIFEST).exists()

    def load() -> str:
        with pytest.raises(CheckpointError) as caught:
            load_newest(build_run(config), tmp_path)
        return str(caught.value)

    assert "cannot be read as a checkpoint" in run_ranks(1, load)[0]


def test_a_failing_rank_is_named(tmp_path: Path) -> None:
    """The test harness: an exception in a rank reaches the parent with rank and traceback."""

    def fail() -> None:
        if torch.distributed.get_rank() == 1:
            raise CheckpointError(f"{tmp_path} is full")
        torch.distributed.barrier()

    with pytest.raises(RankFailed, match="rank 1 failed") as caught:
        run_ranks(2, fail)
    assert isinstance(caught.value.__cause__, CheckpointError)
