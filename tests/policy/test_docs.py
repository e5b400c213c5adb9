"""Documents name only what exists: links, files, flags and commands. Tables that repeat the code agree with it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented_commands import DOCS, commands_in
from syntax_trees import tree_of
from test_import_levels import CORE, LEVELS, MAY_IMPORT, WINGS

from megafp8.cli.completion import subcommand_parser
from megafp8.cli.main import SUBCOMMANDS
from megafp8.config import flags, grouped_experts, megatron_flags, mixture, rules
from megafp8.config.model_shapes import PRESETS
from megafp8.config.rules import cuda_graph
from megafp8.config.schema import moe as schema
from megafp8.config.schema.setting import Role
from megafp8.config.settings import all_settings, settings_by_flag, settings_by_name, settings_with
from megafp8.recipes import registry
from megafp8.resources import automatic

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import flag_reference

DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS])

LINK = re.compile(r"\]\(([^)#]+)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./]+(?:\.(?:py|sh|md|txt)|/)")
FLAG = re.compile(r"(?<![\w-])--[a-z0-9][\w-]*")
TORCHRUN_FLAGS = {
    "--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port",
    "--shutdown-timeout",
}  # fmt: skip
# Flags of tests/run.sh, pytest, the mutants and the chaos soak.
TEST_FLAGS = {
    "--all", "--all-cases", "--jobs", "--count", "--ignore", "--long", "--write-snapshots", "--collect-only", "--steps",
    "--faults", "--fork",
}  # fmt: skip
BENCHMARK_FLAGS = {"--shape", "--rounds", "--modes", "--mode", "--extra"}  # of gpu_train.py and accelerate_loop.py
HUB_FLAGS = {"--local-dir"}  # of hf
LM_EVAL_FLAGS = {"--model", "--model_args", "--tasks", "--include_path", "--output_path"}  # of lm_eval
# Of `accelerate launch`, which docs/from_accelerate.md maps to flags.
ACCELERATE_FLAGS = {
    "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port", "--fp8_backend",
}  # fmt: skip
# Of pip, docker and others, in docs/install.md.
INSTALL_FLAGS = {
    "--no-build-isolation", "--force-reinstall", "--no-deps", "--no-cache-dir", "--rm", "--gpus",
    "--ipc", "--shm-size", "--python", "--gres", "--user",
}  # fmt: skip
# Of Slurm's commands, in docs/clusters.md and docs/tutorials/megatron_to_slurm.md.
SLURM_FLAGS = {
    "--job-name", "--signal", "--requeue", "--cpu-bind", "--kill-on-bad-exit", "--container-image", "--nodes",
    "--ntasks-per-node", "--gpus-per-node", "--nproc-per-node", "--me",
}  # fmt: skip
# Made by a run, not shipped.
RUN_FILES = {
    "records.jsonl",
    "config.json",
    "tensorboard/",
    "iter_0000200/",
    "latest_checkpointed_iteration.txt",
    "run_state.json",
    "restarts.jsonl",
    "report.md",
    "comparison.md",
    "logs/watchdog/",
}
MOST_WORDS_FOR_USERS = 30_000
BLOCK = re.compile(r"^```(\w*)\n.*?^```$", re.MULTILINE | re.DOTALL)
NOT_FOR_USERS = {"architecture.md", "flag_reference.md"}
MOST_FILES_TO_READ, MOST_LINES_TO_READ = 35, 7000
WORLD_SIZE = 1
# Functions with the problems of a CUDA graph, as they begin an error.
PROBLEMS = re.compile(r"_\w+_problems|_dropout_rates|grouped_expert_problems|expert_ranks_flag")

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each command in the bash blocks of a document."""
    return (shlex.split(command.text) for command in commands_in(path))


