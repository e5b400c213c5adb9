"""What a change of structure must not change: answers to command lines, and the numbers of short runs.

    python tests/frozen/frozen.py lines    writes answers.json.xz: settings, output and status of 209 dry runs
    python tests/frozen/frozen.py runs     writes runs.json.xz: losses, fields of records and checkpoints of 24 runs

Answers are the same on every machine. Losses are not: vector units and libraries round at other points. They are
recorded with the rounding of a few operations of torch (`rounding_of_this_machine`), and compared where that is equal.
A change that means to change an answer records it again; its difference is then part of the change.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "command_lines")]

import torch
from command_line_corpus import read_lines
from forked_runs import prepare, run_forked

TARGETS = ("cpu", "h200", "b200")
ANSWERS, RUNS, FUZZED = HERE / "answers.json.xz", HERE / "runs.json.xz", HERE / "fuzzed.jsonl"
VERSIONS = re.compile(r"\b\d+\.\d+\.\d+(\+\w+)?\b")

# ---- answers to command lines -------------------------------------------------------------------------------------


def command_lines() -> dict[str, tuple[list[str], int]]:
    """Words and number of ranks by name: Megatron-LM's command lines, and random ones."""
    lines = {f"megatron {line.number}": (list(line.argv), line.num_gpus) for line in read_lines()}
    rows = [json.loads(row) for row in FUZZED.read_text(encoding="utf-8").splitlines()]
    return lines | {f"fuzzed {number}": (row["argv"], row["ranks"]) for number, row in enumerate(rows)}


