"""tools/convert_checkpoint.py as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked_script import run_script
from hf_folders import (
    GPT2,
    LLAMA,
    MODELS,
    TIED_LLAMA,
    random_weights,
    same,
    settings_of,
    weights_in,
    write_hf_folder,
)
from ranks import run_ranks
from saved_run import build_initial, configure, save_initial

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.manifest import find_damage
from megafp8.checkpoint.metadata import read_config
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.standalone import CheckpointTensors
from megafp8.cli import convert
from megafp8.config import flags
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer
from megafp8.training.generation import generate_text
from megafp8.training.language_model import load_language_model
from megafp8.training.sampling import GREEDY

ROOT = Path(__file__).resolve().parents[2]
IN_ROWS = {"embedding.word_embeddings.weight", "output_layer.weight"}
STEP_0, STEP_7 = "iter_0000000", "iter_0000007"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LLAMA_RUN = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --vocab-size 127 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
GPT2_RUN = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --max-position-embeddings 48"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return convert


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, by name."""
    tensors = CheckpointTensors(path)
    return {name: tensors.load(name) for name in tensors.locations if not name.startswith("optimizer.")}


def first_rows(weights: dict[str, torch.Tensor], num_tokens: int) -> dict[str, torch.Tensor]:
    """The same without the padding of the vocabulary."""
    return {name: weight[:num_tokens] if name in IN_ROWS else weight for name, weight in weights.items()}


# --- exact in both directions
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_import_then_export_is_bit_equal(tool: ModuleType, name: str, dtype: str, tmp_path: Path) -> None:
    weights = random_weights(MODELS[name], DTYPES[dtype])
    theirs = write_hf_folder(tmp_path / "theirs", MODELS[name], weights)
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    assert find_damage(tmp_path / "ours" / STEP_0) == []
    assert tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--max-shard-size", "50KB"]) == 0
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    assert same(weights_in(tmp_path / "back"), weights)
    fields = json.loads((tmp_path / "back/config.json").read_text())
    assert settings_of(fields) == settings_of(MODELS[name]) and fields["torch_dtype"] == str(DTYPES[dtype])[6:]
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours", "back"}


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
@pytest.mark.parametrize(("run", "tokens"), [(f"{LLAMA_RUN} --bf16", 128), (GPT2_RUN, 100)], ids=["llama", "gpt2"])
def test_export_then_import_is_bit_equal(tool: ModuleType, run: str, tokens: int, layout: str, tmp_path: Path) -> None:
    save_initial(tmp_path / "run", configure(f"{run} {layout}"), world_size=2)
    assert tool.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "theirs"), "--ckpt-step", "7"]) == 0
    assert tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    before, after = weights_of(tmp_path / "run" / STEP_7), weights_of(tmp_path / "back" / STEP_0)
    assert same(first_rows(before, tokens), first_rows(after, tokens))


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
@pytest.mark.parametrize("fields", [LLAMA, TIED_LLAMA, GPT2], ids=MODELS)
def test_a_run_of_two_ranks_starts_from_an_import(tool: ModuleType, fields: dict, layout: str, tmp_path: Path) -> None:
    fields = fields | {"num_hidden_layers" if fields["model_type"] == "llama" else "n_layer": 2}
    theirs = write_hf_folder(tmp_path / "theirs", fields, random_weights(fields, torch.float32))
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    run = "--tokenizer-type NullTokenizer --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --finetune"
    config = flags.parse(["--config", str(tmp_path / "ours/config.json"), *f"{run} {layout}".split()]).config

    def load_and_save() -> None:
        training_state = build_initial(config)
        load_checkpoint(tmp_path / "ours" / STEP_0, config, training_state, weights_only=True)
        save_checkpoint(tmp_path / "run", config, training_state, Progress(7, 7))

    run_ranks(2, load_and_save)
    tokens = fields["vocab_size"]
    ran, ours = weights_of(tmp_path / "run" / STEP_7), weights_of(tmp_path / "ours" / STEP_0)
    assert same(first_rows(ran, tokens), first_rows(ours, tokens))
    for name in IN_ROWS & ran.keys():  # 256 plus NullTokenizer's one token, and with two tensor-parallel ranks
        mean = ours[name].mean(dim=0).expand(256 - len(ours[name]), -1)
        assert torch.allclose(ran[name][len(ours[name]) :], mean, rtol=0, atol=1e-7)


