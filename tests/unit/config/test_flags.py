"""The command line: Megatron's spellings, the order of sources, and all errors reported together."""

import pytest

from megafp8.config import flags, settings
from megafp8.config.flags import parse
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, value_of, with_values
from megafp8.errors import ConfigError

PRESENT = [setting for setting in all_settings() if not setting.former]
# Megatron-LM's text-LM example scripts combined: their command line must be accepted unchanged.
MEGATRON_COMMAND_LINE = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples
1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path /tmp/cache
--tiktoken-pattern v2 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --split 99,1,0
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --profile-ranks 0 1 --ckpt-format torch_dist --distributed-timeout-minutes
60 --save /tmp/c --load /tmp/c --tensorboard-dir /tmp/t --dataloader-type single --use-checkpoint-opt_param-scheduler
--no-load-optim --no-load-rng --no-masked-softmax-fusion
"""


def problems_of(*argv):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert caught.value.exit_status == 64
    return caught.value.problems


def test_a_megatron_command_line_reads_as_it_is():
    parsed = parse(MEGATRON_COMMAND_LINE.split())
    config = parsed.config
    assert config.model.num_query_groups == 8
    assert config.model.add_bias_linear is False
    assert config.model.share_embeddings_and_output_weights is False
    assert config.optimizer.decoupled_min_lr == 4.5e-5
    assert config.logging.profile_ranks == (0, 1)
    assert config.data.mmap_bin_files is False
    assert config.checkpoint.use_checkpoint_opt_param_scheduler
    assert parsed.warnings == ("--use-mcore-models: no effect; all models are megatron-core's",)
    assert "model.add_bias_linear" in parsed.given
    assert "model.norm_epsilon" not in parsed.given


def test_both_spellings_of_a_value_and_negative_numbers():
    config = parse(["--lr=1e-3", "--min-lr", "-1e-5", "--seed", "-3", "--wandb-exp-name="]).config
    assert (config.optimizer.lr, config.optimizer.min_lr, config.training.seed) == (1e-3, -1e-5, -3)
    assert config.logging.wandb_exp_name == ""


def test_the_last_spelling_of_a_flag_wins_but_overrides_add_up():
    twice = ["--num-layers", "2", "--num-layers", "4"]
    config = parse([*twice, "--override", "ddp.a=1", "--override", "ddp.b=-2", "ddp.c=x=y"]).config
    assert config.model.num_layers == 4
    assert config.overrides == ("ddp.a=1", "ddp.b=-2", "ddp.c=x=y")


def test_confirmation_of_a_default_is_accepted():
    assert parse(["--calculate-per-token-loss"]).config == RunConfig()


def test_a_boolean_with_three_states():
    assert parse([]).config.logging.progress_bar is None
    assert parse(["--progress-bar"]).config.logging.progress_bar is True
    assert parse(["--no-progress-bar"]).config.logging.progress_bar is False


def test_all_problems_are_reported_together():
    found = problems_of(
        "stray",
        "--hiden-size",
        "3",
        "--lr",
        "--min-lr",
        "abc",
        "--num-layers",
        "1.5",
        "--bf16",
        "yes",
        "--clip-grad",
        "nan",
        "--position-embedding-type",
        "foo",
        "--hidden-size",
        "1",
        "2",
        "--use-megatron-fsdp",
        "--world-size",
        "0",
        "--model-preset",
        "huge",
        "--config",
        "/nowhere.json",
    )
    expected = [
        "'stray' does not belong to any flag; configuration files end in .yaml, .yml or .json",
        "unknown flag --hiden-size; did you mean --hidden-size?",
        "--lr: a value is missing",
        "--min-lr: 'abc' is not a number",
        "--num-layers: '1.5' is not an integer",
        "--bf16: does not take 'yes'",
        "--clip-grad: 'nan' is not a finite number",
        "--position-embedding-type: invalid choice: 'foo'",
        "--hidden-size: does not take '2'",
        "--use-megatron-fsdp: Megatron-FSDP",
        "--config /nowhere.json: cannot be read",
        "--model-preset huge: unknown preset",
        "--world-size 0",
    ]
    assert len(found) == len(expected), found
    for problem, beginning in zip(found, expected, strict=True):
        assert problem.startswith(beginning), (problem, beginning)


def test_a_flag_cannot_be_shortened():
    assert problems_of("--num-lay", "3") == ["unknown flag --num-lay; did you mean --num-layers?"]


def test_an_unknown_flag_without_a_similar_one_gets_no_suggestion():
    assert problems_of("--learnin-rat", "3") == ["unknown flag --learnin-rat; see --help-all for all flags"]


def test_flags_win_over_file_over_preset_over_default(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"model": {"model_preset": "gpt2-124m", "num_layers": 6}, "optimizer": {"lr": 0.5}}')
    config = parse(["--config", str(file), "--lr", "0.25"]).config
    assert config.optimizer.lr == 0.25  # flag
    assert config.model.num_layers == 6  # file
    assert config.model.hidden_size == 768  # preset
    assert config.model.init_method_std == 0.02  # default


def test_a_preset_on_the_command_line_replaces_the_files_model(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(settings.to_json(parse(["--model-preset", "llama3-8b", "--lr", "0.5"]).config))
    parsed = parse(["--config", str(file), "--model-preset", "gpt2-124m", "--num-layers", "3"])
    alone = parse(["--model-preset", "gpt2-124m", "--num-layers", "3", "--lr", "0.5"])
    assert parsed.config == alone.config
    assert any("replaces the model section" in warning for warning in parsed.warnings)


def test_overrides_of_file_and_flags_add_up(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"overrides": ["ddp.a=1"]}')
    assert parse(["--config", str(file), "--override", "ddp.a=2"]).config.overrides == ("ddp.a=1", "ddp.a=2")


def test_a_bad_file_is_reported_with_its_name(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"model": {"layers": 3}}')
    (problem,) = problems_of("--config", str(file))
    assert str(file) in problem and "'model.layers'" in problem


def test_options_outside_the_settings():
    parsed = parse(["--dry-run", "--world-size", "16", "--target", "h200"])
    assert (parsed.dry_run, parsed.world_size, parsed.target) == (True, 16, "h200")
    assert parsed.given == frozenset()
    assert parse([]).world_size is None


@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_can_be_spelled_as_flags(preset):
    changes = {
        "optimizer.min_lr": 1e-5,
        "data.data_path": ("1", "a"),
        "precision.fp8_wgrad": False,
        "overrides": ("ddp.a=1",),
    }
    config = with_values(parse(["--model-preset", preset]).config, changes)
    assert parse(flags.to_argv(config)).config == config


@pytest.mark.parametrize("which", [0, -1])
def test_every_spelling_of_every_setting_can_be_given(which):
    argv, expected = [], {}
    for setting in PRESENT:
        if setting.type is bool:
            spellings = [(flag, True) for flag in setting.flags] + [(flag, False) for flag in setting.off]
            spelling, expected[setting.name] = spellings[which]
            argv.append(spelling)
        else:
            value = setting.choices[which] if setting.choices else {int: 3, float: 0.5, str: "tiny"}[setting.type]
            argv += [setting.flags[which], str(value)]
            expected[setting.name] = (value,) if setting.many else value
    parsed = parse(argv)
    assert {name: value_of(parsed.config, name) for name in expected} == expected
    assert parsed.given == set(expected)


@pytest.mark.parametrize(("option", "part"), [("--version", "megafp8 "), ("--list-presets", "llama-1b")])
def test_options_that_print_and_exit(option, part, capsys):
    with pytest.raises(SystemExit) as end:
        parse([option])
    assert end.value.code == 0
    assert part in capsys.readouterr().out


def test_a_variable_that_no_shell_replaced_is_named():
    for words in (["--seed", "${REPEAT}"], ["--lr", "$LR"]):
        with pytest.raises(ConfigError, match="no shell replaced this variable"):
            parse(words)


def test_a_list_may_be_written_in_brackets():
    for words in (["[layernorm", "mlp]"], ["[layernorm,mlp]"], ["['layernorm', \"mlp\"]"]):
        assert parse(["--recompute-modules", *words]).config.training.recompute_modules == ("layernorm", "mlp")
    config = parse(["--recompute-modules", "[layernorm", "mlp]", "--profile-ranks", "[0]"]).config
    assert config.training.recompute_modules == ("layernorm", "mlp")
    assert config.logging.profile_ranks == (0,)


def test_settings_of_a_file_are_told_from_those_of_flags(tmp_path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"model": {"num_layers": 2, "swiglu": false}, "optimizer": {"lr": 0.001}}')
    parsed = parse(["--config", str(path), "--lr", "1e-2"])
    assert parsed.given == {"optimizer.lr"}
    assert parsed.from_file == {"model.num_layers", "model.swiglu", "optimizer.lr"}
    assert parse(["--config", str(path), "--model-preset", "tiny"]).from_file == {"optimizer.lr"}


def test_flags_of_settings_that_are_gone_are_one_problem_that_says_what_to_use():
    line = "--planted-fault inflated-qk --planted-fault-step 5 --planted-fault-growth 2 --lr 1e-3"
    _, problems = flags.parse_with_problems(line.split())
    assert problems == [
        "--planted-fault, --planted-fault-step, --planted-fault-growth: a run plants no faults; use "
        "benchmarks/planted_faults.py"
    ]


def test_files_of_earlier_versions_have_settings_that_are_gone_with_their_defaults():
    assert settings.from_json('{"training": {"planted_fault": "none", "planted_fault_growth": 1.05}}') == RunConfig()
    with pytest.raises(ConfigError, match="training.planted_fault: 'inflated-qk': a run plants no faults; use"):
        settings.from_json('{"training": {"planted_fault": "inflated-qk"}}')


def test_the_final_learning_rate_may_be_a_ratio(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("lr: 1e-3\nmin_lr_ratio: 0.1\n", encoding="utf-8")
    words = ["--config", str(tmp_path / "run.yaml")]
    assert flags.parse(words).config.optimizer.min_lr == pytest.approx(1e-4)
    assert flags.parse([*words, "--min-lr", "5e-5"]).config.optimizer.min_lr == 5e-5
    parsed = flags.parse([*words, "--min-lr-ratio", "0.5"])
    assert parsed.config.optimizer.min_lr == 5e-4 and "optimizer.min_lr" in parsed.given
    with pytest.raises(ConfigError, match="--min-lr-ratio are both given"):
        flags.parse([*words, "--min-lr", "5e-5", "--min-lr-ratio", "0.5"])
    with pytest.raises(ConfigError, match="2 must be from 0 to 1"):
        flags.parse(["--min-lr-ratio", "2"])
