"""The published wheel: contents, commands, and declared requirements."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import zenflow_jax
from tests.hf_models import write_model
from tests.processes import environment

ROOT = Path(__file__).parents[1]
AS_TEXT = {"capture_output": True, "text": True, "check": False}


def files(folder, ending):
    return {x.relative_to(ROOT).as_posix() for x in (ROOT / folder).rglob(f"*{ending}")}


LIBRARY = files("zenflow_jax", ".py") | {"zenflow_jax/py.typed"}
SCRIPTS = files("train", ".py") | files("elves", ".py") | files("configs", ".toml")
# Modules of console commands are on a separate path: the wheel adds no top-level name like `train`.
INSTALLED = LIBRARY | {f"zenflow_jax/_scripts/{name}" for name in SCRIPTS}


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done(subprocess.run([*PIP, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], **AS_TEXT))
    (built,) = folder.iterdir()
    return built


def done(run):
    assert run.returncode == 0, run.stderr or run.stdout


@pytest.mark.slow
def test_the_wheel_contains_the_library_its_scripts_and_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (about,) = (x for x in names if x.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(file.read(about).decode())
    assert {name for name in names if ".dist-info/" not in name} == INSTALLED
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert metadata["Version"] == zenflow_jax.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    # The cited version is the published version.
    assert f"\nversion: {metadata['Version']}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {metadata['Version']} - " in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_library_imports_only_its_requirements():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = {re.match(r"[\w-]+", x)[0].lower() for x in declared["dependencies"]}
    # jax requires jaxlib, and orbax requires etils.
    required |= {"orbax", "jaxlib", "etils", "zenflow_jax", *sys.stdlib_module_names}
    for name in LIBRARY - {"zenflow_jax/py.typed"}:
        # Imports inside functions may need an extra.
        for line in ast.parse((ROOT / name).read_text("utf-8")).body:
            modules = [line.module] if isinstance(line, ast.ImportFrom) else []
            modules += [x.name for x in line.names] if isinstance(line, ast.Import) else []
            assert {x.partition(".")[0] for x in modules} <= required, name


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
    "zenflow-generate a --model b --qqq": ("error: unrecognized arguments: --qqq", 2),
}


@pytest.mark.slow
def test_each_command_works_when_installed_alongside_modules_with_the_same_names(wheel, tmp_path):
    place, work = tmp_path / "installed", tmp_path / "work"
    install = [*PIP, "install", "--no-deps", "--target", str(place), str(wheel)]
    done(subprocess.run(install, **AS_TEXT))
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