# --- a run and a text from converted checkpoints ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("with_tokenizer")
    (folder / "corpus.jsonl").write_text(
        json.dumps({"text": Path(convert.__file__).read_text(encoding="utf-8")}) + "\n"
    )
    train_tokenizer([str(folder / "corpus.jsonl")], str(folder / "tokenizer"), vocab_size=300, model_type="byte-bpe")
    fields = LLAMA | {"vocab_size": 300, "num_hidden_layers": 1}
    theirs = write_hf_folder(folder / "theirs", fields, random_weights(fields, torch.bfloat16))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "tokenizer" / name, theirs)
    return theirs


def test_a_run_starts_from_an_import_as_documented(
    tool: ModuleType, with_tokenizer: Path, tmp_path: Path, capsys
) -> None:
    ours = tmp_path / "models/llama"
    assert tool.main(["from-hf", str(with_tokenizer), str(ours)]) == 0
    said = capsys.readouterr().out
    start = f"--config {ours}/config.json --pretrained-checkpoint {ours}"
    assert f"to train from it: {start}\n" in said
    assert "note: 84 padding rows are added to the vocabulary, the mean of all others" in said
    (told,) = [line for line in said.splitlines() if line.startswith("the model as flags: ")]
    as_flags = flags.parse_with_problems(told.removeprefix("the model as flags: ").split())[0].config
    assert as_flags == flags.parse_with_problems(["--config", str(ours / "config.json")])[0].config
    saved = read_config(ours / STEP_0)
    assert saved.model == as_flags.model and saved.data.tokenizer_model == str(ours / "tokenizer/tokenizer.json")

    run = "--mock-data --seq-length 32 --micro-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0 --num-workers 0"
    trained = run_script("pretrain_gpt.py", *start.split(), *run.split(), "--save", tmp_path / "run")
    assert trained.returncode == 0, trained.stderr
    assert f"loaded {ours / STEP_0}" in (tmp_path / "run/records.jsonl").read_text()

    assert tool.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "theirs"), "--dtype", "fp32"]) == 0
    assert (tmp_path / "theirs/tokenizer.json").read_bytes() == (with_tokenizer / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "theirs/generation_config.json").read_text())["eos_token_id"] == 0
    assert {weight.dtype for weight in weights_in(tmp_path / "theirs").values()} == {torch.float32}


def test_an_import_runs_on_mock_data(tool: ModuleType, tmp_path: Path) -> None:
    """NullTokenizer adds an id: a vocabulary of 256 is --vocab-size 255, as in Megatron-LM."""
    fields = LLAMA | {"vocab_size": 256, "num_hidden_layers": 1}
    theirs = write_hf_folder(tmp_path / "theirs", fields, random_weights(fields, torch.float32))
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    run = (
        f"--config {tmp_path}/ours/config.json --pretrained-checkpoint {tmp_path}/ours --mock-data --seq-length 32 "
        "--micro-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0 --num-workers 0 --tokenizer-type NullTokenizer"
    )
    refused = run_script("pretrain_gpt.py", *run.split())
    assert refused.returncode == 74
    assert "an embedding of 256 rows, but this run has 384: use --vocab-size 255," in refused.stderr
    trained = run_script("pretrain_gpt.py", *run.split(), "--vocab-size", "255")
    assert trained.returncode == 0, trained.stderr


