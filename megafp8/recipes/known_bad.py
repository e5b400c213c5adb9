"""Settings that are known to be worse than a recipe, by which the stability suite is itself tested.

Each has a good form, from which it differs in one property of its scales, formats or rounding. All are emulated only.
"""

from __future__ import annotations

from megafp8.recipes import mxfp8, nvfp4, tensorwise

_MXFP8, _NVFP4, _TENSORWISE = (module.RECIPE.name for module in (mxfp8, nvfp4, tensorwise))

KNOWN_BAD = {
    "mxfp8-floor": (_MXFP8, f"--fp8-format e4m3 --fp8-recipe {_MXFP8} --fp8-e8m0-floor"),
    "e5m2-forward": (_TENSORWISE, f"--fp8-format e5m2 --fp8-recipe {_TENSORWISE}"),
    "nvfp4-plain": (_NVFP4, f"--fp4-format e2m1 --fp4-recipe {_NVFP4} --no-fp4-hadamard --no-fp4-stochastic-rounding"),
    "tensorwise-margin-3": (
        _TENSORWISE, f"--fp8-format hybrid --fp8-recipe {_TENSORWISE} --fp8-tensorwise-margin -3",
    ),
}  # fmt: skip
"""Name to (recipe that is the good form, flags)."""
