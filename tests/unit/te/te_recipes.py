"""A program of `test_te_without_cuda.py`: flags become Transformer Engine's recipes, field by field, and unsupported
settings are refused. (Its recipes silently accept unknown arguments.)"""

from typing import Any

import te_without_cuda  # noqa: F401  (first)
from megatron.core import fp4_utils, fp8_utils
from transformer_engine.common import recipe as te_recipe

from megafp8.config import flags, rules
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.device import capability
from megafp8.device.capability import TARGETS
from megafp8.mcore.config import build_transformer_config
from megafp8.te import patches

patches.install()
RUN = (
    "--model-preset tiny --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 1e-3 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --transformer-impl transformer_engine"
)
FP8 = "--fp8-format hybrid --fp8-recipe"


def recipe_of(text: str) -> Any:
    """The recipe of Transformer Engine's linears in a run."""
    config = flags.parse(f"{RUN} {text}".split()).config
    assert not (problems := rules.setting_problems(config, 1)), problems
    core = build_transformer_config(config, TRANSFORMER_ENGINE, on_cuda=False)
    return fp4_utils.get_fp4_recipe(core) if core.fp4 else fp8_utils.get_fp8_recipe(core)


def refused(text: str, target: str, why: str) -> None:
    """By the settings alone, or by a machine."""
    config = flags.parse(f"{RUN} {text}".split()).config
    found = [*rules.setting_problems(config, 1), *capability.capability_problems(config, TARGETS[target])]
    assert any(why in problem for problem in found), (text, found)


for name, kind in (
    ("tensorwise", te_recipe.Float8CurrentScaling),
    ("blockwise", te_recipe.Float8BlockScaling),
    ("mxfp8", te_recipe.MXFP8BlockScaling),
):
    for format_name, expected in (("e4m3", te_recipe.Format.E4M3), ("hybrid", te_recipe.Format.HYBRID)):
        made = recipe_of(f"--fp8-format {format_name} --fp8-recipe {name}")
        assert type(made) is kind and made.fp8_format is expected, made
        assert made.backward_override is None
        refused(f"--fp8-format {format_name} --fp8-recipe {name} --no-fp8-wgrad", "h200", "--no-fp8-wgrad")

delayed = recipe_of(f"{FP8} delayed --fp8-margin 2 --fp8-amax-history-len 7 --fp8-amax-compute-algo most_recent")
assert isinstance(delayed, te_recipe.DelayedScaling)
assert (delayed.margin, delayed.amax_history_len, delayed.amax_compute_algo) == (2, 7, "most_recent")
assert delayed.fp8_format is te_recipe.Format.HYBRID and delayed.reduce_amax
assert not delayed.fp8_dpa and not delayed.fp8_mha
default = recipe_of(f"{FP8} delayed")
assert (default.margin, default.amax_history_len, default.amax_compute_algo) == (0, 1, "most_recent"), default

nvfp4 = recipe_of("--fp4-format e2m1")
assert type(nvfp4) is te_recipe.NVFP4BlockScaling and nvfp4.fp4_format is te_recipe.Format.E2M1
assert nvfp4.fp4_quant_fwd_inp.random_hadamard_transform and nvfp4.fp4_quant_fwd_weight.fp4_2d_quantization
assert nvfp4.fp4_quant_bwd_grad.random_hadamard_transform and nvfp4.fp4_quant_bwd_grad.stochastic_rounding

for text in (f"{FP8} mxfp8", "--fp4-format e2m1"):
    refused(text, "h200", "10.0")
    config = flags.parse(f"{RUN} {text}".split()).config
    assert not capability.capability_problems(config, TARGETS["b200"])