def test_text_from_an_import(tool: ModuleType, with_tokenizer: Path, tmp_path: Path) -> None:
    assert tool.main(["from-hf", str(with_tokenizer), str(tmp_path / "ours")]) == 0

    def text() -> str:
        model = load_language_model(tmp_path / "ours")
        return generate_text(model, "def", GREEDY, 3, seed=1, show=len).text

    assert run_ranks(1, text)[0] != ""


def test_a_dry_run_writes_nothing(tool: ModuleType, with_tokenizer: Path, tmp_path: Path, capsys) -> None:
    assert tool.main(["from-hf", str(with_tokenizer), str(tmp_path / "ours"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "decoder.layers.0.mlp.linear_fc2.weight [64, 96]  =  model.layers.0.mlp.down_proj.weight [64, 96]" in out
    assert "the model as flags: --num-layers 1" in out and list(tmp_path.iterdir()) == []


# --- FP8 --------------------------------------------------------------------------------------------------------------


def test_fp8_weights_exported_and_imported(tool: ModuleType, tmp_path: Path, capsys) -> None:
    run = LLAMA_RUN.replace("--num-layers 4", "--num-layers 3")
    config = configure(f"{run} --bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16")
    save_initial(tmp_path / "run", config)
    assert tool.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "theirs"), "--fp8"]) == 0
    weights = weights_in(tmp_path / "theirs")
    quantized = {name for name, weight in weights.items() if weight.dtype == torch.float8_e4m3fn}
    assert len(quantized) == 7 and all(name.startswith("model.layers.1.") for name in quantized)
    assert {f"{name}_scale" for name in quantized} < weights.keys()
    ignored = json.loads((tmp_path / "theirs/config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored and "model.layers.0.mlp.up_proj" in ignored and len(ignored) == 15
    capsys.readouterr()
    assert tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    assert "note: FP8 weights are multiplied by their scales in FP32 and rounded to bf16" in capsys.readouterr().out
    assert tool.main(["to-hf", str(tmp_path / "back"), str(tmp_path / "plain")]) == 0
    for name, weight in weights_in(tmp_path / "plain").items():
        expected = weights[name]
        if name in quantized:
            expected = (expected.float() * weights[f"{name}_scale"]).bfloat16()
        assert torch.equal(weight, expected), name


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(tool: ModuleType, capsys, tmp_path: Path, *words: object, status: int = 74) -> str:
    """The error message. The conversion must not have created anything."""
    there = set(tmp_path.iterdir())
    assert tool.main([str(word) for word in words]) == status
    assert set(tmp_path.iterdir()) == there
    return capsys.readouterr().err


def test_all_tensors_that_do_not_fit_are_reported_together(tool: ModuleType, tmp_path: Path, capsys) -> None:
    weights = random_weights(LLAMA, torch.float32)
    del weights["model.norm.weight"]
    weights["model.layers.3.mlp.up_proj.weight"] = torch.zeros(96, 64)
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(96, 64)
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # an old file's buffer, not imported
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, weights)
    text = refused(tool, capsys, tmp_path, "from-hf", theirs, tmp_path / "ours")
    assert "model.norm.weight is missing" in text
    assert "model.layers.3.mlp.up_proj.weight is not part of a LlamaForCausalLM" in text
    assert "model.layers.0.mlp.down_proj.weight has shape (96, 64) and by config.json (64, 96)" in text
    assert "model.layers.0.self_attn.q_proj.weight is FP8 and has no scale beside it" in text
    assert len(text.splitlines()) == 5


def test_a_tied_output_layer_must_equal_the_embedding(tool: ModuleType, tmp_path: Path, capsys) -> None:
    weights = random_weights(TIED_LLAMA, torch.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    theirs = write_hf_folder(tmp_path / "theirs", TIED_LLAMA, weights)
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    weights["lm_head.weight"][3, 4] += 1
    other = write_hf_folder(tmp_path / "other", TIED_LLAMA, weights)
    text = refused(tool, capsys, tmp_path, "from-hf", other, tmp_path / "ours2")
    assert "lm_head.weight differs from the embedding" in text


def test_nonfinite_numbers_are_refused(tool: ModuleType, tmp_path: Path, capsys) -> None:
    """Also numbers that overflow when rounded, and FP8 codes of NaN. Every tensor is named."""
    nan, inf, up, q = float("nan"), float("inf"), "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj"
    weights = random_weights(LLAMA, torch.float32)
    weights[up][0, :3], weights[up][5, 5], weights["model.norm.weight"][7] = nan, -inf, inf
    weights["model.embed_tokens.weight"][1, 1] = 3.4e38
    weights[f"{q}.weight"] = weights[f"{q}.weight"].to(torch.float8_e4m3fn)
    weights[f"{q}.weight"].view(torch.uint8)[2, 2] = 0x7F
    weights[f"{q}.weight_scale"] = torch.tensor(0.5)
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, weights)
    text = refused(tool, capsys, tmp_path, "from-hf", theirs, tmp_path / "ours", "--dtype", "bf16")
    assert f"{theirs} holds numbers that are not finite" in text
    for named in (
        f"{up}: 3 NaN and 1 infinite of 6144 in bf16", "model.norm.weight: 1 infinite of 64 in bf16",
        "model.embed_tokens.weight: 1 infinite of 8384 in bf16", f"{q}.weight: 1 NaN of 4096 in bf16",
    ):  # fmt: skip
        assert named in text
    assert len(text.splitlines()) == 5
    text = refused(tool, capsys, tmp_path, "from-hf", theirs, tmp_path / "ours", "--dtype", "fp32")
    assert "embed_tokens" not in text and f"{up}: 3 NaN and 1 infinite of 6144 in fp32" in text


def test_names_without_prefix_and_buffers(tool: ModuleType, tmp_path: Path) -> None:
    """As in the files of GPT-2 itself, and with masks of other types, as in those of Pythia."""
    weights = random_weights(GPT2, torch.float32)
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    kinds = (torch.float32, torch.bool, torch.uint8)
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 48, 48, dtype=kind) for layer, kind in enumerate(kinds)}
    theirs = write_hf_folder(tmp_path / "theirs", GPT2, bare)
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    assert tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert same(weights_in(tmp_path / "back"), weights)


