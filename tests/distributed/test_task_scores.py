"""Scores of questions are those of a plain softmax, in every layout, and do not affect training."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_runs import run_forked
from ranks import run_ranks
from small_run import (
    COMMON,
    FP8,
    PLAIN,
    STYLES,
    VIRTUAL,
    build_run,
    fingerprint,
    layers_of,
    small_config,
    train,
    weights,
)
from tolerances import LAYOUT_LOSS

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.data.task_files import encode_pair, load_tasks
from megafp8.metrics.records import VALID, VALID_HIGH_PRECISION, TaskScores
from megafp8.training.evaluation import evaluate
from megafp8.training.language_model import load_language_model
from megafp8.training.task_scores import checkpoint_losses, task_scores

STEP = 2
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-input-jitter-eps 0.1"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
LAYOUTS = [
    pytest.param(2, TENSOR, id="tp2-sp"),
    pytest.param(2, "--pipeline-model-parallel-size 2 --micro-batch-size 2", id="pp2"),
    pytest.param(2, VIRTUAL, id="pp2-virtual2"),
    pytest.param(2, OVERLAP, id="dp2-overlap"),
    pytest.param(2, "--context-parallel-size 2", id="cp2"),
    pytest.param(2, "--num-experts 4 --expert-model-parallel-size 2", id="ep2"),
]
UNCHANGED = [
    pytest.param(1, f"--bf16 {FP8} {DROPOUT}", id="fp8"),
    pytest.param(1, "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4", id="delayed"),
    pytest.param(1, f"{PLAIN} {MIXTURE}", id="mixture"),
    pytest.param(1, f"{PLAIN} --mtp-num-layers 1", id="multi-token"),
    pytest.param(1, f"{PLAIN} --reset-attention-mask", id="documents"),
    pytest.param(2, f"--bf16 {FP8} {DROPOUT} {TENSOR}", id="fp8-tp2-sp"),
    pytest.param(2, f"--bf16 {FP8} {VIRTUAL} {OVERLAP}", id="fp8-virtual-pp2"),
    pytest.param(2, f"--bf16 {FP8} {FSDP}", id="fp8-fsdp2"),
]


def number_text(numbers: np.ndarray) -> str:
    return "".join(f" {number}" for number in numbers)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of several lengths for a tokenizer of numbers, of which one is longer than a sequence."""
    random, lines = np.random.default_rng(0), []
    for length in (1, 3, 4, 9, 20, 40, 0, 6, 2):
        choices = [number_text(random.integers(0, 255, size)) for size in random.integers(1, 6, 3)]
        context = number_text(random.integers(0, 255, length)).strip()
        lines.append({"context": context, "choices": choices, "answer": int(random.integers(3))})
    lines.append({"context": "1 2 3", "target": " 4 5 6"})
    path = tmp_path_factory.mktemp("tasks") / "numbers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def with_tasks(flags: str, path: Path, world_size: int = 1) -> RunConfig:
    return small_config("llama", f"{flags} --lr 1e-2 --eval-tasks {path}", world_size)


def scores_after(config: RunConfig, folder: Path | None = None) -> TaskScores:
    """Train, save, and score."""
    run = build_run(config)
    train(run, STEP)
    if folder is not None:
        save_checkpoint(folder, run.config, run.training_state, Progress(STEP, STEP * run.global_batch_size))
    record = evaluate(run, VALID, run.datasets[1], STEP, 0)
    assert record.tasks is not None
    return record.tasks["numbers"]


def assert_close(ours: TaskScores, others: TaskScores) -> None:
    assert ours.bits_per_byte == pytest.approx(others.bits_per_byte, abs=LAYOUT_LOSS, rel=0)
    assert dataclasses.replace(ours, bits_per_byte=0.0) == dataclasses.replace(others, bits_per_byte=0.0)


def test_scores_are_those_of_a_plain_softmax(path: Path, tmp_path: Path) -> None:
    """One choice at a time, without padding; in a batch, and in training."""
    (trained,) = run_ranks(1, scores_after, with_tasks(PLAIN, path), tmp_path)

    def compared() -> TaskScores:
        model = load_language_model(tmp_path, uses_cache=False)
        (task,) = load_tasks([path], model.tokenizer, model.context_tokens)
        num_right = num_right_normalized = 0
        nats, num_bytes, expected = 0.0, 0, []
        for question in task.questions:
            log_likelihoods = []
            for choice in question.choices:
                context, scored = encode_pair(model.tokenizer, question.context, choice)
                ids = torch.tensor([*context, *scored][-33:])
                with torch.no_grad():
                    logits = model.module(ids[None, :-1], torch.arange(len(ids) - 1)[None], None)[0].double()
                chosen = logits.log_softmax(-1).gather(1, ids[1:, None])[-len(scored) :]
                log_likelihoods.append(float(chosen.sum()))
            expected += log_likelihoods
            sizes = [len(choice) for choice in question.choices]
            nats -= log_likelihoods[question.answer]
            num_bytes += sizes[question.answer]
            if len(sizes) > 1:
                num_right += np.argmax(log_likelihoods) == question.answer
                num_right_normalized += np.argmax(np.array(log_likelihoods) / sizes) == question.answer
        losses = checkpoint_losses(model, task.rows, batch_size=4)
        assert -losses == pytest.approx(expected, abs=1e-4)
        assert_close(
            task_scores(task, losses),
            TaskScores(
                num_questions=10,
                bits_per_byte=nats / num_bytes / math.log(2),
                accuracy=num_right / 9,
                normalized_accuracy=num_right_normalized / 9,
                num_truncated=1,
            ),
        )
        return task_scores(task, losses)

    assert_close(trained, run_ranks(1, compared)[0])


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS)
def test_every_layout_gives_the_same_scores(world_size: int, flags: str, path: Path) -> None:
    same_model = " ".join([layers_of(flags), "--num-experts 4" if "experts" in flags else ""])
    (expected,) = run_ranks(1, scores_after, with_tasks(f"{PLAIN} {same_model}", path))
    for scores in run_ranks(world_size, scores_after, with_tasks(f"{PLAIN} {flags}", path, world_size)):
        assert_close(scores, expected)


