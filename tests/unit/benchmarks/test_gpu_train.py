"""How the GPU benchmark handles its processes, without training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import gpu_steps, gpu_train, megatron_loop
from megafp8.config import derived, dimensions, flags, model_shapes, rules


def process(mode: str, number: int, step_ms: float) -> gpu_train.Process:
    """A process with this step time."""
    return gpu_train.Process(
        mode=mode, round=number, step_ms=step_ms, spread_fraction=0.01, tokens_per_second=1e6 / step_ms, tflops=1.0,
        peak_gib=1.0, attention="fused", loss=5.0, device="GPU", wall_s=30.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("peer=@delayed a=b", ("peer", "@delayed a=b")),
        ("delayed", ("delayed", "delayed")),
        ("delayed --precision a=b", ("delayed --precision a=b", "delayed --precision a=b")),
    ],
)
def test_the_name_of_a_mode_is_optional(mode: str, expected: tuple[str, str]) -> None:
    assert gpu_steps.named(mode) == expected


def test_speed_is_compared_within_a_round() -> None:
    """In the second round, the machine runs both at 50% of the speed."""
    times = [("bf16", 0, 300), ("tensorwise", 0, 200), ("tensorwise", 1, 400), ("bf16", 1, 600)]
    done = [process(*entry) for entry in times]
    rows = {row["mode"]: row for row in gpu_train.summarize(done)}
    assert rows["tensorwise"]["to_bf16"].median == 1.5
    assert (rows["tensorwise"]["to_bf16"].low, rows["tensorwise"]["to_bf16"].high) == (1.5, 1.5)
    assert rows["bf16"]["step_ms"] == 450


def test_no_ratio_without_a_common_round() -> None:
    assert gpu_train.ratio_to("bf16", [process("bf16", 0, 300), process("delayed", 1, 200)], "delayed") is None


@pytest.mark.parametrize("shape", ["gpt2-124m", "gpt2-350m", "llama3.2-1b", "llama3.2-3b", "llama3-8b"])
def test_whole_models_are_those_of_the_peer(shape: str) -> None:
    """With as many tokens in a step, and sizes of the model's preset."""
    parsed = gpu_train.parse(["--shape", shape])
    parsed.energy = True
    command = gpu_train.command_of(parsed, "tensorwise", "run")
    config, peer = flags.parse(command[1:]).config, megatron_loop.SHAPES[shape]
    assert rules.setting_problems(config, 1) == [] and config.logging.log_energy
    assert peer["seq"] == config.data.seq_length and peer["batch"] == config.training.micro_batch_size
    assert peer["batch"] * peer["microbatches"] == config.training.global_batch_size
    model, options = config.model, peer["model"]
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        assert peer[name] == getattr(model, name), name
    assert peer.get("ffn_hidden_size", 4 * peer["hidden_size"]) == model.ffn_hidden_size
    assert peer.get("num_query_groups") == (model.num_query_groups if model.group_query_attention else None)
    assert options.get("share_embeddings_and_output_weights", False) == model.share_embeddings_and_output_weights
    rotary = model.use_rope_scaling, model.rope_scaling_factor, model.rotary_base
    peers = options.get("rope_scaling", False), options.get("rope_scaling_factor", 8.0), peer.get("rotary_base", 10_000)
    assert rotary == peers
    kind = options.get("position_embedding_type", "rope"), peer.get("normalization", "RMSNorm")
    assert kind == (model.position_embedding_type, model.normalization)
    assert options.get("vocab_size", 50_304) == dimensions.padded_vocab_size(config, (model.vocab_size or 0) + 1)


@pytest.mark.parametrize(("shape", "parameters"), [("A", 1_439_270_912), ("B", 2_156_990_464)])
@pytest.mark.parametrize("mode", gpu_train.MODES)
def test_command_lines_are_right(shape: str, parameters: int, mode: str) -> None:
    options = gpu_train.parse(["--shape", shape])
    config = flags.parse(gpu_train.command_of(options, mode, "run")[1:]).config
    assert rules.setting_problems(config, 1) == []
    assert model_shapes.count_parameters(config.model, 50_304).total == parameters
    assert (derived.quantization_recipe(config.precision) is None) == (mode == "bf16")


