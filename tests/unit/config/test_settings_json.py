"""JSON round trip, hash and diff."""

import json

import pytest

from megafp8.config import settings
from megafp8.config.flags import parse, to_argv
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, with_values
from megafp8.errors import ConfigError

CHANGED = {
    "model.num_layers": 12,
    "optimizer.lr": 3e-4,
    "data.data_path": ("0.3", "a", "0.7", "b"),
    "logging.profile_ranks": (0, 3),
    "logging.progress_bar": False,
    "overrides": ("ddp.bucket_size=1",),
}


def test_round_trip():
    config = with_values(RunConfig(), CHANGED)
    again = settings.from_json(settings.to_json(config))
    assert again == config
    assert isinstance(again.data.data_path, tuple)
    assert settings.from_json("{}") == RunConfig()


def test_the_file_holds_every_setting():
    tree = json.loads(settings.to_json(RunConfig()))
    for setting in all_settings():
        holder = tree[setting.section] if setting.section else tree
        assert setting.field in holder


def test_hash_depends_on_settings_only():
    config = with_values(RunConfig(), CHANGED)
    assert settings.stable_hash(config) == settings.stable_hash(settings.from_json(settings.to_json(config)))
    assert settings.stable_hash(config) != settings.stable_hash(RunConfig())
    # One value, spelled as int and as float.
    as_int, as_float = (with_values(config, {"optimizer.clip_grad": value}) for value in (1, 1.0))
    assert settings.stable_hash(as_int) == settings.stable_hash(as_float)
    assert len(settings.stable_hash(config)) == 64


def test_diff_is_one_line_per_setting():
    before = parse(["--num-layers", "12"]).config
    after = parse(["--num-layers", "24", "--data-path", "a", "--disable-bias-linear"]).config
    assert settings.diff(before, after) == [
        "model.num_layers: 12 -> 24",
        "model.add_bias_linear: true -> false",
        'data.data_path: [] -> ["a"]',
    ]
    assert settings.diff(before, before) == []


def test_all_faults_of_a_file_are_reported_together():
    text = json.dumps(
        {
            "model": {"num_layer": 3, "hidden_size": "64", "swiglu": 1, "normalization": "BatchNorm"},
            "training": {"seed": True, "micro_batch_size": None},
            "data": {"data_path": "a", "seq_length": None},
            "optimizer": {"min_lr": None, "lr": 1},
            "extra": 1,
        }
    )
    with pytest.raises(ConfigError) as caught:
        settings.from_json(text)
    assert caught.value.problems == [
        "unknown key 'model.num_layer'; did you mean 'model.num_layers'?",
        "model.hidden_size: '64' is not of type int",
        "model.swiglu: 1 is not of type bool",
        "model.normalization: 'BatchNorm' is not one of LayerNorm, RMSNorm",
        "training.seed: True is not of type int",
        "data.data_path: 'a' is not a list",
        "optimizer.min_lr: None is not of type float",
        "unknown key 'extra'",
    ]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model": {"a": 1}', "NaN"])
def test_other_json_than_an_object_is_refused(text):
    with pytest.raises(ConfigError):
        settings.from_json(text)


def test_a_number_that_is_not_finite_is_refused():
    with pytest.raises(ConfigError, match="NaN is no JSON number"):
        settings.from_json('{"optimizer": {"lr": NaN}}')


def test_the_word_auto_is_kept() -> None:
    config = parse(["--micro-batch-size", "auto"]).config
    tree = json.loads(settings.to_json(config))
    assert tree["training"]["micro_batch_size"] == "auto"
    assert settings.from_json(json.dumps(tree)) == config
    assert parse(to_argv(config)).config == config
    number = with_values(config, {"training.micro_batch_size": 4})
    assert settings.diff(config, number) == ['training.micro_batch_size: "auto" -> 4']
    for wrong in ("0", '"big"', "false"):
        with pytest.raises(ConfigError, match="micro_batch_size"):
            settings.from_json(f'{{"training": {{"micro_batch_size": {wrong}}}}}')
    with pytest.raises(ConfigError, match="--micro-batch-size: 0 must be at least 1, or auto"):
        parse(["--micro-batch-size", "0"])