def test_types_are_rounded_on_request_or_with_a_warning(tool: ModuleType, tmp_path: Path, capsys) -> None:
    weights = random_weights(LLAMA, torch.bfloat16)
    weights["model.norm.weight"] = torch.full((64,), 1 + 2.0**-20)
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, weights)
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    assert "note: 1 tensors of another type are rounded to bf16" in capsys.readouterr().out
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours32"), "--dtype", "fp32"]) == 0
    assert "are rounded" not in capsys.readouterr().out
    norm = weights_of(tmp_path / "ours32" / STEP_0)["decoder.final_layernorm.weight"]
    assert torch.equal(norm, weights["model.norm.weight"])
    assert tool.main(["to-hf", str(tmp_path / "ours32"), str(tmp_path / "back"), "--dtype", "bf16"]) == 0
    assert "note: FP32 weights are rounded to bfloat16" in capsys.readouterr().out


def test_a_model_without_a_transformers_equivalent_is_refused(tool: ModuleType, tmp_path: Path, capsys) -> None:
    override = "transformer.test_mode=True"
    run = save_initial(tmp_path / "run", configure(f"{LLAMA_RUN} --parallel-residual --override {override}"))
    text = refused(tool, capsys, tmp_path, "to-hf", run, tmp_path / "theirs")
    assert (
        "--parallel-residual: a LlamaForCausalLM has no --parallel-residual" in text
        and f"--override {override}" in text
    )
    text = refused(tool, capsys, tmp_path, "to-hf", run, tmp_path / "theirs", "--ignore-overrides")
    assert "--override" not in text


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_logits_are_checked_on_request(tool: ModuleType, tmp_path: Path, capsys) -> None:
    """Both ways, and a model that differs is not published."""
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, random_weights(LLAMA, torch.float32))

    def convert_checked(*words: object) -> int:
        return run_ranks(1, tool.main, [*map(str, words), "--check-logits"])[0]

    assert convert_checked("from-hf", theirs, tmp_path / "ours") == 0
    assert convert_checked("to-hf", tmp_path / "ours", tmp_path / "back") == 0
    assert (tmp_path / "back").exists()
    assert convert_checked("to-hf", tmp_path / "ours", tmp_path / "rounded", "--dtype", "bf16") == 74
    assert not (tmp_path / "rounded").exists()
    text = refused(
        tool, capsys, tmp_path, "to-hf", tmp_path / "ours", tmp_path / "x", "--check-logits", "--fp8", status=64
    )
    assert "--check-logits with --fp8" in text


