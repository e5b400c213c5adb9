"""Runs and checkpoints of two versions of megatron-core are the same. Run by `tests/other_engine.sh`.

The tested version comes first on the path, the other one is installed. Each trains the same steps, and resumes the
checkpoint of the other. The code of a step differs in what it calls, not in what it computes: losses, weights and
moments are equal to the bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest
from engine_runs import failure_of

from megafp8.analysis.runs import load_run
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.fingerprint import fingerprint

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"installed": str(ROOT), "tested": os.environ.get("PYTHONPATH", "")}
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 63 "
    "--make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --mock-data --eval-iters 0 "
    "--log-interval 1 --seed 7 --train-iters 3 --num-threads 1 --num-workers 0 --bf16"
)
SHARDED = "--use-distributed-optimizer"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 0.001 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32"
)
LATENT = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-layernorm"
KINDS = {
    "dropout": (1, f"{SHARDED} --attention-dropout 0.1 --hidden-dropout 0.1"),
    "fp8-weights": (1, f"{SHARDED} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"),
    "delayed-scaling": (2, f"{SHARDED} {TENSOR} --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4"),
    "experts": (2, f"{SHARDED} {EXPERTS} --expert-model-parallel-size 2"),
    "experts-tensor-ranks": (2, f"{EXPERTS} {TENSOR} --expert-tensor-parallel-size 1"),
    "fp8-lm": (2, "--fp8-lm-level O3"),
    "fsdp2": (2, "--use-torch-fsdp2 --no-gradient-accumulation-fusion"),
    "fsdp2-fp8-gradients": (2, "--use-torch-fsdp2 --no-gradient-accumulation-fusion --grad-reduce-in-fp8"),
    "latent-attention-multi-token": (2, f"{SHARDED} {LATENT} --mtp-num-layers 1 {TENSOR}"),
    "latent-attention-plain-queries": (1, f"{SHARDED} {LATENT.replace('--q-lora-rank 24', '')}"),
    "norms-across-heads": (2, f"{SHARDED} --qk-layernorm --qk-layernorm-across-heads {TENSOR}"),
}
STEPS, SAVED_STEP = 3, 2


def run(engine: str, *words: str) -> str:
    """Run a script with one of the two versions; its output."""
    command = [sys.executable, *words]
    environment = os.environ | {"PYTHONPATH": ENGINES[engine]}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(engine: str, folders: dict[str, Path], sources: Optional[dict[str, Path]] = None) -> None:
    """Train the kinds that have folders, from the beginning or from the saved step of another run.

    Args:
        folders: of the runs, by kind.
        sources: folders whose checkpoints are resumed.
    """
    runs: list[tuple[int, list[str]]] = []
    for kind, folder in folders.items():
        world_size, flags = KINDS[kind]
        words = f"{MODEL} {flags} --save {folder}"
        if sources is None:
            words += f" --save-interval {SAVED_STEP}"
        else:
            words += f" --load {sources[kind]} --ckpt-step {SAVED_STEP}"
        runs.append((world_size, words.split()))
    path = next(iter(folders.values())).parent / "runs.json"
    path.parent.mkdir()
    if engine == "tested":  # the one of this process
        assert not (failure := failure_of(runs)), failure
        return
    path.write_text(json.dumps(runs), encoding="utf-8")
    run(engine, "tests/engine_runs.py", str(path))


Folders = dict[str, dict[str, Path]]


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> list[str]:
    """Those whose tests are not skipped."""
    tests = [item for item in request.session.items if item.path == request.path]
    called = [
        item.callspec.params for item in tests if hasattr(item, "callspec") and not item.get_closest_marker("skip")
    ]
    return [kind for kind in KINDS if any(params.get("kind") == kind for params in called)]


@pytest.fixture(scope="module")
def trained(kinds: list[str], tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folders of the kinds, by engine."""
    root = tmp_path_factory.mktemp("trained")
    folders = {engine: {kind: root / engine / kind for kind in kinds} for engine in ENGINES}
    for engine in ENGINES:
        train(engine, folders[engine])
    return folders


@pytest.fixture(scope="module")
def resumed(kinds: list[str], trained: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folders of the runs that resumed a checkpoint of the other engine, by the engine that resumed."""
    root = tmp_path_factory.mktemp("resumed")
    folders = {engine: {kind: root / engine / kind for kind in kinds} for engine in ENGINES}
    for engine, other in zip(ENGINES, reversed(ENGINES), strict=True):
        train(engine, folders[engine], trained[other])
    return folders


def numbers(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {step.step: (step.loss, step.grad_norm) for step in load_run(folder).steps}


def test_two_versions_are_on_the_path() -> None:
    code = "from megafp8.mcore.patches import core_version; print(core_version())"
    assert [run(engine, "-c", code).strip() for engine in ENGINES] == ["0.16.1", "0.19.2"]


@pytest.mark.parametrize("kind", KINDS)
def test_both_versions_train_alike(kind: str, trained: Folders) -> None:
    installed, tested = (trained[engine][kind] for engine in ENGINES)
    assert numbers(installed) == numbers(tested) and len(numbers(tested)) == STEPS
    assert fingerprint(installed / f"iter_{SAVED_STEP:07}") == fingerprint(tested / f"iter_{SAVED_STEP:07}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_travel_between_the_versions(engine: str, kind: str, trained: Folders, resumed: Folders) -> None:
    found, unbroken = resumed[engine][kind], trained[engine][kind]
    assert numbers(found) == {step: values for step, values in numbers(unbroken).items() if step > SAVED_STEP}
    assert fingerprint(found / f"iter_{STEPS:07}") == fingerprint(unbroken / f"iter_{STEPS:07}")
