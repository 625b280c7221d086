"""What is published: the wheel has the library alone, and needs what it says it needs."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import zenflow_jax
from tests.test_readme import program

ROOT = Path(__file__).parents[1]
# Ahead of the example: what the wheel does not require of this environment is not there.
BARE = """
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        known = name.partition(".")[0] not in {absent!r}
        return super().find_spec(name, path, target) if known else None
sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""
WHERE = "print(zenflow_jax.__file__)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # The build backend is the one thing that is installed for it, in a folder of pip's own.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (found,) = folder.glob("*.whl")
    return found


def described(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (x for x in file.namelist() if x.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.mark.slow
def test_the_wheel_has_the_library_its_types_and_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    sources = {
        x.relative_to(ROOT).as_posix() for x in (ROOT / "zenflow_jax").rglob("*.py") if x.is_file()
    }
    library = {name for name in names if ".dist-info/" not in name}
    assert library == sources | {"zenflow_jax/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel):
    found = described(wheel)
    assert found["Version"] == zenflow_jax.__version__
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in found.get_all("Classifier")


@pytest.mark.slow
def test_the_readmes_example_runs_on_the_wheel_and_what_it_requires(wheel, tmp_path):
    there = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(there)
    required = closure(described(wheel).get_all("Requires-Dist"))
    absent = {
        name
        for name, packages in importlib.metadata.packages_distributions().items()
        if not required & {normal(x) for x in packages}
    }
    assert {"pytest", "tokenizers"} <= absent
    script = tmp_path / "program.py"
    script.write_text(BARE.format(absent=absent) + program() + WHERE, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(there), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    origin = Path(run.stdout.splitlines()[-1])
    assert origin.is_relative_to(there), "the source tree was imported"


def closure(requirements):
    """The names of all distributions that these requirements bring, without extras."""
    found, waiting = {"zenflow-jax"}, list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = normal(re.match(r"[\w.-]+", requirement)[0])
        if "extra ==" in requirement or name in found:
            continue
        try:
            waiting += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found.add(name)
    return found


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()
