"""A grid becomes runs: their flags, their length, and ids that stay while the grid grows."""

from __future__ import annotations

import math

import pytest

from megafp8.config import flags, iterations, model_shapes
from megafp8.errors import ConfigError
from megafp8.launch.study import expand

SIZES = "size: {s: --hidden-size 32, m: --hidden-size 64}"
RECIPES = "recipe: {bf16: '', fp8: --fp8-format hybrid --fp8-recipe tensorwise}"
GRID = f"grid: {{lr: [1e-3], {SIZES}, {RECIPES}, seed: [1, 2]}}"
TOKENS_PER_STEP = 4 * 32


def ids(study) -> dict[str, str]:
    return {run.id: run.label for run in expand(study)}


def test_every_combination_is_a_run(write_study) -> None:
    runs = expand(write_study(f"tokens: 1000\n{GRID}"))
    assert [run.label for run in runs] == [
        f"lr1e-3-{hidden}-{recipe}-seed{seed}"
        for hidden in "sm" for recipe in ("bf16", "fp8") for seed in (1, 2)
    ]  # fmt: skip
    run = runs[-1]
    assert run.choice == {"lr": "lr1e-3", "size": "m", "recipe": "fp8", "seed": "seed2"}
    assert (run.config.optimizer.lr, run.config.model.hidden_size, run.config.training.seed) == (1e-3, 64, 2)
    assert (run.recipe, runs[0].recipe) == ("tensorwise", "bf16")
    parsed, problems = flags.parse_with_problems(run.flags)
    assert problems == [] and parsed.config == run.config
    assert run.config.checkpoint.save == run.config.checkpoint.load == str(run.folder)


def test_token_budget_is_met_without_an_extra_step(write_study) -> None:
    (run,) = expand(write_study("tokens: 1e3\ngrid: {hidden_size: [32], lr: [1]}"))
    assert run.config.training.train_iters == math.ceil(1000 / TOKENS_PER_STEP)
    assert 1000 <= run.tokens < 1000 + TOKENS_PER_STEP


def test_a_batch_schedule_counts_samples(write_study) -> None:
    """2,000 tokens are 62.5 samples: steps of 4 until sample 20, of 8 until 44, and of 12 until 68."""
    batch = "batch: {r: --global-batch-size 12 --rampup-batch-size 4 4 40}"
    (run,) = expand(write_study(f"tokens: 2000\ngrid: {{hidden_size: [32], lr: [1], {batch}}}"))
    schedule = iterations.batch_schedule(run.config, 1)
    assert run.config.training.train_iters is None
    assert run.config.training.train_samples == 68 == run.tokens / 32
    assert schedule.num_steps(68) == iterations.train_iters(run.config, 1)
    assert schedule.advance(iterations.train_iters(run.config, 1) - 1) * 32 < 2000


def test_tokens_follow_the_parameters(write_study) -> None:
    runs = expand(write_study(f"tokens_per_parameter: 20\n{GRID}"))
    for run in runs:
        parameters = model_shapes.count_parameters(run.config.model, 256).total
        assert run.parameters == parameters
        assert 0 <= run.tokens - 20 * parameters < TOKENS_PER_STEP
        assert run.flops == run.tokens * model_shapes.flops_per_token(run.config.model, 256, 32)


def test_an_option_overrides_the_study(write_study) -> None:
    text = "tokens_per_parameter: 20\ngrid: {hidden_size: [32], lr: [1], n: {a: {tokens: 256}, b: {gpus: 2}}}"
    short, wide = expand(write_study(text))
    assert short.tokens == 256 and short.world_size == 1
    assert wide.world_size == 2 and wide.tokens >= 20 * wide.parameters
    assert wide.config.training.train_iters * 2 <= wide.tokens / TOKENS_PER_STEP + 1


def test_the_number_of_steps_may_be_a_flag(write_study) -> None:
    short, long = expand(write_study("grid: {hidden_size: [32], lr: [1], train_iters: [3, 5]}"))
    assert (short.tokens, long.tokens) == (3 * TOKENS_PER_STEP, 5 * TOKENS_PER_STEP)


# ---- ids ----------------------------------------------------------------------------------------------------------


def test_ids_stay_when_the_grid_grows(write_study) -> None:
    before = ids(write_study(f"tokens: 1000\n{GRID}"))
    longer = ids(write_study(f"tokens: 1000\n{GRID.replace('[1, 2]', '[3, 2, 1]').replace('1e-3', '2e-3, 1e-3')}"))
    assert before.items() <= longer.items() and len(longer) == 3 * len(before)
    another_axis = GRID.replace("grid: {", "grid: {decay: {none: '', some: --weight-decay 0.2}, ")
    assert before.keys() < ids(write_study(f"tokens: 1000\n{another_axis}")).keys()