def table_rows(text: str, header: str) -> list[list[str]]:
    """Cells of the table whose header line begins with `header`."""
    lines = text[text.index(f"| {header}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def without_outputs(text: str) -> str:
    """A page without its blocks that have no language."""
    return BLOCK.sub(lambda block: block[0] if block[1] else "", text)


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """The flags of all commands, also those of settings that are gone, and of torchrun."""
    parsers = [subcommand_parser(name) for name in SUBCOMMANDS]
    for parser in parsers:  # also those of subcommands of a subcommand, which this appends
        nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parsers += [each for action in nested for each in action.choices.values()]
    texts = (parser.format_help() for parser in parsers)  # examples there name flags of other programs
    of_commands = {flag for parser in parsers for flag in parser._option_string_actions}
    of_commands |= {flag for text in texts for flag in FLAG.findall(text)}
    return of_commands | set(settings_by_flag()) | TORCHRUN_FLAGS | TEST_FLAGS


@each_document
def test_links_exist(path: Path) -> None:
    links = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@each_document
def test_files_exist(path: Path) -> None:
    spans = {span for span in CODE_SPAN.findall(path.read_text(encoding="utf-8")) if FILE.fullmatch(span)} - RUN_FILES
    folders = (
        ROOT,
        ROOT / "megafp8",
        ROOT / "megafp8/quantization",
        ROOT / "megafp8/models",
        ROOT / "megafp8/training",
    )
    folders += (ROOT / "tests",)
    assert [span for span in spans if not any((folder / span).exists() for folder in folders)] == []


@each_document
def test_flags_of_documents_are_known(path: Path, known_flags: set[str]) -> None:
    mentioned = set(FLAG.findall(path.read_text(encoding="utf-8"))) - ACCELERATE_FLAGS - LM_EVAL_FLAGS - HUB_FLAGS
    others = mentioned - known_flags - BENCHMARK_FLAGS - INSTALL_FLAGS - SLURM_FLAGS - set(megatron_flags.REPLACED)
    unknown = [flag for flag in others if megatron_flags.classify(flag, []) is None]
    assert unknown == []


@each_document
def test_commands_name_scripts_that_exist(path: Path) -> None:
    for words in commands(path):
        scripts = [word for word in words if word.endswith((".py", ".sh")) and not word.startswith("-")]
        assert [script for script in scripts if not (ROOT / script).exists()] == []


@each_document
def test_subcommands_in_sentences_exist(path: Path) -> None:
    spans = [span.split() for span in CODE_SPAN.findall(path.read_text(encoding="utf-8"))]
    names = {words[1] for words in spans if words[:1] == ["megafp8"] and len(words) > 1}
    assert names - set(SUBCOMMANDS) <= {"--help", "--version"}


def test_flags_that_replace_those_of_others_are_parsed() -> None:
    """Those with values; flags alone are names of flags (`test_flags_are_answered`)."""
    text = (ROOT / "docs/from_accelerate.md").read_text(encoding="utf-8")
    spans = [span for span in CODE_SPAN.findall(text) if span.startswith("--") and " " in span]
    flags_of_runs = [shlex.split(span) for span in spans if not set(span.split()) & (TORCHRUN_FLAGS | ACCELERATE_FLAGS)]
    assert len(flags_of_runs) > 15
    for words in flags_of_runs:
        assert flags.parse_with_problems(words)[1] == [], words


@each_document
def test_training_commands_break_no_rule(path: Path) -> None:
    for words in commands(path):
        program = next((word for word in ("pretrain_gpt.py", "pretrain") if word in words), None)
        of_a_reader = "FLAGS" in words or "--config" in words or any(word.startswith("$") for word in words)
        if program is None or of_a_reader:
            continue
        parsed, problems = flags.parse_with_problems(words[words.index(program) + 1 :])
        problems += rules.setting_problems(parsed.config, parsed.world_size or WORLD_SIZE)
        assert problems == [], " ".join(words)


def test_the_readme_has_training_commands() -> None:
    assert any("--train-iters" in words for words in commands(ROOT / "README.md"))


def test_the_recipe_table_agrees_with_the_code() -> None:
    rows = table_rows((ROOT / "README.md").read_text(encoding="utf-8"), "`--recipe`")
    recipes = {row[0].split("`")[1]: row[2:] for row in rows if row[0].startswith("`")}
    choices = (settings_by_name()[f"precision.{name}"].choices for name in ("fp8_recipe", "fp4_recipe"))
    assert set(recipes) == {recipe for some in choices for recipe in some}
    for recipe, (*native, emulated) in recipes.items():
        is_native = registry.get(recipe).is_native
        expected = ["native" if is_native(capability) else "no" for capability in ((8, 9), (9, 0), (10, 0))]
        assert native == expected, recipe
        assert emulated == "**yes**", recipe


def test_the_table_of_runs_without_graphs_names_every_problem() -> None:
    """A problem starts with its flag."""
    functions = [
        node
        for module in (cuda_graph, grouped_experts, mixture)
        for node in tree_of(Path(module.__file__)).body
        if isinstance(node, ast.FunctionDef) and PROBLEMS.fullmatch(node.name)
    ]
    literals = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Constant))
    texts = (node.value for node in literals if isinstance(node.value, str) and node.value.startswith("--"))
    named = {flag for text in texts for flag in FLAG.findall(text)}
    assert {
        "--hidden-dropout",
        "--tp-comm-overlap",
        "--moe-apply-probs-on-input",
        "--expert-model-parallel-size",
    } <= named
    rows = table_rows((ROOT / "docs/differences.md").read_text(encoding="utf-8"), "excluded")
    assert named - {flag for row in rows for flag in FLAG.findall(row[1])} == set()


