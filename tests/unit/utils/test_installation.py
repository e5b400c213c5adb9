"""The command that installs an extra, from a source tree and from a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.utils import installation


def test_the_command_fits_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.pip_install("data") == "pip install -e '.[data]'"
    assert installation.transformer_engine_command() == "pip install --no-build-isolation -e '.[te]'"
    monkeypatch.setattr(installation, "SOURCE_TREE", tmp_path)
    assert installation.pip_install("data") == "pip install 'megafp8[data]'"
