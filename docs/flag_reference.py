"""Write flag_reference.md, all training flags, from their declarations: python docs/flag_reference.py"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from megafp8.config import help as flag_help
from megafp8.config.flag_parser import cached_parser
from megafp8.config.settings import Setting, all_settings

PAGE = FOLDER / "flag_reference.md"
HEAD = """\
# Flag reference

All flags of `megafp8 pretrain`, generated from the code. `megafp8 pretrain --help` shows the common ones, and
`--help FLAG` everything about one, also about flags that only Megatron-LM has. The last column compares with
Megatron-LM: the same flag with the same meaning, a difference, or no such flag (none).
[Differences from Megatron-LM](differences.md) explains the differences.
"""


def page() -> str:
    """The Markdown of the page."""
    return HEAD + "".join(map(group_table, flag_help.GROUPS))


def group_table(group: str) -> str:
    """Heading and table of the flags of a group."""
    title, more = flag_help.GROUPS[group]
    link = f" See [{more}]({more})." if more else ""
    rows = [row(setting) for setting in all_settings() if setting.group == group and not setting.former]
    options = flag_help.option_rows(cached_parser(), group)
    rows = [(f"`{names}`", escaped(text), "none") for names, text in options] + rows
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return (
        f"\n## {group.capitalize()}\n\n{title[0].upper()}{title[1:]}.{link}\n\n"
        f"| flag | meaning | Megatron-LM |\n|---|---|---|\n{lines}"
    )


def escaped(cell: str) -> str:
    """A text in a table, with asterisks and bars as they are."""
    return re.sub(r"([|*])", r"\\\1", cell)


def row(setting: Setting) -> tuple[str, str, str]:
    """Cells of a flag: names, meaning with values, default and conditions, Megatron-LM's meaning."""
    facts = flag_help.flag_facts(setting)
    value = "" if setting.is_switch else f" {flag_help.value_name(setting, brief=True)}"
    names = ", ".join(f"`{flag}{value}`".replace("|", r"\|") for flag in (*setting.flags, *setting.off))
    text = flag_help.MARKS.get(setting.audience, "") + flag_help.description(setting)
    values = [] if setting.is_switch or facts["value"] == "text" else [facts["value"]]
    values.append(f"default: {facts['default']}")
    values += [f"needs {facts['needs']}"] if "needs" in facts else []
    megatron = "none" if setting.megatron == flag_help.OWN else facts["Megatron-LM"]
    return names, f"{escaped(text)}<br>*{escaped('; '.join(values))}*", megatron


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
