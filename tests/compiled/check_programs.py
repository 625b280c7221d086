"""What a GPU's compiler makes of every program: `make test-compiled` runs this, without a GPU.

A program that it copies through wrong slices, or whose mail it keeps to the end, is right on a CPU
and passes every other test. Figures are in `figures.toml`, for each minor version of jax.
"""

import tomllib
from pathlib import Path

import jax
import pytest

from tests.compiled import programs
from tests.compiled.programs import PLAIN, STREAMING
from train.cli.settings import SettingsError
from zenflow_jax._device import host_slices

VERSION = ".".join(jax.__version__.split(".")[:2])
FIGURES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())[VERSION]
#: Schedulers differ that much in what they find between patch versions.
TOLERANCE = 0.03
REFUSES = jax.__version_info__ < (0, 11, 1)

pytestmark = pytest.mark.usefixtures("as_scripts_run")


def check(name, compiled):
    """Compares with the table; the message has the line for it."""
    figures = compiled.figures
    line = f'"{name}" = {{ {", ".join(f"{k} = {v}" for k, v in figures._asdict().items())} }}'
    assert not compiled.wrong
    assert not compiled.in_loops
    expected = FIGURES.get(name, {})
    assert [*expected] == [*figures._asdict()], line
    expected = programs.Figures(**expected)
    assert figures[2:] == expected[2:], line
    assert figures.peak == pytest.approx(expected.peak, rel=TOLERANCE), line
    assert figures.hidden == pytest.approx(expected.hidden, abs=TOLERANCE), line


@pytest.mark.parametrize("name", PLAIN if REFUSES else [*PLAIN, *STREAMING])
def test_a_program_uses_host_memory_as_the_table_says(name):
    check(name, (PLAIN | STREAMING)[name]())


@pytest.mark.parametrize("name", STREAMING if REFUSES else [])
def test_where_slices_are_wrong_a_streaming_program_is_refused(name):
    words = r"0\.11\.1 or newer.*Python 3\.12.*annotator"
    with pytest.raises((NotImplementedError, SettingsError), match=words):
        STREAMING[name]()


@pytest.mark.parametrize("name", ["streamed"] if REFUSES else [])
def test_every_slice_in_a_loop_of_a_program_that_is_refused_is_found_to_be_wrong(name, monkeypatch):
    monkeypatch.setattr(host_slices, "_FIXED", (0,))
    compiled = STREAMING[name]()
    assert (len(compiled.wrong), compiled.figures.slices) == (2, 0)


@pytest.mark.parametrize("name", ["streamed"] if REFUSES else [])
def test_with_the_flag_that_the_refusal_names_no_slice_is_wrong(name, monkeypatch):
    monkeypatch.setattr(host_slices, "_DISABLED", True)
    plain = jax.stages.Lowered.compile
    options = {"xla_disable_hlo_passes": host_slices._PASS}
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda x: plain(x, options))
    assert not STREAMING[name]().wrong
