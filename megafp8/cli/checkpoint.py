"""List, verify, show, prune, hash, seal and merge checkpoints.

    megafp8 checkpoint list runs/first
    megafp8 checkpoint verify runs/first
    megafp8 checkpoint show runs/first --ckpt-step 200 --tensors
    megafp8 checkpoint prune runs/first --ckpt-keep 3
    megafp8 checkpoint hash runs/first
    megafp8 checkpoint seal runs/old/iter_0000200
    megafp8 checkpoint merge runs/first --ckpt-step 800 900 1000 --output runs/merged
    megafp8 checkpoint merge runs/a/iter_0000900 runs/b/iter_0001000 --output runs/merged

A folder is a run's (its --save) or a single checkpoint's. `list` compares file sizes, and hashes of small files, with
the manifest. `verify` reads every byte. `show` prints settings and tensors. `prune` verifies the
newest checkpoints, then deletes all others. `hash` prints a hash that is equal for equal contents, in every layout of
files. `seal` writes a manifest for a checkpoint that has none. `merge` averages FP32 main weights, or the weights of
checkpoints without optimizer state, over checkpoints of any layouts. It writes the mean in FP32, without optimizer
state: start a run from it with --pretrained-checkpoint, with --load and --finetune, or with --load and --no-load-optim
at the newest step. `merge --ema` writes the moving average of a run with --ema-decay in place of its weights. `list`,
`verify`, `show`, `hash` and `merge` include the run's `non_persistent` folder; give a --non-persistent-global-ckpt-dir
as a folder of its own. Exit status: 0; 64 for wrong flags; 74 for a checkpoint that is damaged, missing or refused. No
code from a checkpoint is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint import directory, manifest
from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.cli.common import build_command_parser, bytes_bar, install_patches, returns_exit_status
from megafp8.errors import CheckpointError, ConfigError
from megafp8.utils.files import path_argument
from megafp8.utils.strict_json import parse_json


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
        ("list", "checkpoints of a run, with size and state"),
        ("verify", "read every byte and compare with the manifests"),
        ("show", "settings and tensors of one checkpoint"),
        ("prune", "delete all but the newest"),
        ("hash", "SHA-256 of the contents of one checkpoint: weights, optimizer, scales, random states, progress"),
        ("seal", "write a manifest for a checkpoint that has none"),
        ("merge", "average the weights of several checkpoints into one"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument(
            "folder", type=path_argument, nargs="+" if name == "merge" else None,
            help="folder of a run or of one checkpoint",
        )  # fmt: skip
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        if name in ("verify", "show", "hash"):
            text = "this step only" if name == "verify" else "this step (default: the newest)"
            command.add_argument("--ckpt-step", type=int, metavar="N", help=text)
        if name == "show":
            command.add_argument("--tensors", action="store_true", help="name every tensor")
        if name == "prune":
            add_flags(
                command,
                int_flag("--ckpt-keep", "number of newest checkpoints to keep, at least 1", required=True),
                switch("--set-aside", "also delete .corrupt and .retired checkpoints"),
                switch("--dry-run", "print what would be deleted and stop"),
            )  # fmt: skip
        if name == "merge":
            add_flags(
                command,
                int_flag("--ckpt-step", "checkpoints to merge, of each folder of a run", nargs="+"),
                path_flag("--output", "run folder to create", required=True, metavar="OUT"),
                argument("--weights", "how much each checkpoint counts, by the order of their steps: all the same; "
                         "newer ones more, in proportion to their place; as a 1-sqrt decay of the rate over equal "
                         "intervals would have it, the oldest most; an exponential mean (default: uniform)",
                         default="uniform", choices=("uniform", "linear", "1-sqrt", "ema")),
                switch("--ema", "take the moving averages of runs with --ema-decay in place of their weights; then one "
                       "checkpoint is enough"),
                float_flag("--ema-decay", "factor between a checkpoint and the next newer one, with --weights ema "
                           "(default: 0.9)", metavar="D"),
            )  # fmt: skip
    return parser


def checkpoints_of(folder: Path, step: Optional[int] = None) -> list[Path]:
    """Return the checkpoints of a folder, ascending by step. Of the same step, the one that a run resumes from is last.

    Raises:
        ConfigError: `step` is given for the folder of a single checkpoint.
        CheckpointError: there are no checkpoints.
    """
    if is_one(folder):
        if step is not None:
            raise ConfigError(f"--ckpt-step {step}: {folder} is one checkpoint: give the run's folder or no step")
        return [folder]
    folders = [(each, series) for series in series_of(folder) for each in directory.list_steps(series)]
    found = [(each, directory.checkpoint_path(series, each)) for each, series in folders]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint; give the folder that a run had as --save")
    found.sort(key=lambda pair: pair[0])
    if chosen := [path for each, path in found if step in (None, each)]:
        return chosen
    raise CheckpointError(f"--ckpt-step {step}: {folder} holds steps: {', '.join(str(each) for each, _ in found)}")


def is_one(folder: Path) -> bool:
    """Whether a folder has the name of a single checkpoint."""
    return manifest.FOLDER_NAME.fullmatch(folder.resolve().name) is not None


def series_of(folder: Path) -> tuple[Path, ...]:
    """Return the folders of a run's checkpoints: its own, and that of --non-persistent-save-interval."""
    return folder, folder / directory.NON_PERSISTENT


