"""The table that --list-presets prints."""

from __future__ import annotations

from megafp8.config import dimensions, model_shapes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values


def preset_table() -> str:
    """One line for each preset: shape and number of parameters."""
    lines = [
        f"{'preset':<18}{'layers':>7}{'hidden':>8}{'heads':>7}{'kv':>5}{'ffn':>8}{'vocabulary':>13}{'parameters':>13}\n"
    ]
    for name, values in model_shapes.PRESETS.items():
        model = with_values(RunConfig(), values).model
        vocabulary = str(model.vocab_size) if model.vocab_size else "tokenizer's"
        padded = dimensions.padded_vocab_size(RunConfig(), model.vocab_size or 0)
        total_millions = model_shapes.count_parameters(model, padded).total / 1e6
        suffix = "M" if model.vocab_size else "M + vocab"
        lines.append(
            f"{name:<18}{model.num_layers:>7}{model.hidden_size:>8}{model.num_attention_heads:>7}"
            f"{dimensions.num_query_groups(model):>5}{dimensions.ffn_hidden_size(model):>8}{vocabulary:>13}"
            f"{total_millions:>12,.1f}{suffix}\n"
        )
    return "".join(lines)
