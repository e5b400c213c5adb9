#!/usr/bin/env python3
"""What checkpoints hold, and whether they are whole.

    python tools/checkpoint.py list runs/first
    python tools/checkpoint.py verify runs/first
    python tools/checkpoint.py show runs/first --ckpt-step 200 --tensors
    python tools/checkpoint.py prune runs/first --ckpt-keep 3
    python tools/checkpoint.py hash runs/first
    python tools/checkpoint.py seal runs/old/iter_0000200

A folder is a run's (what it had as --save) or a single checkpoint's. `list` compares sizes with the manifest, `verify`
reads every byte, `show` tells settings and tensors, `prune` deletes all but the newest checkpoints once it has verified
those, `hash` tells whether two checkpoints hold the same however their files are cut, `seal` writes a manifest for a
checkpoint that has none. `list`, `verify`, `show` and `hash` also look into the run's `non_persistent`; a
--non-persistent-global-ckpt-dir has to be given as a folder of its own. Exit status: 0; 64 for flags that do not fit;
74 when something is damaged, missing or refused. Nothing here runs code of a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from megafp8.checkpoint.directory import (
    CORRUPT,
    NON_PERSISTENT,
    RETIRED,
    checkpoint_path,
    delete,
    named_steps,
    saved_steps,
)
from megafp8.checkpoint.manifest import NAME, damage_seen, read_manifest
from megafp8.errors import CheckpointError, ConfigError, Megafp8Error
from megafp8.utils.files import path_argument
from megafp8.utils.strict_json import parse_json

DAMAGED = CheckpointError.exit_status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
        ("list", "checkpoints of a run, with size and state"),
        ("verify", "read every byte and compare with the manifests"),
        ("show", "settings and tensors of one checkpoint"),
        ("prune", "delete all but the newest"),
        ("hash", "SHA-256 of what one checkpoint holds: weights, optimizer, scales, random states, progress"),
        ("seal", "write a manifest for a checkpoint that has none"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("folder", type=path_argument, help="of a run, or of one checkpoint")
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        if name in ("verify", "show", "hash"):
            text = "this step only" if name == "verify" else "this step; default the newest"
            command.add_argument("--ckpt-step", type=int, metavar="N", help=text)
        if name == "show":
            command.add_argument("--tensors", action="store_true", help="name every tensor")
        if name == "prune":
            command.add_argument("--ckpt-keep", type=int, required=True, metavar="N", help="how many, at least 1")
            command.add_argument("--set-aside", action="store_true", help="also delete .corrupt and .retired ones")
            command.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    return parser


def checkpoints_of(folder: Path, step: Optional[int] = None) -> list[Path]:
    """The checkpoints that a folder stands for, ascending by step; of one step, what a run resumes from is last.

    Raises:
        ConfigError: a step of a single checkpoint's folder.
        CheckpointError: there are none.
    """
    if is_one(folder):
        if step is not None:
            raise ConfigError(f"--ckpt-step {step}: {folder} is one checkpoint: give the run's folder or no step")
        return [folder]
    found = [(each, checkpoint_path(place, each)) for place in series_of(folder) for each in named_steps(place)]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint")
    found.sort(key=lambda pair: pair[0])
    if chosen := [path for each, path in found if step in (None, each)]:
        return chosen
    raise CheckpointError(f"--ckpt-step {step}: {folder} holds steps: {', '.join(str(each) for each, _ in found)}")


def is_one(folder: Path) -> bool:
    """Whether a folder is a single checkpoint's, by its name."""
    return NAME.fullmatch(folder.resolve().name) is not None


def series_of(folder: Path) -> tuple[Path, ...]:
    """Where a run has checkpoints: its folder, and that of --non-persistent-save-interval."""
    return folder, folder / NON_PERSISTENT


def set_aside_in(folder: Path) -> list[Path]:
    """What a run found damaged, or left behind on going back."""
    found = (path for suffix in (CORRUPT, RETIRED) for path in folder.glob(f"iter_*{suffix}*"))
    return sorted(path for path in found if path.is_dir())


