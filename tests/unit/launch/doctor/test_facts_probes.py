"""Probes on simulated folders, commands and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megafp8.launch.doctor import facts as probes


def install(folder: Path, name: str, version: str) -> None:
    """Metadata of a package in a site-packages folder."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def command(folder: Path, name: str, text: str, status: int = 0) -> None:
    """A command that prints a text."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def test_packages_are_those_that_an_import_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("first", "2.20.2"), ("second", "1.0")):
        install(tmp_path / folder, "Transformer_Engine", version)
    (tmp_path / "first" / "broken-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert probes.installed_packages() == {"transformer-engine": "2.20.2"}
    assert probes.modules_to_try({"transformer-engine": "2"})[-1] == "transformer_engine.pytorch"


def test_broken_modules_are_found_in_a_real_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing module, one that raises, one that ends the process, and one that is never reached."""
    sources = {"fine": "", "raises": "raise OSError('libx.so: no such file')", "dies": "import os; os._exit(9)"}
    for name, text in sources.items():
        (tmp_path / f"{name}_module.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = probes.import_facts(["fine_module", "no_such_module", "raises_module", "dies_module", "fine_module2"])
    assert facts["import_errors"] == {
        "fine_module": None,
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
        "raises_module": "OSError: libx.so: no such file",
        "dies_module": "the process exited with status 9",
    }


def test_a_module_that_never_returns_is_slow_and_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)"
    (tmp_path / "hangs_module.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Impatient(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            """The timeout expires once the import has started."""
            if timeout is None:
                return super().wait()
            while not (tmp_path / "begun").exists():
                assert self.poll() is None
                time.sleep(0.02)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    facts = probes.import_facts(["hangs_module"])
    assert facts["import_errors"] == {} and facts["slow_imports"] == {"hangs_module": probes.IMPORT_TIMEOUT_S}
    assert facts["load_per_core"] >= 0


def test_output_of_libraries_is_ignored() -> None:
    lines = ["Warning: old", "3", json.dumps({"begin": "torch"}), "[]", json.dumps({"module": "torch", "error": None})]
    assert probes.read_facts([*lines, json.dumps({"torch_cuda": "13.0"})], 0) == {
        "import_errors": {"torch": None}, "torch_cuda": "13.0",
    }  # fmt: skip


def test_driver_errors_are_not_reported_as_torch_errors() -> None:
    lines = [json.dumps(fact) for fact in ({"begin": "torch"}, {"module": "torch", "error": None}, {"begin": "CUDA"})]
    died, late = probes.read_facts(lines, -11), probes.read_facts(lines, None)
    assert died == {"import_errors": {"torch": None}, "cuda_error": "the process exited with status -11"}
    assert late["import_errors"] == {"torch": None} and late["slow_imports"] == {"CUDA": probes.IMPORT_TIMEOUT_S}


def test_import_probes_need_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """If /tmp is full, Python finds no folder for temporary files."""

    def full(*_: object, **__: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    for name in ("TemporaryFile", "NamedTemporaryFile", "gettempdir"):
        monkeypatch.setattr(probes.tempfile, name, full)
    assert probes.import_facts(["json"])["import_errors"] == {"json": None}


def test_driver_and_links_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command(tmp_path, "nvidia-smi", "580.159.04, NVIDIA H200\n580.159.04, NVIDIA H200")
    assert probes.driver_facts() == ("580.159.04", ("NVIDIA H200", "NVIDIA H200"), None)
    rows = (
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity", "GPU0\t X \tNV18\tPIX\t0-47", "GPU1\tSYS\t X \tPHB\t0-47",
        "NIC0\tPIX\tPHB\t X",
    )  # fmt: skip
    command(tmp_path, "nvidia-smi", "\n".join(rows))
    assert probes.gpu_links() == ("NV18", "SYS")
    command(tmp_path, "nvidia-smi", "NVIDIA-SMI has failed", status=9)
    assert probes.driver_facts() == (None, (), "nvidia-smi exited with status 9: NVIDIA-SMI has failed")
    assert probes.gpu_links() == ()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    monkeypatch.setattr(probes, "COMMAND_TIMEOUT_S", 0.05)
    assert probes.driver_facts() == (None, (), "nvidia-smi did not finish within 0.05 s")
    (tmp_path / "nvidia-smi").write_text("no program", encoding="utf-8")
    version, names, error = probes.driver_facts()
    assert (version, names, error) == (None, (), "nvidia-smi cannot be started: Exec format error")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert probes.driver_facts() == (None, (), None)


@pytest.mark.parametrize(
    ("folder", "is_nvidias"), [("apex/multi_tensor_apply", True), ("apex/lib", False), ("other", False)]
)
def test_nvidias_apex_is_recognized_by_its_modules(
    folder: str, is_nvidias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "apex/__init__.py").write_text("raise ImportError", "utf-8") if "apex" in folder else None
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert probes.has_nvidias_apex() == is_nvidias


def library(folder: Path, name: str) -> str:
    folder.mkdir(parents=True)
    (folder / name).touch()
    return str(folder)


def test_cudnn_is_searched_where_transformer_engine_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = library(tmp_path / "home" / "lib", "libcudnn.so.9")
    cuda = library(tmp_path / "cuda" / "lib64", "libcudnn.so")
    library(tmp_path / "stubs" / "lib" / "stubs", "libcudnn.so")
    search_path = library(tmp_path / "search", "libcudnn.so")
    versioned = library(tmp_path / "versioned", "libcudnn.so.9")
    monkeypatch.setattr(probes, "DEFAULT_CUDA_FOLDER", str(tmp_path / "no_cuda"))
    bin_folder = tmp_path / "bin"
    command(bin_folder, "ldconfig", "1 libs found\n\tlibcudnn.so.9 (libc6,x86-64) => /a/libcudnn.so.9")
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")

    def found(**environment: str):
        return probes.find_cudnn(environment)

    assert found() is None, "the loader has no unversioned name, so the wheel's is taken"
    assert found(LD_LIBRARY_PATH=versioned) is None
    assert found(LD_LIBRARY_PATH=f"{versioned}:{search_path}") == (search_path, "LD_LIBRARY_PATH")
    assert found(CUDNN_PATH=str(tmp_path / "stubs"), LD_LIBRARY_PATH=search_path) == (search_path, "LD_LIBRARY_PATH")
    assert found(CUDA_HOME=str(tmp_path / "cuda")) == (cuda, "CUDA_HOME")
    both = {"CUDNN_HOME": str(tmp_path / "home"), "CUDA_HOME": str(tmp_path / "cuda")}
    assert found(**both) == (home, "CUDNN_HOME")
    command(bin_folder, "ldconfig", "\tlibcudnn.so (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcudnn.so")
    assert found() == ("/usr/lib/x86_64-linux-gnu", "the loader's cache")


def test_the_wheels_cudnn_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert probes.wheel_cudnn() is None
    library(tmp_path / "nvidia" / "cudnn" / "lib", "libcudnn.so.9")
    assert probes.wheel_cudnn() == str(tmp_path / "nvidia" / "cudnn")


def test_disk_probe_leaves_the_disk_unchanged(tmp_path: Path) -> None:
    facts = probes.disk_facts(str(tmp_path))
    assert facts["disk_free_bytes"] > 0 and facts["disk_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert "disk_error" in probes.disk_facts(str(tmp_path / "missing"))


def test_the_compiler_of_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "mycc", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.compiler({}) is None
    assert probes.compiler({"CC": "mycc"}) == str(tmp_path / "mycc")
    command(tmp_path, "clang", "")
    assert probes.compiler({}) == str(tmp_path / "clang")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_megatron_core_without_triton_is_broken_beside_a_gpu_only(has_gpu: bool) -> None:
    """megatron-core 0.19 imports Triton, and its import is patched on a CPU."""
    reports = [{"begin": "megatron.core"}, {"module": "megatron.core", "error": probes.NO_TRITON}]
    lines = [json.dumps(report) for report in ([{"gpus": [{"name": "H200"}]}] if has_gpu else []) + reports]
    assert probes.read_facts(lines, 0)["import_errors"] == {"megatron.core": probes.NO_TRITON if has_gpu else None}
