"""The published packages: contents, commands, and declared requirements."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import zenflow_jax
from tests.hf_models import write_model
from tests.processes import environment

ROOT = Path(__file__).parents[1]
# This code runs before the example, and hides packages that the wheel does not require.
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
AS_TEXT = {"capture_output": True, "text": True, "check": False}


def files(folder, ending):
    return {x.relative_to(ROOT).as_posix() for x in (ROOT / folder).rglob(f"*{ending}")}


LIBRARY = files("zenflow_jax", ".py") | {"zenflow_jax/py.typed"}
SCRIPTS = files("train", ".py") | files("elves", ".py") | files("configs", ".toml")
# Modules of console commands are on a separate path: the wheel adds no top-level name like `train`.
INSTALLED = LIBRARY | {f"zenflow_jax/_scripts/{name}" for name in SCRIPTS}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Returns a function that builds a "wheel" or an "sdist", like `pip` and `make dist`."""
    backend = tmp_path_factory.mktemp("backend")
    with open(ROOT / "pyproject.toml", "rb") as file:
        required = tomllib.load(file)["build-system"]["requires"]
    # The only package that is installed for the build.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    done(subprocess.run([*pip, "--target", str(backend), *required], **AS_TEXT))

    def make(kind):
        folder = tmp_path_factory.mktemp(kind)
        code = f"import hatchling.build as b; b.build_{kind}({str(folder)!r})"
        env = os.environ | {"PYTHONPATH": str(backend)}
        done(subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, **AS_TEXT))
        (built,) = folder.iterdir()
        return built

    return make


@pytest.fixture(scope="module")
def wheel(build):
    return build("wheel")


def done(run):
    assert run.returncode == 0, run.stderr or run.stdout


def described(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (x for x in file.namelist() if x.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.mark.slow
def test_the_wheel_contains_the_library_its_scripts_and_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name for name in names if ".dist-info/" not in name} == INSTALLED
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    metadata = described(wheel)
    assert metadata["Version"] == zenflow_jax.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    # The cited version is the published version.
    assert f"\nversion: {metadata['Version']}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {metadata['Version']} - " in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.slow
def test_the_source_distribution_contains_the_files_of_the_wheel(build):
    with tarfile.open(build("sdist")) as file:
        names = {x.name.partition("/")[2] for x in file.getmembers() if x.isfile()}
    top_level = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}
    assert names == LIBRARY | SCRIPTS | top_level | {"PKG-INFO", ".gitignore"}


@pytest.mark.slow
def test_the_wheel_can_be_imported_with_only_its_requirements_and_commands_name_missing_ones(
    wheel, tmp_path
):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    required = closure(described(wheel).get_all("Requires-Dist"))
    absent = {
        name
        for name, packages in importlib.metadata.packages_distributions().items()
        if not required & {normal(x) for x in packages}
    }
    assert {"pytest", "tokenizers"} <= absent
    names = (name.removesuffix(".py").removesuffix("/__init__") for name in sorted(LIBRARY))
    names = [x.replace("/", ".") for x in names if "py.typed" not in x]
    code = BARE.format(absent=absent) + f"import {', '.join(names)}\n"
    code += "print(zenflow_jax.__file__)\nsys.exit(zenflow_jax._commands.finetune())"
    env = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, **AS_TEXT)
    assert run.returncode == 2, run.stderr
    origin = Path(run.stdout.splitlines()[-1])
    assert origin.is_relative_to(tmp_path), "the source tree was imported"
    assert run.stderr.startswith("error: this command needs the module ")
    assert run.stderr.endswith('pip install "zenflow_jax[train]"\n')


# Calls each console command as its script does, in one process that imports everything once.
COMMANDS = """
import shlex, sys
from importlib.metadata import distribution
scripts = {x.name: x for x in distribution("zenflow_jax").entry_points}
for line in sys.stdin.read().splitlines():
    sys.argv = shlex.split(line)
    print(">", line, flush=True)
    print(f"code {scripts[sys.argv[0]].load()()}", flush=True)
"""
TINY = "--corpus-megabytes 0.3 --width 16 --layers 1 --heads 2 --ffn 24"
TINY += " --optimizer adamw"  # a new installation would compile the host's kernels
SHOWN = {
    f"zenflow-finetune quickstart --steps 1 --run first {TINY}": ("runs/quickstart/first", 0),
    "zenflow-generate --model model a --max-tokens 3": ("3 tokens in ", 0),
    "zenflow-compress model packed": ("ratio", 0),
    # Messages name the command that was typed.
    "zenflow-plan": ("as in `zenflow-plan quickstart`", 2),
    "zenflow-generate a --model b --qqq": ("All options are in zenflow-generate --help", 2),
}


@pytest.mark.slow
def test_each_command_works_when_installed_alongside_modules_with_the_same_names(wheel, tmp_path):
    place, work = tmp_path / "installed", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    done(subprocess.run([*pip, "--no-deps", "--target", str(place), str(wheel)], **AS_TEXT))
    assert {line.split()[0] for line in SHOWN} == {x.name for x in (place / "bin").iterdir()}
    (work / "elves").mkdir(parents=True)
    for name in ("train.py", "elves/__init__.py"):
        (work / name).write_text("raise SystemExit('a user module')")
    write_model(work / "model", "llama2")
    env = environment(1) | {"PYTHONPATH": f"{place}:{work}"}
    command = [sys.executable, "-c", COMMANDS]
    options = AS_TEXT | {"input": "\n".join(SHOWN), "capture_output": False}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = subprocess.run(command, cwd=work, env=env, **options)
    done(run)
    for line, (expected, code) in SHOWN.items():
        output = run.stdout.partition(f"> {line}\n")[2].partition("\n> ")[0]
        assert expected in output, output
        assert f"code {code}" in output


def closure(requirements):
    """Returns the names of all distributions that these requirements install, without extras."""
    names, waiting = {"zenflow-jax"}, list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = normal(re.match(r"[\w.-]+", requirement)[0])
        if "extra ==" in requirement or name in names:
            continue
        try:
            waiting += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python version
        names.add(name)
    return names


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("target", ["clean", "quickstart", "test-clients"])
def test_make_removes_only_folders_that_it_created(tmp_path, target):
    for name in ("mine", "mine-clients"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("precious")
    command = ["make", "-C", str(ROOT), target, f"VENV={tmp_path / 'mine'}"]
    run = subprocess.run(command, **AS_TEXT)
    assert run.returncode == 2
    assert "was not made by this Makefile; remove it" in run.stderr
    assert len(list(tmp_path.rglob("thesis.txt"))) == 2