def set_aside_in(folder: Path) -> list[Path]:
    """Return the checkpoints that runs renamed as damaged or retired."""
    found = (path for suffix in (directory.CORRUPT, directory.RETIRED) for path in folder.glob(f"iter_*{suffix}*"))
    return sorted(path for path in found if path.is_dir())


def state_of(path: Path, with_hashes: bool) -> dict[str, Any]:
    """Return the state of a checkpoint, as --json prints it."""
    problems = manifest.find_damage(path, with_hashes)
    state: dict[str, Any] = {"path": str(path), "is_whole": not problems, "problems": problems}
    try:
        content = manifest.read_manifest(path)
    except CheckpointError:
        return state
    return state | {
        "step": content.step, "consumed_samples": content.consumed_samples, "layout": content.layout,
        "saved_at": content.saved_at, "num_files": len(content.files), "num_bytes": content.num_bytes,
        **({"merged": content.merged} if content.merged else {}),
    }  # fmt: skip


def print_states(states: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(states, indent=1))
        return
    for state in states:
        facts = "no manifest"
        if "step" in state:
            layout = "pp{} tp{} dp{}".format(*state["layout"])
            facts = (
                f"{state['consumed_samples']:,} samples  {state['num_bytes'] / 1e9:.3f} GB in {state['num_files']} "
                f"files  {layout}  {state['saved_at']}"
            )
        print(f"{'whole' if state['is_whole'] else 'DAMAGED':7}  {state['path']}  {facts}")
        for problem in state["problems"]:
            print(f"         {problem}")


def list_(options: argparse.Namespace) -> int:
    states = [state_of(path, with_hashes=False) for path in checkpoints_of(options.folder)]
    print_states(states, options)
    if not options.json:
        for series in series_of(options.folder):
            for path in set_aside_in(series):
                print(f"aside    {path}")
    return status_of(states)


def verify(options: argparse.Namespace) -> int:
    states = [state_of(path, with_hashes=True) for path in checkpoints_of(options.folder, options.ckpt_step)]
    print_states(states, options)
    return status_of(states)


def status_of(states: Sequence[dict[str, Any]]) -> int:
    """Return the exit status: 0 if all checkpoints are complete."""
    return 0 if all(state["is_whole"] for state in states) else CheckpointError.exit_status


def show(options: argparse.Namespace) -> int:
    install_patches()
    from megafp8.checkpoint.metadata import read_contents
    from megafp8.checkpoint.weight_ema import PREFIX as EMA_PREFIX

    path = checkpoints_of(options.folder, options.ckpt_step)[-1]
    state = state_of(path, with_hashes=False)
    if not state["is_whole"]:
        print_states([state], options)
        return status_of([state])
    contents = read_contents(path)
    if options.json:
        settings = {"config": parse_json(contents.config), "num_parameters": contents.num_parameters}
        print(json.dumps(state | dataclasses.asdict(contents) | settings, indent=1))
        return status_of([state])
    print_states([state], options)
    average = sum(tensor.num_bytes for tensor in contents.tensors if tensor.name.startswith(EMA_PREFIX))
    optimizer = sum(tensor.num_bytes for tensor in contents.tensors if tensor.name.startswith("optimizer.")) - average
    weights = sum(tensor.num_bytes for tensor in contents.tensors) - optimizer - average
    print(f"weights    {contents.num_parameters:,} elements in {weights / 1e9:.3f} GB")
    print(f"optimizer  {optimizer / 1e9:.3f} GB" if optimizer else "optimizer  none")
    if average:
        print(f"average    {average / 1e9:.3f} GB (--ema-decay)")
    print(f"objects    {', '.join(contents.objects) or 'none'}")
    print_merged(state.get("merged"))
    if contents.samples:
        print(f"samples    {json.dumps(contents.samples, default=str)[:200]}")
    if contents.history.skipped:
        print(f"skipped    {contents.history.summary()}")
    print(f"settings   {contents.config if options.tensors else contents.config[:200] + '...'}")
    for tensor in contents.tensors if options.tensors else ():
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        print(f"  {tensor.name}  [{shape}] {tensor.dtype}, {tensor.num_bytes:,} bytes in {tensor.num_parts} parts")
    return status_of([state])


