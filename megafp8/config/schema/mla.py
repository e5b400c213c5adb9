"""Settings of multi-latent attention: a base class of the section `model`, as those of mixtures are."""

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting

MAX_CHANNELS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-latent attention (DeepSeek-AI 2024, DeepSeek-V2)."""

    multi_latent_attention: bool = setting(
        False, "use multi-latent attention: queries, keys and values from low-rank projections of the hidden states"
    )
    q_lora_rank: Optional[int] = setting(
        None,
        "multi-latent attention: width of the compressed queries; default: queries are not compressed",
        maximum=MAX_CHANNELS,
    )
    kv_lora_rank: int = setting(
        32, "multi-latent attention: width of the compressed keys and values", maximum=MAX_CHANNELS
    )
    qk_head_dim: int = setting(
        128, "multi-latent attention: channels without rotary embedding of a query or key head", maximum=MAX_CHANNELS
    )
    qk_pos_emb_head_dim: int = setting(
        64, "multi-latent attention: channels with rotary embedding of a query or key head", maximum=MAX_CHANNELS
    )
    v_head_dim: int = setting(128, "multi-latent attention: channels of a value head", maximum=MAX_CHANNELS)
    rope_type: Optional[str] = setting(
        None, "rotary embedding of multi-latent attention; default yarn", choices=("rope", "yarn")
    )
