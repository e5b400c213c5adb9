"""Train a transformers model in BF16 and with NVFP4 linear layers, and print both losses.

    python examples/quantize_transformers_model.py
    python examples/quantize_transformers_model.py --recipe mxfp8 --steps 100

The model is a small Llama from a configuration, its text the source code of Python's standard library, byte by byte.
Nothing is downloaded. It needs transformers (`pip install transformers`), and a CPU or a CUDA device.
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


def train(model: LlamaForCausalLM, text: torch.Tensor, num_steps: int) -> list[float]:
    """Losses of each step. Parameters are FP32, and autocast computes in BF16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    device, losses = model.device, []
    for tokens in batches(text, num_steps):
        tokens = tokens.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="nvfp4", choices=megafp8.recipes.names())
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = read_text()
    plain = train(build_model(device), text, arguments.steps)
    model = build_model(device)
    print(megafp8.quantize_model(model, arguments.recipe))
    quantized = train(model, text, arguments.steps)
    print(f"step  bf16    {arguments.recipe}")
    for step, losses in enumerate(zip(plain, quantized, strict=True), 1):
        print(f"{step:4}  " + "  ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