def test_fp8_exports_that_no_loader_reads_are_refused(tool: ModuleType, tmp_path: Path, capsys) -> None:
    gpt2 = save_initial(tmp_path / "gpt2", configure(GPT2_RUN))
    assert "gpt2 has Conv1D" in refused(tool, capsys, tmp_path, "to-hf", gpt2, tmp_path / "theirs", "--fp8")
    llama = save_initial(tmp_path / "llama", configure(LLAMA_RUN.replace("size 96", "size 160")))
    text = refused(tool, capsys, tmp_path, "to-hf", llama, tmp_path / "theirs", "--fp8")
    assert "gate_proj.weight is 160 x 64" in text and "--fp8-recipe tensorwise" in text


def test_a_damaged_checkpoint(tool: ModuleType, tmp_path: Path, capsys) -> None:
    run = save_initial(tmp_path / "run", configure(LLAMA_RUN))
    file = max((run / STEP_7).iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert f"{file.name} is damaged" in refused(tool, capsys, tmp_path, "to-hf", run, tmp_path / "theirs")


def test_flags_that_are_wrong(tool: ModuleType, tmp_path: Path, capsys) -> None:
    (tmp_path / "there").mkdir()
    words = ["to-hf", tmp_path / "run", tmp_path / "there", "--fp8-recipe", "blockwise"]
    text = refused(tool, capsys, tmp_path, *words, status=64)
    assert "--fp8-recipe blockwise has no effect without --fp8" in text and "there exists" in text
    with pytest.raises(SystemExit):
        tool.main(["to-hf", "run", "out", "--max-shard-size", "5 parsecs"])
    text = refused(tool, capsys, tmp_path, "from-hf", "some/model", tmp_path / "ours")
    assert "there is no such folder" in text and "hf download some/model" in text


def test_a_failed_conversion_leaves_nothing(tool: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    run = save_initial(tmp_path / "run", configure(LLAMA_RUN))
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, random_weights(LLAMA, torch.float32))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert "No space left" in refused(tool, capsys, tmp_path, "to-hf", run, tmp_path / "out")
    monkeypatch.setattr("megafp8.checkpoint.writer._write_item", full)
    assert "No space left" in refused(tool, capsys, tmp_path, "from-hf", theirs, tmp_path / "out")


@pytest.mark.parametrize("command", ["from-hf", "to-hf", "from-megatron", "to-megatron"])
def test_every_command_names_a_folder_that_is_not_there(
    tool: ModuleType, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags of each command are read before anything else."""
    assert tool.main([command, str(tmp_path / "missing"), str(tmp_path / "out")]) == 74
    assert str(tmp_path / "missing") in capsys.readouterr().err


def test_a_vocabulary_multiple_of_zero_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, random_weights(LLAMA, torch.bfloat16))
    assert tool.main(["from-hf", str(theirs), str(tmp_path / "ours"), "--make-vocab-size-divisible-by", "0"]) == 64