def state_of(path: Path, with_hashes: bool) -> dict[str, Any]:
    """One line of `list` and `verify`."""
    problems = damage_seen(path, with_hashes)
    state: dict[str, Any] = {"path": str(path), "is_whole": not problems, "problems": problems}
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return state
    return state | {
        "step": manifest.step, "consumed_samples": manifest.consumed_samples, "layout": manifest.layout,
        "saved_at": manifest.saved_at, "num_files": len(manifest.files), "num_bytes": manifest.num_bytes,
    }  # fmt: skip


def tell_states(states: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
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


# --- commands ---------------------------------------------------------------------------------------------------------


def list_(options: argparse.Namespace) -> int:
    states = [state_of(path, with_hashes=False) for path in checkpoints_of(options.folder)]
    tell_states(states, options)
    if not options.json:
        for place in series_of(options.folder):
            for path in set_aside_in(place):
                print(f"aside    {path}")
    return status_of(states)


def verify(options: argparse.Namespace) -> int:
    states = [state_of(path, with_hashes=True) for path in checkpoints_of(options.folder, options.ckpt_step)]
    tell_states(states, options)
    return status_of(states)


def status_of(states: Sequence[dict[str, Any]]) -> int:
    """The exit status of what was found."""
    return 0 if all(state["is_whole"] for state in states) else DAMAGED


def show(options: argparse.Namespace) -> int:
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    from megafp8.checkpoint.metadata import read_contents

    path = checkpoints_of(options.folder, options.ckpt_step)[-1]
    contents = read_contents(path)
    state = state_of(path, with_hashes=False)
    if options.json:
        settings = {"config": parse_json(contents.config), "num_parameters": contents.num_parameters}
        print(json.dumps(state | dataclasses.asdict(contents) | settings, indent=1))
        return status_of([state])
    tell_states([state], options)
    optimizer = sum(tensor.num_bytes for tensor in contents.tensors if tensor.name.startswith("optimizer."))
    weights = sum(tensor.num_bytes for tensor in contents.tensors) - optimizer
    print(f"weights    {contents.num_parameters:,} elements in {weights / 1e9:.3f} GB")
    print(f"optimizer  {optimizer / 1e9:.3f} GB" if optimizer else "optimizer  none")
    print(f"objects    {', '.join(contents.objects) or 'none'}")
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
    steps = saved_steps(options.folder)
    kept, doomed = steps[-options.ckpt_keep :], steps[: -options.ckpt_keep]
    damaged = [checkpoint_path(options.folder, step).name for step in kept if damage_seen(path_of(options, step))]
    if doomed and damaged:
        raise CheckpointError(f"{', '.join(damaged)} would be kept and is damaged: nothing is deleted")
    aside = set_aside_in(options.folder) if options.set_aside else []
    if not options.dry_run:
        for step in doomed:
            delete(options.folder, step)
        for path in aside:
            shutil.rmtree(path)
    names = [path_of(options, step).name for step in doomed] + [path.name for path in aside]
    if options.json:
        print(json.dumps({"deleted": names, "kept": [path_of(options, step).name for step in kept]}))
    else:
        print(f"{'would delete' if options.dry_run else 'deleted'} {', '.join(names) or 'nothing'}")
    return 0


def path_of(options: argparse.Namespace, step: int) -> Path:
    return checkpoint_path(options.folder, step)


def hash_(options: argparse.Namespace) -> int:
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    from megafp8.checkpoint.standalone import fingerprint

    path = checkpoints_of(options.folder, options.ckpt_step)[-1]
    parts = fingerprint(path)
    print(f"hash of {path}", file=sys.stderr)  # standard output is for comparing
    print(json.dumps(parts) if options.json else "\n".join(f"{name:9}  {value}" for name, value in parts.items()))
    return 0


def seal(options: argparse.Namespace) -> int:
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    from megafp8.checkpoint.metadata import seal as write_seal

    write_seal(options.folder)
    tell_states([state_of(options.folder, with_hashes=False)], options)
    return 0


COMMANDS: tuple[tuple[str, Callable[[argparse.Namespace], int]], ...] = (
    ("list", list_), ("verify", verify), ("show", show), ("prune", prune), ("hash", hash_),
    ("seal", seal),
)  # fmt: skip


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        if not options.folder.is_dir():
            raise CheckpointError(f"{options.folder}: there is no such folder")
        return dict(COMMANDS)[options.command](options)
    except Megafp8Error as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
