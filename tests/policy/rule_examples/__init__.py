"""A configuration that breaks no rule, and for each rule a change of it that does.

A file has the examples of some files of `megafp8/config/rules/`, which it names.
"""

from megafp8.config.model_shapes import PRESETS
from rule_examples import (
    expert_examples,
    layout_examples,
    model_examples,
    precision_examples,
    run_examples,
    training_examples,
)

BASE = {
    **PRESETS["tiny"],
    "model.model_preset": "tiny",
    "model.vocab_size": 1000,
    "data.mock_data": True,
    "data.tokenizer_type": "NullTokenizer",
    "data.seq_length": 128,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 16,
    "training.train_iters": 100,
    "optimizer.lr": 1e-3,
    "optimizer.lr_warmup_iters": 10,
    "precision.bf16": True,
    "precision.fp8_format": "hybrid",
    "precision.fp8_recipe": "tensorwise",
}

TABLES = (
    model_examples.EXAMPLES,
    expert_examples.EXAMPLES,
    layout_examples.EXAMPLES,
    precision_examples.EXAMPLES,
    training_examples.EXAMPLES,
    run_examples.EXAMPLES,
)
# Name of the rule -> changes of BASE, ranks, and a part of the problem's text.
EXAMPLES = {name: example for table in TABLES for name, example in table.items()}