def test_ids_do_not_depend_on_spelling_order_or_folder(write_study) -> None:
    one = write_study("grid: {a: {x: --lr 1e-3 --hidden-size 32}, train_iters: [3]}")
    other = write_study(
        "grid: {train_iters: [3], b: {y: --hidden-size=32 --lr 0.001 --log-interval 5 --save-interval 2}}"
    )
    assert ids(one).keys() == ids(other).keys()


@pytest.mark.parametrize("change", ["--lr 2e-3", "--seed 5", "--train-iters 4", "--weight-decay 0.2"])
def test_settings_of_a_run_change_its_id(write_study, change: str) -> None:
    text = "grid: {{a: {{x: --lr 1e-3 --hidden-size 32 --train-iters 3 {}}}}}"
    assert ids(write_study(text.format(""))).keys().isdisjoint(ids(write_study(text.format(change))).keys())


def test_ranks_change_the_id(write_study) -> None:
    text = "gpus: {}\ngrid: {{lr: [1e-3], hidden_size: [32], train_iters: [3]}}"
    assert ids(write_study(text.format(1))).keys().isdisjoint(ids(write_study(text.format(2))).keys())


def test_a_folder_is_found_by_its_id(write_study) -> None:
    study = write_study("grid: {lr: [1e-3], hidden_size: [32], train_iters: [3]}")
    (run,) = expand(study)
    earlier = study.folder / f"called-otherwise-{run.id}"
    earlier.mkdir(parents=True)
    (found,) = expand(study)
    assert found.folder == earlier and found.id == run.id


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tokens: 9\ngrid: {hidden_sise: [32]}", "unknown flag --hidden-sise; did you mean --hidden-size?"),
        ("tokens: 9\ngrid: {lr: [1], hidden_size: [33]}", "--hidden-size 33"),
        ("tokens: 9\ngrid: {lr: [1], hidden_size: [32], gpus: [3], t: {a: --tensor-model-parallel-size 2}}", "world"),
        ("grid: {lr: [1], hidden_size: [32]}", "--train-iters"),
        ("tokens: 9\ngrid: {lr: [1], hidden_size: [32], train_iters: [3]}", "are derived from tokens"),
        ("tokens: 9\ngrid: {lr: [1], hidden_size: [32], a: {b: --save x}}", "--save, --load"),
        ("tokens: 9\ngrid: {lr: [1], hidden_size: [32], a: {b: --dry-run}}", "--dry-run"),
        ("tokens: 9\ngpus: 1.5\ngrid: {lr: [1], hidden_size: [32]}", "gpus: 1.5 must be an integer"),
        ("tokens: 9\ngrid: {lr: [1, 1.0], hidden_size: [32]}", "the same run as lr1-hidden_size32"),
    ],
)
def test_a_wrong_run_refuses_the_study(write_study, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        expand(write_study(text))
    assert told in str(refused.value)


def test_a_problem_of_many_runs_is_reported_once(write_study) -> None:
    with pytest.raises(ConfigError) as refused:
        expand(write_study(f"tokens: 9\n{GRID.replace('--hidden-size 64', '--hidden-size 65')}"))
    told = [problem for problem in refused.value.problems if "--hidden-size 65" in problem]
    assert told[0].startswith("lr1e-3-m-bf16-seed1 and 3 more: ") and len(told) == len(set(told)) <= 2


def test_tokens_per_parameter_need_the_vocabulary(write_study) -> None:
    common = "--num-layers 2 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 4"
    common += " --data-path a --tokenizer-type SentencePieceTokenizer --tokenizer-model b"
    grid = "grid: {lr: [1], hidden_size: [32]}"
    with pytest.raises(ConfigError, match="give --vocab-size"):
        expand(write_study(f"tokens_per_parameter: 9\n{grid}", common))
    (run,) = expand(write_study(f"tokens: 999\n{grid}", common))
    assert run.parameters is None and run.flops is None


def test_a_run_of_two_grids_is_one_run(write_study) -> None:
    grids = "[{lr: [1, 2], hidden_size: [32]}, {hidden_size: [32], lr: [2, 3]}]"
    assert len(expand(write_study(f"tokens: 9\ngrid: {grids}"))) == 3
