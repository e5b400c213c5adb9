"""`megafp8 convert from-hf` on folders that have more than weights and config.json, as those of the hub do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_folders import LLAMA, random_weights, write_hf_folder

from megafp8.cli import convert


def test_weights_of_a_type_of_buffers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_weights(LLAMA, torch.float32)
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.uint8)
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, weights)
    assert convert.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 74
    assert "model.norm.weight is uint8; weights are F32, BF16, F16, F8_E4M3" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_code_beside_a_class_of_transformers_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Phi-3's files have such code. A class with another name may be another model."""
    fields = LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling.LlamaForCausalLM"}}
    weights = random_weights(LLAMA, torch.float32)
    theirs = write_hf_folder(tmp_path / "theirs", fields | {"architectures": ["LlamaForCausalLM"]}, weights)
    assert convert.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    note = "note: the code that config.json names (auto_map) is not read; transformers has LlamaForCausalLM"
    assert note in capsys.readouterr().out
    other = write_hf_folder(tmp_path / "other", fields | {"architectures": ["MyLlamaForCausalLM"]}, weights)
    assert convert.main(["from-hf", str(other), str(tmp_path / "x")]) == 74
    assert "code of its own (auto_map)" in capsys.readouterr().err