def answer(words: list[str], ranks: int, target: str) -> dict[str, Any]:
    """Status, resolved settings and everything that is printed for one dry run, in an empty folder of this process."""
    from megafp8.cli import pretrain
    from megafp8.training import checks

    resolved, output = {}, io.StringIO()
    plain = checks.check

    def check(*arguments: Any) -> Any:
        checked = plain(*arguments)
        from megafp8.config.settings import to_dict

        resolved.update(to_dict(checked.invocation.config))
        return checked

    checks.check = check
    try:
        with (
            tempfile.TemporaryDirectory(prefix="line_") as folder,
            contextlib.chdir(folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of libraries, with paths and only once
            status = pretrain.main([*words, "--dry-run", "--world-size", str(ranks), "--target", target])
            text = output.getvalue().replace(folder, "FOLDER")
    finally:
        checks.check = plain
    lines = [line for line in VERSIONS.sub("VERSION", text).splitlines() if "on this machine: " not in line]
    return {"status": status, "settings": resolved, "text": lines}


def answers(names: list[str]) -> dict[str, dict[str, Any]]:
    """Answers for every target."""
    lines = command_lines()
    return {f"{name} on {target}": answer(*lines[name], target) for name in names for target in TARGETS}


def without_defaults(found: dict[str, dict[str, Any]], defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Answers whose settings are those that differ from the defaults."""
    return {
        name: each | {"settings": {
            section: changed for section, values in each["settings"].items()
            if (changed := values if not isinstance(values, dict) else
                {field: value for field, value in values.items() if value != defaults[section][field]})
        }}
        for name, each in found.items()
    }  # fmt: skip


def default_settings() -> dict[str, Any]:
    """Every setting's default."""
    from megafp8.config.schema import RunConfig
    from megafp8.config.settings import to_dict

    return json.loads(json.dumps(to_dict(RunConfig())))


def current_answers(names: list[str]) -> dict[str, dict[str, Any]]:
    """Answers of the code as it is, as JSON reads them."""
    prepare()
    return without_defaults(json.loads(json.dumps(answers(names))), default_settings())


def recorded_answers() -> dict[str, Any]:
    """The recorded defaults and answers."""
    return read(ANSWERS)


# ---- numbers of short runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShortRun:
    """A run of four steps, saved after the second and the last.

    Attributes:
        ranks: number of gloo ranks.
        flags: beside `COMMON`.
    """

    ranks: int
    flags: str


COMMON = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 32 --vocab-size 63 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --make-vocab-size-divisible-by 64 --tokenizer-type "
    "NullTokenizer --position-embedding-type rope --mock-data --num-workers 0 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --lr-warmup-iters 1 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--train-iters 4 --save-interval 2 --no-progress-bar --num-threads 1"
)
FP8, EXPERTS = "--bf16 --fp8-format hybrid --fp8-recipe", (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01"
)  # fmt: skip
LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32"
SHORT_RUNS = {
    "fp32": ShortRun(1, ""),
    "bf16-dropout": ShortRun(1, "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1"),
    "tensorwise": ShortRun(1, f"{FP8} tensorwise"),
    "delayed": ShortRun(1, f"{FP8} delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max"),
    "blockwise": ShortRun(1, f"{FP8} blockwise"),
    "mxfp8": ShortRun(1, f"{FP8} mxfp8"),
    "rowwise": ShortRun(1, f"{FP8} rowwise"),
    "nvfp4": ShortRun(1, "--bf16 --fp4-format e2m1"),
    "quartet2": ShortRun(1, "--bf16 --fp4-format e2m1 --fp4-recipe quartet2 --hidden-size 128 --micro-batch-size 4"),
    "map": ShortRun(1, f"{FP8} tensorwise --precision output_layer=mxfp8 --precision layers.0.linear_fc2=bf16"),
    "statistics": ShortRun(1, f"{FP8} delayed --fp8-log-interval 2 --fp8-what-if mxfp8"),
    "guard": ShortRun(1, f"{FP8} tensorwise --fp8-guard warn --fp8-guard-interval 2"),
    "async-save": ShortRun(1, f"{FP8} tensorwise --async-save"),
    "latent": ShortRun(1, f"{FP8} tensorwise {LATENT}"),
    "mixture": ShortRun(1, f"{FP8} tensorwise {EXPERTS}"),
    "distributed-optimizer": ShortRun(2, f"{FP8} delayed --use-distributed-optimizer"),
    "tensor-parallel": ShortRun(2, f"{FP8} tensorwise --tensor-model-parallel-size 2 --sequence-parallel"),
    "expert-parallel": ShortRun(2, f"{FP8} tensorwise {EXPERTS} --expert-model-parallel-size 2"),
    "muon": ShortRun(2, f"{FP8} tensorwise --optimizer muon --use-distributed-optimizer"),
    "fsdp2": ShortRun(2, f"{FP8} tensorwise --use-torch-fsdp2"),
    "fp8-gradients": ShortRun(2, "--bf16 --grad-reduce-in-fp8 --grad-reduce-fp8-error-feedback"),
    "fp8-lm-o2": ShortRun(2, "--bf16 --use-distributed-optimizer --fp8-lm-level O2"),
    "fp8-weights": ShortRun(2, f"{FP8} tensorwise --use-distributed-optimizer --fp8-param-gather"),
    "virtual-stages": ShortRun(
        4, f"{FP8} tensorwise --num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    ),
}


def results_of(run: ShortRun, folder: Path) -> dict[str, Any]:
    """Losses and gradient norms as Python writes them, names of fields of the records, and the checkpoint's hash."""
    from megafp8.checkpoint.fingerprint import fingerprint

    ended = run_forked(run.ranks, f"{COMMON} {run.flags} --save {folder}", timeout_s=120)
    assert set(ended.statuses) == {0}, ended.report()
    records = [json.loads(row) for path in folder.rglob("records.jsonl") for row in path.read_text().splitlines()]
    fields = dict[str, set[str]]()
    for record in records:
        fields.setdefault(record.get("kind", "?"), set()).update(record)
    steps = [record for record in records if record.get("kind") == "step"]
    return {
        "loss": [repr(record["loss"]) for record in steps],
        "grad_norm": [repr(record["grad_norm"]) for record in steps],
        "fields": {kind: sorted(names) for kind, names in sorted(fields.items())},
        "checkpoint": fingerprint(folder / "iter_0000004"),
        "files": sorted(path.name for path in (folder / "iter_0000004").rglob("*") if path.is_file()),
    }


def rounding_of_this_machine() -> str:
    """A hash of what torch computes here in the operations of a step, which depends on vector units and libraries."""
    generator, digest = torch.Generator().manual_seed(1), hashlib.sha256(torch.__version__.encode())
    for size in (32, 64, 128, 192):
        a, b = (torch.randn(64, size, generator=generator) for _ in range(2))
        for dtype in (torch.float32, torch.bfloat16):
            x, y = a.to(dtype), b.to(dtype)
            results = (
                x @ y.T, x.T @ y, torch.softmax(x, -1), torch.nn.functional.silu(x),
                x.float().square().mean(-1).rsqrt(),
                torch.nn.functional.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]), x.sum(),
                torch.exp(x.float()), torch.sin(x.float()), x.float().sqrt(),
            )  # fmt: skip
            for each in results:
                digest.update(each.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def recorded_runs() -> dict[str, Any]:
    """Results by rounding and name of the run."""
    return read(RUNS) if RUNS.exists() else {}


# ---- recording ----------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The content of a compressed JSON file."""
    return json.loads(lzma.decompress(path.read_bytes()))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a compressed JSON file."""
    path.write_bytes(lzma.compress(json.dumps(content, sort_keys=True).encode(), preset=9))


def main(kind: str) -> None:
    """Record answers or runs of the code as it is."""
    prepare()
    if kind == "lines":
        recorded = {"defaults": default_settings(), "answers": current_answers(list(command_lines()))}
        write(ANSWERS, recorded)
        return
    recorded = recorded_runs()
    here = recorded.setdefault(rounding_of_this_machine(), {})
    with tempfile.TemporaryDirectory() as folder:
        for name, run in SHORT_RUNS.items():
            here[name] = results_of(run, Path(folder) / name)
            print(name, here[name]["loss"][-1], flush=True)
    write(RUNS, recorded)


if __name__ == "__main__":
    if sys.argv[1:] not in (["lines"], ["runs"]):
        sys.exit(__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    main(sys.argv[1])
