"""The package itself: its import, its stubs, its docstrings, its files and its notebook."""

import ast
import importlib
import importlib.metadata
import inspect
import os
import statistics
import subprocess
import sys
from pathlib import Path

import larder
import pytest

MODULES = ["larder", "larder.lab"]


def import_milliseconds(statement):
    code = f"import time; begin = time.perf_counter(); {statement}; print(1000 * (time.perf_counter() - begin))"
    return float(subprocess.check_output([sys.executable, "-c", code]))


def test_import_takes_less_than_a_tenth_of_a_second():
    import_milliseconds("import larder")
    times = [import_milliseconds("import larder") for _ in range(9)]
    print(f"import larder: median {statistics.median(times):.1f} ms of {[round(time, 1) for time in times]}")
    assert statistics.median(times) < 100


def test_all_that_is_public_is_documented():
    undocumented = []
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            undocumented += [f"{name}.{public}"] if not isinstance(value, str) and not inspect.getdoc(value) else []
            if inspect.isclass(value):
                members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
                undocumented += [f"{name}.{public}.{key}" for key, member in members.items() if not inspect.getdoc(member)]
    assert not undocumented


def test_stubs_agree_with_the_modules(tmp_path):
    (tmp_path / "allowed").write_text("larder\\._larder\\..*\\.__new__\nlarder\\._larder\\..*\\.__init__\nlarder\\.ray.*\nlarder\\.__main__\n")
    flags = ["--allowlist", tmp_path / "allowed", "--ignore-unused-allowlist"]
    checked = subprocess.run([sys.executable, "-m", "mypy.stubtest", "larder._larder", *flags], capture_output=True, text=True, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    typed = subprocess.run([sys.executable, "-m", "mypy", "--strict", "-p", "larder", "--exclude", "ray"], capture_output=True, text=True, cwd=tmp_path)
    errors = [line for line in typed.stdout.splitlines() if ": error:" in line and "/larder/ray" not in line]
    assert not errors, "\n".join(errors)


def test_files_of_the_package():
    folder = Path(larder.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_larder.pyi").exists()
    assert (Path(larder.demo()) / "larder.json").exists()
    for file in folder.glob("*.py"):
        assert ast.get_docstring(ast.parse(file.read_text())), file
    assert importlib.metadata.version("larder") == larder.__version__


@pytest.mark.skipif("LARDER_NOTEBOOK" not in os.environ, reason="$LARDER_NOTEBOOK does not name the notebook")
def test_the_notebook_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(os.environ["LARDER_NOTEBOOK"], as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "nothing was plotted"
    assert not any(output.output_type == "error" for output in outputs)