@pytest.mark.parametrize(("world_size", "flags"), UNCHANGED)
def test_scores_do_not_change_training(world_size: int, flags: str, path: Path) -> None:
    """Bitwise: random generators, amax histories, pending gathers, weight codes and the loss of the validation."""

    def steps(flags: str) -> tuple[list[float], str]:
        run = build_run(small_config("llama", flags, world_size))
        losses = train(run, STEP).losses
        record = evaluate(run, VALID, run.datasets[1], STEP, 0)
        assert (record.tasks is not None) == bool(run.tasks)
        losses += [record.loss, *train(run, 2, STEP + 1).losses]
        mine = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in weights(run).items()}
        return losses, fingerprint(mine)

    assert run_ranks(world_size, steps, f"{flags} --eval-tasks {path}") == run_ranks(world_size, steps, flags)


def test_a_validation_in_high_precision_scores_without_quantization(path: Path) -> None:
    def twice(config: RunConfig) -> list[TaskScores]:
        run = build_run(config)
        splits = (VALID, VALID_HIGH_PRECISION)
        return [evaluate(run, split, run.datasets[1], 0, 0).tasks["numbers"] for split in splits]

    ((own, high),) = run_ranks(1, twice, with_tasks(FP8, path))
    ((plain, _),) = run_ranks(1, twice, with_tasks(PLAIN, path))
    assert own != high == plain


# ---- the command ---------------------------------------------------------------------------------------------------

LENGTH = "--train-iters 4 --lr-decay-iters 4 --lr-warmup-iters 1 --eval-interval 2 --no-progress-bar"


def command(folder: Path, *words: object) -> str:
    save = f"--save {folder} --save-interval 2"
    return f"{COMMON} {STYLES['llama']} {PLAIN} {LENGTH} {save} {' '.join(map(str, words))}"


def scores_of(folder: Path) -> list[tuple[int, TaskScores]]:
    return [(record.step, record.tasks["numbers"]) for record in load_run(folder).evals_of(VALID)]


def test_records_of_a_run_and_of_a_resumed_one(path: Path, tmp_path: Path) -> None:
    complete, resumed, without = (tmp_path / name for name in ("complete", "resumed", "without"))
    ended = run_forked(1, command(complete, f"--eval-tasks {path}"))
    assert ended.statuses == (0,), ended.report()
    assert "warning: task numbers: 1 of 10 questions are longer than the context window" in ended.output[0]
    assert " | numbers " in ended.output[0]
    assert " bits/byte | " in ended.output[0]
    for words in ("--exit-interval 2", ""):
        ended = run_forked(1, command(resumed, f"--eval-tasks {path} --load {resumed} {words}"))
        assert ended.statuses == (0,), ended.report()
    assert run_forked(1, command(without)).statuses == (0,)
    assert [step for step, _ in scores_of(complete)] == [2, 4]
    assert scores_of(complete) == scores_of(resumed)
    runs = [load_run(folder) for folder in (complete, resumed, without)]
    losses, *others = [[record.loss for record in run.steps] for run in runs]
    assert all(other == losses for other in others)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, "", "no such file; give a file of JSON lines"),
        ("", "", "has no question"),
        ('{"context": "1", "target": " 2"}\n{"context": "1"}\n', "", "line 2: must have either"),
        ('{"context": "one", "target": " 2"}\n', "", "line 1: NullTokenizer expects token ids"),
        ('{"context": "1", "target": " 2"}\n', "--eval-iters 0", "--eval-tasks"),
    ],
)
def test_a_wrong_file_is_one_error_before_the_first_step(
    content: str | None, words: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "task.jsonl"
    if content is not None:
        path.write_text(content)
    ended = run_forked(1, command(tmp_path / "run", f"--eval-tasks {path} {words}"))
    assert ended.statuses != (0,)
    assert message in ended.output[0]
    assert "Traceback" not in ended.output[0]
    assert "step 1/" not in ended.output[0]