def test_a_failing_mode_is_reported_and_not_retried(tmp_path: Path) -> None:
    options = gpu_train.parse(["--tiny", "--modes", "bf16", "--rounds", "3", "--extra=--num-layrs 2"])
    done, failures = gpu_train.measure(options)
    assert done == []
    assert len(failures) == 1
    assert "--num-layrs" in failures[0]
    assert "ended with 64" in failures[0]


def test_the_peer_is_timed_alternately(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is timed by the other benchmark, which writes step times as JSON. Tokens and FLOPs are those of the shape."""
    commands: list[list[str]] = []

    def start(command: list[str]) -> None:
        commands.append(command)
        timed = {
            "step_ms": 200.0, "peak_gib": 51.0, "losses": [9.0, 5.0], "attention": "fused", "device": "H200",
            "joules_per_step": 128.0,
        }  # fmt: skip
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"done": [timed]}))

    monkeypatch.setattr(gpu_train, "start", start)
    options = gpu_train.parse(["--modes", "peer-delayed", "--rounds", "1", "--folder", str(tmp_path)])
    (peer,), failures = gpu_train.measure(options)
    assert failures == [] and gpu_steps.parse(commands[0][1:]).modes == ["peer-delayed=@delayed"]
    assert (gpu_steps.parse(commands[0][1:]).warm_up, gpu_steps.parse(commands[0][1:]).steps) == (6, 10)
    assert peer.tokens_per_second == 8 * 2048 / 0.2 and peer.device == "H200"
    assert peer.joules_per_token == 128 / (8 * 2048)
    assert peer.tflops == pytest.approx(peer.tokens_per_second * 9.240e9 / 1e12, rel=1e-3)
    rows = {row["mode"]: row for row in gpu_train.summarize([peer, process("delayed", 0, 100)])}
    assert rows["peer-delayed"]["joules_per_token"] == peer.joules_per_token
    assert rows["delayed"]["to_peer"].median == 2 and rows["peer-delayed"]["spread_fraction"] is None


def test_energy_is_that_of_the_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    joules = 1000.0

    def step(index: int) -> float:
        nonlocal joules
        joules += 500 if index <= 2 else 10 * index  # two steps to warm up
        return 5.0

    fakes = {"init_distributed": None, "peer_steps": step, "has_library": True, "attention_of_process": "fused"}
    for name, value in fakes.items():
        monkeypatch.setattr(gpu_steps, name, lambda *_, value=value: value)
    monkeypatch.setattr(gpu_steps, "EnergyCounter", lambda device: SimpleNamespace(joules=lambda: joules))
    for name in ("synchronize", "max_memory_allocated", "get_device_name"):
        monkeypatch.setattr(gpu_steps.torch.cuda, name, lambda: 0)
    options = gpu_steps.parse(["--modes", "peer=@delayed", "--warm-up", "2", "--steps", "4"])
    timed = gpu_steps.measure(options, "peer", "@delayed", 0)
    assert timed.joules_per_step == (30 + 40 + 50 + 60) / 4 and len(timed.losses) == 6


def test_no_batch_is_made_in_a_timed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def build_batches(run: object, dataset: object, first: int, num_samples: int, num_workers: int) -> Iterator[int]:
        for sample in range(first, num_samples, run.global_batch_size):
            made.append(sample)
            yield sample

    run = SimpleNamespace(datasets=[None], global_batch_size=4)
    monkeypatch.setattr(gpu_steps, "build_training_run", lambda *_: run)
    monkeypatch.setattr(gpu_steps, "build_batches", build_batches)
    monkeypatch.setattr(gpu_steps, "train_step", lambda run, batches, progress: (next(batches), progress.step))
    train = gpu_steps.trainer(SimpleNamespace(invocation=SimpleNamespace(config=None), implementation=None), 3)
    assert made == [0, 4, 8]
    assert [train(step) for step in (1, 2, 3)] == [(0, 0), (4, 1), (8, 2)]


def test_no_process_starts_that_would_exceed_the_time_limit() -> None:
    done, failures = gpu_train.measure(gpu_train.parse(["--tiny", "--minutes", "0"]))
    assert done == []
    assert failures == ["stopped in round 1: --minutes 0"]