def test_every_automatic_setting_is_documented() -> None:
    rows = table_rows((ROOT / "docs/differences.md").read_text(encoding="utf-8"), "setting")
    documented = {flag for row in rows for flag in FLAG.findall(row[0])}
    flags_of = [setting.flags[0] for setting in settings_with(Role.AUTOMATIC).values()]
    wanted = {flag for flag in flags_of if flag != "--cross-entropy-fusion-impl"}  # with --cross-entropy-loss-fusion
    assert wanted - documented == set()
    elsewhere = {"--use-nccl-ub"}  # in `device/nccl_buffers.py`, with all that it needs
    assert wanted - elsewhere - set(FLAG.findall(automatic.__doc__ or "")) == set()


def test_the_flag_reference_is_current() -> None:
    """docs/flag_reference.py writes it from the declarations of the settings."""
    written = (ROOT / "docs/flag_reference.md").read_text(encoding="utf-8")
    assert written == flag_reference.page(), "run: python docs/flag_reference.py"
    named = set(FLAG.findall(written))
    assert {flag for each in all_settings() if not each.former for flag in (*each.flags, *each.off)} <= named


def test_getting_started_names_every_preset() -> None:
    text = (ROOT / "docs/getting_started.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if name not in text and not name.startswith("tiny")] == []


def test_the_page_of_mixtures_names_every_flag_of_theirs() -> None:
    text = (ROOT / "docs/mixture_of_experts.md").read_text(encoding="utf-8")
    sections = (schema.MixtureModelConfig, schema.MixtureParallelConfig)
    names = {field.name for section in sections for field in dataclasses.fields(section)}
    known = [setting for setting in settings_by_name().values() if setting.name.split(".")[-1] in names]
    assert len(known) == len(names)
    assert {flag for setting in known for flag in setting.flags} <= set(FLAG.findall(text))


def test_the_architecture_lists_the_levels() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = table_rows(text, "level")
    assert {row[1].strip("`").rstrip("/").removesuffix(".py"): int(row[0]) for row in rows} == LEVELS
    wings = {row[0]: CODE_SPAN.findall(row[1]) for row in table_rows(text, "group")}
    assert wings == {CORE: []} | {wing: [f"{part}/" for part in parts] for wing, parts in WINGS.items()}
    allowed = {row[0]: row[2] for row in table_rows(text, "group")}
    texts = {CORE: "no wing", "cli": "all"}
    assert allowed == {group: texts.get(group, ", ".join(sorted(others))) for group, others in MAY_IMPORT.items()}


def test_the_core_is_read_in_an_afternoon() -> None:
    """The reading order of CONTRIBUTING: files that exist, and not too many lines."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [ROOT / row[0].strip("`") for row in table_rows(text, "file to read")]
    assert [path for path in paths if not path.is_file()] == [] and len(set(paths)) == len(paths)
    assert len(paths) <= MOST_FILES_TO_READ
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) <= MOST_LINES_TO_READ


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000


def test_user_pages_are_short_and_have_no_evidence() -> None:
    """Words as `wc -w` counts them, without outputs in tutorials, generated pages and those of developers."""
    pages = [path for path in DOCS if path.parent.name != "dev" and path.name not in NOT_FOR_USERS]
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *pages)}
    assert [path.name for path, text in texts.items() if "NOT RUN" in text or "`tests/" in text] == []
    read = (without_outputs(text) if path.parent.name == "tutorials" else text for path, text in texts.items())
    assert sum(len(text.split()) for text in read) <= MOST_WORDS_FOR_USERS


def test_commands_of_tutorials_count_and_outputs_do_not() -> None:
    page = "Run:\n\n```bash\nmegafp8 doctor\n```\n\n```\ntraining can run\n```\n\nDone.\n"
    assert without_outputs(page).split() == ["Run:", "```bash", "megafp8", "doctor", "```", "Done."]


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {link for link in LINK.findall(index) if "/" not in link} == pages
