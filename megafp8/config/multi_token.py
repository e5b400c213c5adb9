"""Multi-token prediction (`--mtp-num-layers`), from the settings alone.

After the last layer follow D more modules, one for each depth. The module of depth d gets the hidden states of depth
d - 1 and the embedding of the token d positions later: it normalizes both, projects their concatenation to the hidden
size (`eh_proj`), and passes it through a transformer layer of the kind of the model's last layer and a norm. The shared
output layer then predicts the token d + 1 positions later. The loss of training is

    L + factor / D x (L_1 + ... + L_D)

All modules are on the last pipeline stage, which has a copy of the word embeddings for them. Their layers are numbered
after those of the model.

Their linears have the recipe of --fp8-format and --fp8-recipe (`precision_map.multi_token_choice`).
"""

from __future__ import annotations

from megafp8.config.expert_layers import expert_layers, is_mixture
from megafp8.config.schema import ModelConfig

PROJECTION = "eh_proj"
"""The linear that joins hidden states and embeddings: 2 x hidden size to hidden size."""


def num_depths(model: ModelConfig) -> int:
    """Modules of multi-token prediction; 0 without it."""
    return model.mtp_num_layers or 0


def has_experts(model: ModelConfig) -> bool:
    """Whether the transformer layers of multi-token prediction have experts: those of the kind of the last layer."""
    return is_mixture(model) and bool(num_depths(model)) and any(expert_layers(model)[-1:])


def own_parameters(model: ModelConfig) -> tuple[int, int]:
    """Parameters of one module besides those of its transformer layer: of the projection, and of its three norms."""
    assert model.hidden_size is not None
    norm = model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)
    return 2 * model.hidden_size * model.hidden_size, 3 * norm
