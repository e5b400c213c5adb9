"""The mean of checkpoints: to the bit, over layouts, of all that a checkpoint holds, and what is refused."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from saved_run import configure
from small_run import build_run, small_config, train

from megafp8.checkpoint import merge, writer
from megafp8.checkpoint.directory import checkpoint_path, complete_steps, list_steps
from megafp8.checkpoint.fingerprint import fingerprint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.manifest import MANIFEST, find_damage, read_manifest
from megafp8.checkpoint.merge import METHODS, coefficients, plan_merge
from megafp8.checkpoint.metadata import load_common_state
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.standalone import CheckpointTensors, LazyTensor, save_weights
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError

MIXTURE = (
    "--bf16 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 2"
)
# Two layouts of each model: with and without flat shards of the optimizer, and other ranks that hold the weights.
RUNS = {
    "dense": [("--bf16", 1), ("--bf16 --tensor-model-parallel-size 2 --use-distributed-optimizer", 4)],
    "mixture": [(MIXTURE, 1), (f"{MIXTURE} --expert-model-parallel-size 2 --use-distributed-optimizer", 2)],
}
STEPS = (2, 4)


def run_to(folder: Path, config: RunConfig, first: int, last: int) -> None:
    """Train from a checkpoint to another."""
    run = build_run(config)
    if first:
        load_checkpoint(checkpoint_path(folder, first), config, run.training_state)
    train(run, last - first, first + 1)
    save_checkpoint(folder, config, run.training_state, Progress(last, last * run.global_batch_size))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """The checkpoints of steps 2 and 4 of a run that changes its layout in between. Tests must not write to them."""
    made: dict[str, list[Path]] = {}

    def get(model: str) -> list[Path]:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            for (words, world_size), first, last in zip(RUNS[model], (0, *STEPS), STEPS, strict=False):
                run_ranks(world_size, run_to, folder, small_config("llama", words, world_size), first, last)
            made[model] = [checkpoint_path(folder, step) for step in STEPS]
        return made[model]

    return get


def fp64_mean(paths: list[Path], name: str, parts: tuple[float, ...]) -> torch.Tensor:
    """From complete tensors."""
    total = torch.zeros((), dtype=torch.float64)
    for path, part in zip(paths, parts, strict=True):
        tensors = CheckpointTensors(path)
        masters = (f"optimizer.state.{kind}.{name}" for kind in ("param", "fp32_param"))
        best = next((each for each in masters if each in tensors.locations), name)
        assert (best != name) == (not name.endswith("expert_bias"))
        total = total + tensors.load(best).double() * part
    return total.float()


@pytest.mark.parametrize("model", RUNS)
def test_mean_of_two_layouts_is_the_fp64_mean_rounded_once(
    model: str, saved: Callable[[str], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "BLOCK_ELEMENTS", 1000)  # several blocks of a matrix, and ends within a rank's part
    paths = saved(model)
    path = plan_merge(paths[::-1], "linear").write(tmp_path / "run")
    assert find_damage(path) == [] and path.name == "iter_0000004"
    merged, newest = CheckpointTensors(path), CheckpointTensors(paths[1])
    weights = [name for name in merged.locations if ".quantizer_state." not in name]
    assert weights == [
        name for name in newest.locations if not (name.startswith("optimizer.") or ".quantizer_state." in name)
    ]
    for name in weights:
        assert torch.equal(merged.load(name), fp64_mean(paths, name, (1 / 3, 2 / 3))), name
    # All of them moved between the checkpoints: none is the mean by accident.
    biases = [name for name in weights if name.endswith("expert_bias")]
    assert bool(biases) == (model == "mixture")
    assert not any(torch.equal(merged.load(name), newest.load(name)) for name in biases)
    assert {location.key for location in merged.locations.values()} <= {
        location.key for location in newest.locations.values()
    }
    hashes, of_newest = fingerprint(path), fingerprint(paths[1])
    assert hashes["scales"] == of_newest["scales"]  # delayed scaling goes on from the newest
    assert any(".quantizer_state." in name for name in merged.locations) == (model == "mixture")
    common = load_common_state(path)
    assert (common["step"], common["consumed_samples"]) == (4, 32)
    assert not {"optimizer", "schedule", "num_threads"} & set(common)
    assert not [name for name in merged.objects if name.startswith("random_state")]


@pytest.mark.parametrize("model", RUNS)
def test_a_run_starts_from_the_mean(model: str, saved: Callable[[str], list[Path]], tmp_path: Path) -> None:
    """In both layouts; for --no-load-optim and --finetune. The weights are the mean, rounded."""
    path = plan_merge(saved(model)).write(tmp_path / "run")
    norm = "decoder.final_layernorm.weight"
    expected = CheckpointTensors(path).load(norm).bfloat16()
    for words, world_size in RUNS[model]:
        config = small_config("llama", f"{words} --no-load-optim", world_size)

        def start(config: RunConfig = config, finetunes: bool = False) -> tuple[int, bool, float]:
            run = build_run(config)
            progress = load_checkpoint(path, config, run.training_state, weights_only=finetunes).progress
            loaded = dict(run.training_state.chunks[0].named_parameters())
            is_mean = next(torch.equal(value, expected) for name, value in loaded.items() if name.endswith(norm))
            return progress.step, is_mean, train(run, 1, progress.step + 1).losses[0]

        for finetunes, step in ((False, 4), (True, 0)):
            for result in run_ranks(world_size, start, config, finetunes):
                assert result[:2] == (step, True) and math.isfinite(result[2])
    config = small_config("llama", RUNS[model][0][0])

    def resume() -> None:
        load_checkpoint(path, config, build_run(config).training_state)

    with pytest.raises(AssertionError, match="saved with --no-save-optim; use --no-load-optim or --finetune"):
        run_ranks(1, resume)


def test_weights_are_averaged_where_there_are_no_main_weights(tmp_path: Path) -> None:
    plan = plan_merge([tensors_saved(tmp_path / f"{number}", number) for number in (1, 2)])
    path = plan.write(tmp_path / "run")
    assert torch.equal(CheckpointTensors(path).load(NORM), torch.full((4,), 1.5))
    assert [source["averaged"] for source in plan.provenance()["sources"]] == ["weights in bfloat16"] * 2
    assert read_manifest(path).merged == plan.provenance()


def test_a_merged_checkpoint_can_be_merged(tmp_path: Path) -> None:
    paths = [tensors_saved(tmp_path / f"{number}", number) for number in (1, 2, 3)]
    pair = plan_merge(paths[:2]).write(tmp_path / "pair")
    path = plan_merge([pair, paths[2]]).write(tmp_path / "run")
    assert torch.equal(CheckpointTensors(path).load(NORM), torch.full((4,), 2.25))


# ---- coefficients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [2, 3, 10, 1000])
def test_coefficients_have_sum_one(method: str, number: int) -> None:
    parts = coefficients(method, number)
    assert len(parts) == number and min(parts) >= 0
    assert abs(math.fsum(parts) - 1) <= 2**-52


def test_coefficients_of_three_checkpoints() -> None:
    assert coefficients("uniform", 3) == (1 / 3, 1 / 3, 1 / 3)
    assert coefficients("linear", 3) == (1 / 6, 2 / 6, 3 / 6)
    total = 0.25 + 0.5 + 1
    assert coefficients("ema", 3, 0.5) == (0.25 / total, 0.5 / total, 1 / total)


def test_a_square_root_decay_of_the_rate_gives_the_same_weights() -> None:
    """Updates between checkpoints, each with the rate that the decay has then."""
    number, updates = 5, [3.0, -1.0, 2.0, 0.5]
    checkpoints = [sum(updates[:count]) for count in range(number)]
    decayed = sum(update * (1 - math.sqrt(index / number)) for index, update in enumerate(updates, start=1))
    parts = coefficients("1-sqrt", number)
    assert math.isclose(sum(part * value for part, value in zip(parts, checkpoints, strict=True)), decayed)


# ---- refusals and kills ------------------------------------------------------------------------------------------

NORM = "decoder.final_layernorm.weight"
SMALL = "--num-layers 1 --hidden-size 4 --num-attention-heads 1 --vocab-size 7 --bf16"


def tensors_saved(folder: Path, value: float, words: str = "", **others: tuple[int, ...]) -> Path:
    """A checkpoint of a few tensors of one value."""
    shapes = {"embedding.word_embeddings.weight": (8, 4), NORM: (4,)}
    shapes |= {name.replace("__", "."): shape for name, shape in others.items()}
    make = partial(torch.full, dtype=torch.bfloat16)
    sources = {name: LazyTensor(shape, torch.bfloat16, partial(make, shape, value)) for name, shape in shapes.items()}
    return save_weights(folder, configure(f"{SMALL} {words}"), sources)


@pytest.mark.parametrize(
    ("value", "words", "others", "text"),
    [
        (1, "--num-query-groups 1 --group-query-attention --swiglu", {}, "model.swiglu: true -> false"),
        (1, "", {"decoder__router__novel_state": (3,)}, "cannot merge: decoder.router.novel_state"),
        (1, "", {"output_layer__weight": (8, 4)}, "output_layer.weight is not in the other"),
        (1, "", {"decoder__mlp__shared_experts__gate_weight": (4,)}, "gate_weight is not in the other"),
        (1, "", {"embedding__word_embeddings__weight": (16, 4)}, r"embeddings.weight is \[16, 4\] instead of \[8, 4\]"),
        (math.nan, "", {}, "embedding.word_embeddings.weight has values that are NaN"),
    ],
)
def test_other_models_and_unknown_parts_are_refused(
    value: float, words: str, others: dict[str, tuple[int, ...]], text: str, tmp_path: Path
) -> None:
    other, newest = tensors_saved(tmp_path / "a", value, words, **others), tensors_saved(tmp_path / "b", 1)
    with pytest.raises(CheckpointError, match=text):
        plan_merge([other, newest]).write(tmp_path / "run")
    assert list_steps(tmp_path / "run") == []


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    paths = [tensors_saved(tmp_path / f"{number}", number) for number in (1, 2)]
    (file,) = paths[0].glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"distcp is damaged: SHA-256"):
        plan_merge(paths)
    (paths[1] / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        plan_merge(paths[1:] * 2)


def test_an_unknown_plain_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tensors_saved(tmp_path / f"{number}", number) for number in (1, 2)]
    monkeypatch.setattr(merge, "KEPT", tuple(name for name in merge.KEPT if name != "origin"))
    with pytest.raises(CheckpointError, match="cannot merge: origin"):
        plan_merge(paths)


def test_a_kill_leaves_no_checkpoint(tmp_path: Path) -> None:
    plan = plan_merge([tensors_saved(tmp_path / f"{number}", number) for number in (1, 2)])
    folder, calls = tmp_path / "run", []

    def end_at_second(num_bytes: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=plan.write, args=(folder, end_at_second))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == ["iter_0000000.unfinished"] and complete_steps(folder) == []
    assert find_damage(plan.write(folder)) == []


def test_memory_holds_no_complete_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor of 384 MiB in blocks of 8. What waits for its hash is bounded apart from that."""
    shape, most = (3 << 13, 1 << 12), 256 << 20
    small = [tensors_saved(tmp_path / f"small{number}", number) for number in (1, 2)]

    name = "embedding.word_embeddings.weight"
    source = LazyTensor(shape, torch.float32, lambda: torch.full(shape, 1.5))
    save_weights(tmp_path / "1", configure(SMALL), {name: source})
    shutil.copytree(tmp_path / "1", tmp_path / "2", copy_function=os.link)
    monkeypatch.setattr(writer, "MAX_LAG_BYTES", 1 << 24)
    monkeypatch.setattr(merge, "BLOCK_ELEMENTS", 1 << 21)

    def peak() -> int:
        # glibc would keep freed blocks of this size, more or fewer of them by chance: M_MMAP_THRESHOLD is -3.
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
        plan_merge(small).write(tmp_path / "small")  # imports, and pages of libraries that a forked process lacks
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        plan_merge([checkpoint_path(tmp_path / f"{number}", 0) for number in (1, 2)]).write(tmp_path / "run")
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10

    (num_bytes,) = run_ranks(1, peak)
    assert num_bytes < most < 4 * math.prod(shape)
    values = CheckpointTensors(checkpoint_path(tmp_path / "run", 0)).load(name)
    assert values.min() == values.max() == 1.5
