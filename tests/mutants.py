"""Do the tests notice a mistake?  Mutants of the package: random code lines changed, one at a time.

    python tests/mutants.py map --jobs 2                  which test executes which line, and its CPU seconds
    python tests/mutants.py costs                         CPU seconds and lines of each test module
    python tests/mutants.py run --jobs 2 --count 100      each mutant: the first set, then the other tests of its line

`map` runs all tests once (`--all-cases`), with a mark in every statement of the package. `run` changes a line in a
clone of the last commit and runs the tests that execute it, cheapest module first, up to the first failure. Both
continue where they were interrupted. `run` writes a JSON line for each mutant. It prints how many of those that all
tests catch the first set catches, and how many lines were drawn that no test executes, such as GPU-only ones. Tests
started by a new interpreter leave no marks, and a test counts as failed after a time limit, so use a quiet machine.
"""

from __future__ import annotations

import argparse
import ast
import base64
import builtins
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import json
import mmap
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIRST_SET = ROOT / "tests" / "first_set.txt"
MORE_CASES = ROOT / "tests" / "more_cases.txt"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "--all-cases")
Statement = tuple[str, int]


def environment(tree: Path, **others: str) -> dict[str, str]:
    """The variables of a pytest that tests a copy of the project, without GPUs."""
    paths = [str(tree), str(tree / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""} | others


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that can be marked: no docstrings, no imports from the future."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not is_docstring(node) and not is_future(node):
            yield node


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a string, which does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_future(node: ast.stmt) -> bool:
    """Whether it must stay the first statement of its module."""
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def package_statements() -> dict[Statement, int]:
    """A number for the first line of each statement of the package."""
    found: dict[Statement, int] = {}
    for path in sorted((ROOT / "megafp8").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for line in sorted({node.lineno for node in statements(ast.parse(path.read_bytes()))}):
            found[name, line] = len(found)
    return found


# The map: a pytest plugin (python -m pytest -p mutants). Marks are bytes of shared memory: forked ranks write them too.


class Marker(ast.NodeTransformer):
    """Put `__hit__[number] = 1` before each statement."""

    def __init__(self, numbers: dict[int, int]):
        self.numbers = numbers

    def marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        new: list[ast.stmt] = []
        for node in body:
            if not is_docstring(node) and not is_future(node):
                mark = ast.parse(f"__hit__[{self.numbers[node.lineno]}] = 1").body[0]
                new.append(ast.fix_missing_locations(ast.copy_location(mark, node)))
                for part in ast.walk(mark):
                    ast.copy_location(part, node)
            new.append(node)
        return new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                setattr(node, field, self.marked(body))
        return node


class MarkingFinder(importlib.abc.MetaPathFinder):
    """Import the package's modules with marks."""

    def __init__(self) -> None:
        self.numbers: dict[str, dict[int, int]] = {}
        for (name, line), number in package_statements().items():
            self.numbers.setdefault(name, {})[line] = number

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname.split(".")[0] != "megafp8":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            name = str(Path(spec.loader.path).relative_to(ROOT))
            spec.loader = MarkingLoader(fullname, spec.loader.path, self.numbers.get(name, {}))
        return spec


class MarkingLoader(importlib.machinery.SourceFileLoader):
    """Compile a module with marks, beside the cache of bytecode."""

    def __init__(self, fullname: str, path: str, numbers: dict[int, int]):
        super().__init__(fullname, path)
        self.numbers = numbers

    def get_code(self, fullname: str) -> Any:
        tree = Marker(self.numbers).visit(ast.parse(self.get_data(self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)


class Recorder:
    """Lines and CPU seconds of each test. What fixtures execute counts for every test of their module."""

    def __init__(self, output: Path):
        self.output = output
        self.hits = mmap.mmap(-1, len(package_statements()))  # shared with forked processes
        builtins.__hit__ = self.hits  # type: ignore[attr-defined]
        self.tests: dict[str, list[Any]] = {}
        self.fixtures = bytearray(len(self.hits))
        self.failed = False

    def take(self) -> bytes:
        """The marks since the last call."""
        found = self.hits[:]
        self.hits[:] = bytes(len(self.hits))
        return found

    def pytest_collection_finish(self) -> None:
        (self.output / f"imported{os.getpid()}").write_text(packed(self.take()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self.take()
        try:
            return (yield)
        finally:
            self.fixtures = bytearray(join(self.take(), self.fixtures))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= not report.passed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: Optional[pytest.Item]) -> Iterator[None]:
        self.failed, start = False, sum(os.times()[:4])
        result = yield
        if not self.failed:
            self.tests[item.nodeid] = [round(sum(os.times()[:4]) - start, 3), packed(self.take())]
        if nextitem is None or nextitem.path != item.path:
            name = str(item.path.relative_to(ROOT)).replace("/", "__")
            text = json.dumps({"fixtures": packed(self.fixtures), "tests": self.tests})
            (self.output / f"{name}.json").write_text(text)
            self.tests, self.fixtures = {}, bytearray(len(self.hits))
        return result


def join(one: bytes, other: bytes | bytearray) -> bytes:
    """The marks of both."""
    return (int.from_bytes(one, "little") | int.from_bytes(other, "little")).to_bytes(len(one), "little")


def imported_marks(maps: Path) -> bytes:
    """The marks of all imports."""
    return functools.reduce(join, (unpacked(path.read_text()) for path in maps.glob("imported*")))


def packed(marks: bytes) -> str:
    """Marks as text."""
    return base64.b64encode(zlib.compress(marks, 1)).decode()


def unpacked(text: str) -> bytes:
    """Marks of `packed`."""
    return zlib.decompress(base64.b64decode(text))


def pytest_configure(config: pytest.Config) -> None:
    """Mark and record, where this module is a plugin (-p mutants)."""
    if output := os.environ.get("MUTANTS_MAP"):
        config.pluginmanager.register(Recorder(Path(output)))
        sys.meta_path.insert(0, MarkingFinder())


# Mutants. Only the text of the expression is replaced, so that nothing else in the file moves.

OTHER: dict[type, Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """An expression and what replaces it."""

    path: str
    line: int  # of the statement
    start: tuple[int, int]  # line and column, in bytes
    end: tuple[int, int]
    before: str
    after: str

    def apply(self, text: bytes) -> bytes:
        """The module with the mutant."""
        lines = text.splitlines(keepends=True)
        first, last = self.start[0] - 1, self.end[0] - 1
        changed = lines[first][: self.start[1]] + self.after.encode() + lines[last][self.end[1] :]
        return b"".join([*lines[:first], changed, *lines[last + 1 :]])


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a module: comparisons, arithmetic, booleans, constants, conditions and returned values."""
    text = path.read_bytes()
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for statement in statements(tree):
        if statement in typing_only:
            continue
        for node, change in changes(statement):
            first, last = node.lineno, node.end_lineno or node.lineno
            start, end = (first, node.col_offset), (last, node.end_col_offset or 0)
            before = b"".join(lines[first - 1 : last - 1]) + lines[last - 1][: end[1]]
            segment = before[start[1] :].decode()
            yield Mutant(str(path.relative_to(ROOT)), statement.lineno, start, end, segment, f"({change})")


def changes(statement: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
    """The expressions of a statement that can be changed, and what to."""
    condition = getattr(statement, "test", None)
    if condition is not None:
        yield condition, f"not ({ast.unparse(condition)})"
    if isinstance(statement, ast.Return) and statement.value is not None and ast.unparse(statement.value) != "None":
        yield statement.value, "None"
    for node in own_expressions(statement):
        new: Optional[ast.expr] = None
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
            new = ast.Compare(node.left, [OTHER[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
            new = ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
        elif isinstance(node, ast.BoolOp):
            new = ast.BoolOp(OTHER[type(node.op)](), node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            new = node.operand
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            new = ast.Constant(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            new = ast.Constant(node.value + 1)
        if new is not None:
            yield node, ast.unparse(new)


def own_expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions of a statement outside of inner statements, annotations, decorators and f-strings."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name in ("annotation", "returns", "decorator_list") or isinstance(child, (ast.stmt, ast.JoinedStr)):
                continue
            if isinstance(child, ast.AST):
                if isinstance(child, ast.expr):
                    yield child
                if not isinstance(child, (ast.ExceptHandler, ast.match_case)):  # they contain statements
                    yield from own_expressions(child)


# The run.


@dataclass
class TimedTest:
    """A test that passes without mutants."""

    name: str
    module: str
    seconds: float

    @property
    def set(self) -> str:
        """`first`: the first set; `others`: what `tests/run.sh --all` adds; `more`: what `--all-cases` adds to that."""
        if self.name in more_cases():
            return "more"
        taken, left_out = first_set()
        is_taken = self.module in taken or any(self.module.startswith(f"{path}/") for path in taken)
        return "first" if is_taken and self.module not in left_out else "others"


@functools.lru_cache
def more_cases() -> set[str]:
    """The tests that run only with `--all-cases`."""
    return set(MORE_CASES.read_text(encoding="utf-8").splitlines())


@functools.lru_cache
def first_set() -> tuple[set[str], set[str]]:
    """Files and folders of the first set, and files left out of the folders."""
    lines = FIRST_SET.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    left_out = {word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    return set(words) - left_out, left_out


def relevant_tests(maps: Path, chosen: list[Mutant]) -> dict[Mutant, list[TimedTest]]:
    """The tests that execute the line of each mutant; for a line executed by imports, those that use its module."""
    numbers = package_statements()
    spans: dict[str, list[int]] = {}
    for (path, _), number in numbers.items():
        spans.setdefault(path, []).append(number)
    imported = imported_marks(maps)
    found: dict[Mutant, list[TimedTest]] = {mutant: [] for mutant in chosen}
    for file in sorted(maps.glob("*.json")):
        content = json.loads(file.read_text())
        module, fixtures = file.stem.replace("__", "/"), unpacked(content["fixtures"])
        for name, (seconds, text) in content["tests"].items():
            marks = unpacked(text)
            for mutant, tests in found.items():
                number, span = numbers[mutant.path, mutant.line], spans[mutant.path]
                uses = any(marks[span[0] : span[-1] + 1]) or any(fixtures[span[0] : span[-1] + 1])
                if marks[number] or fixtures[number] or (imported[number] and uses):
                    tests.append(TimedTest(name, module, seconds))
    return found


def caught(tests: list[TimedTest], tree: Path, limit_s: float) -> tuple[bool, float, str]:
    """Whether a test fails: cheapest module first, as many as fit into the limit. Also the seconds and the failure."""
    costs: Counter[str] = Counter()
    for test in tests:
        costs[test.module] += test.seconds
    names, total = [], 0.0
    for test in sorted(tests, key=lambda test: (costs[test.module], test.module)):
        if total + test.seconds <= limit_s:
            names.append(test.name)
            total += test.seconds
    if not names:
        return False, 0.0, ""
    (tree / "mutant_tests").write_text("\n".join(names))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-xq",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "--all-cases",
        "@mutant_tests",
    ]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=120 + 5 * total,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, time.monotonic() - start, "timeout"
    failures = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.MULTILINE)
    failure = failures[0] if failures else done.stdout[-300:]
    return done.returncode != 0, time.monotonic() - start, failure if done.returncode else ""


def judge(mutant: Mutant, tests: list[TimedTest], tree: Path, limit_s: float) -> dict[str, Any]:
    """One line of the result."""
    line: dict[str, Any] = dataclasses.asdict(mutant) | {"result": "not executed", "tests": len(tests)}
    path = tree / mutant.path
    original = path.read_bytes()
    path.write_bytes(mutant.apply(original))
    try:
        for name in ("first", "others", "more"):
            chosen = [test for test in tests if test.set == name]
            is_caught, seconds, failure = caught(chosen, tree, limit_s)
            line |= {f"{name}_s": round(seconds, 1), f"{name}_tests": len(chosen)}
            if tests:
                line["result"] = "survived"
            if is_caught:
                return line | {"result": name, "failure": failure}
    finally:
        path.write_bytes(original)
    return line


def executed_lines(maps: Path) -> set[Statement]:
    """The lines that any test executes."""
    marks = imported_marks(maps)
    for file in maps.glob("*.json"):
        content = json.loads(file.read_text())
        for text in [content["fixtures"], *(test[1] for test in content["tests"].values())]:
            marks = join(marks, unpacked(text))
    return {line for line, number in package_statements().items() if marks[number]}


def choose(count: int, seed: int, executed: set[Statement]) -> tuple[list[Mutant], int]:
    """Mutants of random code lines that the tests execute, and how many lines were met that they do not."""
    lines: dict[Statement, list[Mutant]] = {}
    for path in sorted((ROOT / "megafp8").rglob("*.py")):
        for mutant in mutants_of(path):
            lines.setdefault((mutant.path, mutant.line), []).append(mutant)
    generator = random.Random(seed)
    order = generator.sample(sorted(lines), len(lines))
    chosen: list[Mutant] = []
    for met, line in enumerate(order):
        if len(chosen) == count:
            return chosen, met - count
        mutant = generator.choice(lines[line])
        if line in executed:
            chosen.append(mutant)
    return chosen, len(order) - len(chosen)


def copy_project(tree: Path) -> None:
    """A clone of the last commit, or a copy of the files where there is no repository. Some tests look for `.venv`."""
    if (ROOT / ".git").exists():
        clone = ["git", "clone", "--quiet", "--shared", "--config", "advice.detachedHead=false", ROOT, tree]
        subprocess.run(clone, check=True)
    else:
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv", "runs", "__pycache__"))
    if (ROOT / ".venv").exists():
        (tree / ".venv").symlink_to(ROOT / ".venv")


def run(arguments: argparse.Namespace) -> None:
    """Judge the mutants that have no line of output yet, and print the shares."""
    maps, output = Path(arguments.map), Path(arguments.output)
    chosen, unexecuted = choose(arguments.count, arguments.seed, executed_lines(maps))
    tests = relevant_tests(maps, chosen)
    done = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    key = ("path", "start", "after")
    finished = {json.dumps([line[name] for name in key]) for line in done}
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in chosen:
        if json.dumps([getattr(mutant, name) for name in key]) not in finished:
            waiting.put(mutant)
    lock = threading.Lock()

    def work(number: int) -> None:
        tree = Path(arguments.trees) / str(number)
        if not tree.exists():
            copy_project(tree)
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            line = judge(mutant, tests[mutant], tree, arguments.limit_s)
            with lock, output.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
                done.append(line)
                print(f"{len(done)}/{len(chosen)} {line['result']:9} {mutant.path}:{mutant.line}", flush=True)

    parallel(arguments.jobs, work)
    results = Counter(line["result"] for line in done)
    both = results["first"] + results["others"]
    print(
        f"{results['first']} of the {both + results['more']} mutants that all tests catch are caught by the first set,"
    )
    print(f"{both} by the first set and what tests/run.sh --all adds to it")
    print(f"{results['survived']} survived; {unexecuted} more lines are executed by no test")


def record(arguments: argparse.Namespace) -> None:
    """Run the test modules that have no map yet."""
    maps = Path(arguments.map)
    maps.mkdir(parents=True, exist_ok=True)
    waiting: queue.SimpleQueue[list[Path]] = queue.SimpleQueue()
    folders: dict[Path, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        wanted = not arguments.paths or any(name.startswith(start) for start in arguments.paths)
        if wanted and not (maps / f"{name.replace('/', '__')}.json").exists() and "gpu" not in path.parts:
            folders.setdefault(path.parent, []).append(path)
    for modules in folders.values():
        size = 12 if "unit" in modules[0].parts else 3  # an import of everything takes as long as ten modules of units
        for first in range(0, len(modules), size):
            waiting.put(modules[first : first + size])

    def work(number: int) -> None:
        variables = environment(ROOT, MUTANTS_MAP=str(maps.resolve()))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
            "--all-cases",
            "-p",
            "mutants",
        ]
        while True:
            try:
                modules = waiting.get_nowait()
            except queue.Empty:
                return
            with (maps / f"log{number}").open("a") as log:
                subprocess.run([*command, *modules], cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
            print(f"{time.strftime('%H:%M:%S')} {' '.join(path.stem for path in modules)}", flush=True)

    parallel(arguments.jobs, work)


def costs(arguments: argparse.Namespace) -> None:
    """Print the CPU seconds of each test module, its lines, and those that no test of the first set executes."""
    rows, first = [], 0
    for file in sorted(Path(arguments.map).glob("*.json")):
        content = json.loads(file.read_text())
        module, lines = file.stem.replace("__", "/"), int.from_bytes(unpacked(content["fixtures"]), "little")
        seconds = 0.0
        for cost, text in content["tests"].values():
            seconds += cost
            lines |= int.from_bytes(unpacked(text), "little")
        is_first = TimedTest("", module, 0).set == "first"
        first |= lines * is_first
        rows.append((seconds, module, is_first, lines))
    print("seconds  lines  others  set    module")
    for seconds, module, is_first, lines in sorted(rows, reverse=True):
        others = (lines & ~first).bit_count()
        print(f"{seconds:7.1f} {lines.bit_count():6} {others:7}  {'first' if is_first else '':5}  {module}")
    totals = [sum(row[0] for row in rows if row[2] is is_first) for is_first in (True, False)]
    print(f"{totals[0]:.0f} CPU s in the first set, {totals[1]:.0f} in the others")


def parallel(jobs: int, work: Callable[[int], None]) -> None:
    """`work(number)` on so many threads."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("map", record), ("costs", costs), ("run", run)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--map", default="runs/mutants/map", help="folder of the map")
        command.add_argument("--jobs", type=int, default=2, help="processes at a time")
    commands.choices["map"].add_argument("paths", nargs="*", help="only test modules whose path begins so")
    command.add_argument("--count", type=int, default=100)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--limit-s", type=float, default=240, help="CPU seconds of tests for a mutant in each set")
    command.add_argument("--trees", default="/tmp/mutants", help="folder of the copies, one a job")
    command.add_argument("--output", default="runs/mutants/results.jsonl")
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