def prune(options: argparse.Namespace) -> int:
    if options.ckpt_keep < 1:
        raise ConfigError(f"--ckpt-keep {options.ckpt_keep} must be at least 1")
    if is_one(options.folder):
        raise ConfigError(f"{options.folder} is one checkpoint: give the run's folder")
    steps = directory.complete_steps(options.folder)
    remaining, doomed = steps[-options.ckpt_keep :], steps[: -options.ckpt_keep]
    remaining_paths = [directory.checkpoint_path(options.folder, step) for step in remaining]
    damaged = [path.name for path in remaining_paths if manifest.find_damage(path)]
    if doomed and damaged:
        raise CheckpointError(f"{', '.join(damaged)} would be kept and is damaged: nothing is deleted")
    aside = set_aside_in(options.folder) if options.set_aside else []
    if not options.dry_run:
        for step in doomed:
            directory.delete(options.folder, step)
        for path in aside:
            shutil.rmtree(path)
    names = [manifest.folder_name(step) for step in doomed] + [path.name for path in aside]
    if options.json:
        print(json.dumps({"deleted": names, "kept": [path.name for path in remaining_paths]}))
    else:
        print(f"{'would delete' if options.dry_run else 'deleted'} {', '.join(names) or 'nothing'}")
    return 0


def hash_(options: argparse.Namespace) -> int:
    install_patches()
    from megafp8.checkpoint.fingerprint import fingerprint

    path = checkpoints_of(options.folder, options.ckpt_step)[-1]
    manifest.check_complete(path)
    parts = fingerprint(path)
    print(f"hash of {path}", file=sys.stderr)  # standard output is for comparing
    print(json.dumps(parts) if options.json else "\n".join(f"{name:9}  {value}" for name, value in parts.items()))
    return 0


def seal(options: argparse.Namespace) -> int:
    install_patches()
    from megafp8.checkpoint import metadata

    metadata.seal(options.folder)
    print_states([state_of(options.folder, with_hashes=False)], options)
    return 0


def merge(options: argparse.Namespace) -> int:
    decay = 0.9 if options.ema_decay is None else options.ema_decay
    if options.ema_decay is not None and (options.weights != "ema" or not 0 < decay < 1):
        raise ConfigError(f"--ema-decay {decay:g} needs --weights ema, and must be between 0 and 1")
    paths = checkpoints_to_merge(options.folder, options.ckpt_step, 1 if options.ema else 2)
    if is_one(options.output):
        raise ConfigError(f"--output {options.output} has the name of a checkpoint: give the folder of a run")
    if options.output.exists():
        raise ConfigError(f"--output {options.output} exists; give a folder that does not")
    num_bytes = sum(manifest.read_manifest(path).num_bytes for path in paths)
    install_patches()
    from megafp8.checkpoint.convert.safetensors_files import publish_folder
    from megafp8.checkpoint.merge import plan_merge

    with bytes_bar(num_bytes, desc="verify") as bar:
        plan = plan_merge(paths, options.weights, decay, options.ema, bar.update)
    with publish_folder(options.output) as folder, bytes_bar(plan.num_bytes, desc="merge") as bar:
        name = plan.write(folder, bar.update).name
    if options.json:
        print(json.dumps({"path": str(options.output / name), "merged": plan.provenance()}))
    else:
        print(f"{options.output / name} is the mean in FP32, without optimizer state")
        print_merged(plan.provenance())
    return 0


def checkpoints_to_merge(folders: Sequence[Path], wanted: Optional[Sequence[int]], minimum: int) -> list[Path]:
    """Return the checkpoints of `merge`: those that are given as folders, and the wanted steps of runs' folders.

    Args:
        minimum: number of checkpoints, 1 or 2.

    Raises:
        ConfigError: they are fewer, one is given twice, or steps are missing or given for one checkpoint.
        CheckpointError: one is absent.
    """
    paths = []
    for folder in folders:
        if wanted is None and not is_one(folder):
            raise ConfigError(f"{folder} is the folder of a run: give --ckpt-step, or folders of checkpoints")
        paths += [checkpoints_of(folder, step)[-1] for step in wanted or (None,)]
    if len({path.resolve() for path in paths}) < max(minimum, len(paths)):
        names, least = ", ".join(map(str, paths)), "one checkpoint" if minimum == 1 else "two checkpoints"
        raise ConfigError(f"{names}: give at least {least}, each of them once (--ckpt-step, or more folders)")
    return paths


def print_merged(merged: Optional[Mapping[str, Any]]) -> None:
    """Print what a merged checkpoint was made of; nothing for another."""
    if merged is None:
        return
    print(f"merged     --weights {merged['weights']}, megafp8 {merged['version']}")
    for source in merged["sources"]:
        facts = f"step {source['step']}, {source['averaged']}, manifest {source['sha256']}"
        print(f"  {source['coefficient']:.6f}  {source['path']}  {facts}")


COMMANDS = {
    "list": list_, "verify": verify, "show": show, "prune": prune, "hash": hash_, "seal": seal, "merge": merge,
}  # fmt: skip


@returns_exit_status("checkpoint")
def main(argv: Sequence[str]) -> int:
    """Run a subcommand and return its exit status."""
    options = build_parser().parse_args(argv)
    folders = options.folder if isinstance(options.folder, list) else [options.folder]
    for folder in folders:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder")
    return COMMANDS[options.command](options)
