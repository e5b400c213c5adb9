"""Whether a run has what other settings need, as the declaration of a setting names it: `--num-experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from megafp8.config import derived
from megafp8.config.expert_layers import is_mixture
from megafp8.config.schema import RunConfig
from megafp8.config.settings import Setting, settings_by_flag, value_of

VALUE = "VALUE"
"""Stands for the value of a flag in the features of `given_flags`."""

# Where more than the value in the text will do.
_FEATURES: Mapping[str, Callable[[RunConfig], bool]] = MappingProxyType(
    {
        "--cuda-graph-impl local": lambda config: config.training.cuda_graph_impl != "none",
        "--eval-iters": lambda config: config.training.eval_iters > 0,
        "--max-skipped-steps": lambda config: config.training.max_skipped_steps > 0,
        "--num-experts": lambda config: is_mixture(config.model),
        "--pipeline-model-parallel-size": lambda config: config.parallel.pipeline_model_parallel_size > 1,
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


def given_flags(config: RunConfig, features: Iterable[str]) -> dict[str, str]:
    """Those of some features that a run has, as messages show them.

    Args:
        features: flags with a value or `VALUE`, or alone: any value but the default will do.
            Several are joined by " with ".

    Returns:
        The texts by feature. Every `VALUE` is replaced.
    """
    shown_as = {}
    for feature in features:
        parts = [_given_flag(config, part) for part in feature.split(" with ")]
        if all(parts):
            shown_as[feature] = " with ".join(parts)
    return shown_as


def _given_flag(config: RunConfig, feature: str) -> str:
    flag, _, word = feature.partition(" ")
    setting = settings_by_flag()[flag]
    value = value_of(config, setting.name)
    if word not in ("", VALUE) or flag in _FEATURES:
        has_it = has_feature(config, feature if word != VALUE else flag)
    elif setting.type is bool:
        has_it = value is (flag not in setting.off)
    else:
        has_it = value != setting.default
    if not has_it:
        return ""
    return setting.as_flag(shown(config, setting)) if word == VALUE else feature


def changed_flag(config: RunConfig, setting: Setting) -> str:
    """The flag of a setting that differs from its default, else an empty string.

    False differs from True only: what is off needs nothing.
    """
    value = value_of(config, setting.name)
    is_default = value == setting.default or (value is False and setting.default is None)
    return "" if is_default else setting.as_flag(shown(config, setting))


def shown(config: RunConfig, setting: Setting) -> object:
    """The value of a setting as messages show it."""
    value = value_of(config, setting.name)
    return int(value) if isinstance(value, float) and value.is_integer() else setting.written(value)
