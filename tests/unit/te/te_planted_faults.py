"""A program of `test_te_without_cuda.py`: faults are planted into the calls of Transformer Engine's linears."""

from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine.pytorch as te

from benchmarks import layer_faults
from benchmarks.layer_faults import Fault, LayerFault
from megafp8.config import flags

RUN = (
    "--model-preset tiny --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 8 --lr 1e-3 --bf16 --fp8-format hybrid --fp8-recipe tensorwise --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 500"
)
NAMES = tuple(f"layers.{layer}.{name}" for layer in (0, 1) for name in ("linear_qkv", "linear_fc1", "linear_fc2"))
te.Linear.forward = lambda self, inputs: (inputs.clone(), None)  # as megatron-core's linears: the output and no bias
layer_faults.unwrap_model = lambda chunks: chunks


def outputs(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of all linears in the steps 1 and 2; they return their inputs, which are 1."""
    linears = [te.Linear(32, 32, bias=False, device="cpu") for _ in NAMES]
    layer_faults.named_linears = lambda chunk: zip(NAMES, linears, strict=True)
    chunk = SimpleNamespace(embedding=SimpleNamespace(word_embeddings=torch.nn.Identity()))
    training_state = SimpleNamespace(chunks=[chunk])
    run = SimpleNamespace(config=flags.parse(RUN.split()).config, vocab_size=500, training_state=training_state)
    planted = LayerFault(run, Fault(kind, first_step=2, growth=9))
    found = []
    for step in (1, 2):
        planted.start(step)
        found.append([linear(torch.ones(4, 1, 96))[0] for linear in linears])
        found[-1].append(chunk.embedding.word_embeddings(torch.arange(8)))
        planted.end_step()
    return found[0], found[1]


for fault, changed in (("infinite-activation", [2]), ("inflated-qk", [0, 3]), ("spike-batch", [6])):
    before, after = outputs(fault)
    assert all(bool((tensor == 1).all()) for tensor in before[:-1]) and before[-1].tolist() == list(range(8))
    assert [index for index, pair in enumerate(zip(before, after, strict=True)) if not torch.equal(*pair)] == changed
    if fault == "infinite-activation":
        assert after[2].isinf().sum() == 1
    if fault == "inflated-qk":  # for each of two heads 16 channels of queries, keys and values
        assert after[0][0, 0].tolist() == ([3.0] * 32 + [1.0] * 16) * 2
