"""How to install what is missing, for a source tree and for an installed wheel."""

from __future__ import annotations

from pathlib import Path

SOURCE_TREE = Path(__file__).resolve().parents[2]


def pip_install(extra: str) -> str:
    """The command that installs an extra of `setup.py`, such as `pip install -e '.[data]'`.

    A wheel has no `setup.py` beside the package. Its name is enough there: pip finds it installed and adds the extra.
    """
    if (SOURCE_TREE / "setup.py").is_file():
        return f"pip install -e '.[{extra}]'"
    return f"pip install 'megafp8[{extra}]'"


def transformer_engine_command(version: str = "") -> str:
    """The command that installs Transformer Engine for the torch that is installed.

    Its torch extension is a source package: it takes a prebuilt wheel for this very torch, or compiles. In pip's build
    isolation it would do so for the newest torch.

    Args:
        version: a version; "" takes the extra `te`, which any supported one satisfies.
    """
    if not version:
        return pip_install("te").replace("install", "install --no-build-isolation", 1)
    return f"pip install --no-build-isolation 'transformer-engine[pytorch]=={version}'"
