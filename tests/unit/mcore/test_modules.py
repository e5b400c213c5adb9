"""The spec of an MLP, as every supported megatron-core calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megafp8.mcore.modules import mlp_spec, mlp_submodules


class Recorder(MLP):
    """Keeps what it is built with."""

    def __init__(self, **options: Any):
        self.__dict__["options"] = options


def test_an_mlp_is_built_with_its_linears_group_and_arguments() -> None:
    spec = mlp_spec(Recorder, "linears", returns_input=True)
    if isinstance(spec, ModuleSpec):
        built = build_module(spec, config="config", tp_group="tp")
    else:
        built = spec(config="config", pg_collection=SimpleNamespace(tp="tp"), is_mtp_layer=False, name=None)
    expected = {"config": "config", "submodules": "linears", "tp_group": "tp", "returns_input": True}
    assert {name: value for name, value in built.options.items() if name != "name"} == expected


def test_linears_of_megatron_cores_own_spec() -> None:
    assert mlp_submodules(get_gpt_layer_local_spec().submodules.mlp).linear_fc1 is ColumnParallelLinear
