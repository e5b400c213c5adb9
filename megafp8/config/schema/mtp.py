"""Settings of multi-token prediction: a base class of the section `model`, as those of mixtures are."""

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting

MAX_DEPTHS = 64


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig:
    """Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2)."""

    mtp_num_layers: Optional[int] = setting(
        None,
        "multi-token prediction: layers after the model, of which each predicts one token further; default none",
        maximum=MAX_DEPTHS,
    )
    mtp_loss_scaling_factor: float = setting(
        0.1, "multi-token prediction: factor of the mean of the layers' losses, which is added to the loss"
    )
