"""Whether a run has what other settings need, as the declaration of a setting names it: `--optimizer muon`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megafp8.config import derived
from megafp8.config.muon import is_muon
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_flag, value_of

# Where more than the value in the text will do.
_FEATURES: Mapping[str, Callable[[RunConfig], bool]] = MappingProxyType(
    {
        "--cuda-graph-impl local": lambda config: config.training.cuda_graph_impl != "none",
        "--optimizer muon": is_muon,
        "--position-embedding-type rope": lambda config: config.model.position_embedding_type in ("rope", "yarn"),
        "--recompute-granularity full": lambda config: derived.recompute_granularity(config.training) == "full",
        "--recompute-granularity selective": lambda config: (
            derived.recompute_granularity(config.training) == "selective"
        ),
    }
)


def has_feature(config: RunConfig, feature: str) -> bool:
    """Whether a run has a feature, given as a flag with or without a value.

    Without a value, any value but the default, 0 and False will do.
    """
    if feature in _FEATURES:
        return _FEATURES[feature](config)
    flag, *words = feature.split()
    setting = settings_by_flag()[flag]
    value = value_of(config, setting.name)
    if words:
        return str(setting.written(value)) == words[0]
    return bool(value) and value != setting.default
