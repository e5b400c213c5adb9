"""Train a transformers model as it is and with NVFP4 linear layers, and print both losses of each step.

    python examples/quantize_transformers_model.py
    python examples/quantize_transformers_model.py --recipe mxfp8 --steps 100

The model is a small Llama from a configuration, its text the source code of Python's standard library, byte by byte.
Nothing is downloaded. It needs transformers (`pip install transformers`). GPUs compute in BF16. CPUs, many of which
have no BF16 units, compute in FP32, for a minute.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megafp8

BATCH, LENGTH = 8, 128


def read_text(num_bytes: int = 2_000_000) -> torch.Tensor:
    """Bytes of the standard library's source code."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:num_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """The same random sequences for every training."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + LENGTH] for start in starts])


def build_model(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


class Training:
    """One model and its optimizer."""

    def __init__(self, model: LlamaForCausalLM):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(self, tokens: torch.Tensor) -> float:
        """Train on sequences, and return the loss before the update."""
        device = self.model.device
        tokens = tokens.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="nvfp4", choices=megafp8.recipes.names())
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, model = build_model(device), build_model(device)
    print(megafp8.quantize_model(model, arguments.recipe))
    trainings = Training(plain), Training(model)
    print(f"step  plain   {arguments.recipe}")
    for step, tokens in enumerate(batches(read_text(), arguments.steps), 1):
        print(f"{step:4}  " + "  ".join(f"{training.step(tokens):.4f}" for training in trainings), flush=True)


if __name__ == "__main__":
    main()
