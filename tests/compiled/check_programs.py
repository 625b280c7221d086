"""Checks how XLA compiles every program for a GPU, without a GPU: `make test-compiled`.

Wrong slices of host memory, or mail that is sent only at the end, occur only on a GPU, so all other
tests pass with them. `figures.toml` contains the expected figures for each minor version of jax.
"""

import importlib.util
import re
import tomllib
from pathlib import Path

import jax
import pytest

from tests.compiled import programs
from tests.compiled.programs import PLAIN, STREAMING
from train.cli.settings import SettingsError
from zenflow_jax._device import gpu_faults

VERSION = ".".join(jax.__version__.split(".")[:2])
FIGURES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())[VERSION]
#: The relative difference between the scheduler's results in patch versions.
TOLERANCE = 0.03
REFUSES = jax.__version_info__ < (0, 11, 1)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_scripts_run")]


def check(name, compiled):
    """Compares with the table; the error message contains the new line for the table."""
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


@pytest.mark.parametrize("wheel", ["cudnn", "cublas", "cu13"])
def test_wheels_that_change_programs_are_hidden(wheel):
    # With cuDNN, jax traces flash attention; with cuBLAS, XLA chooses other kernels.
    assert importlib.util.find_spec(f"nvidia.{wheel}") is None


@pytest.mark.parametrize("name", PLAIN if REFUSES else [*PLAIN, *STREAMING])
def test_a_program_uses_host_memory_as_in_the_table(name):
    check(name, (PLAIN | STREAMING)[name]())


@pytest.mark.parametrize("name", STREAMING if REFUSES else [])
def test_a_streaming_program_is_rejected_if_jax_slices_host_memory_wrongly(name):
    words = r"0\.11\.1 or newer.*Python 3\.12.*annotator"
    with pytest.raises((NotImplementedError, SettingsError), match=words):
        STREAMING[name]()


@pytest.mark.parametrize("name", ["streamed"] if REFUSES else [])
def test_wrong_slices_in_loops_are_found(name, monkeypatch):
    monkeypatch.setattr(gpu_faults, "_FIXED_VERSION", (0,))
    compiled = STREAMING[name]()
    assert (len(compiled.wrong), compiled.figures.slices) == (2, 0)


@pytest.fixture
def optimized_more():
    jax.config.update("jax_optimization_level", "O1")
    yield
    jax.config.update("jax_optimization_level", "UNKNOWN")


@pytest.mark.usefixtures("optimized_more")
@pytest.mark.parametrize("name", [] if REFUSES else ["streamed, fsdp=4"])
def test_wrong_slices_of_pipelined_copies_are_rejected_and_found(name, monkeypatch):
    with pytest.raises(NotImplementedError, match=r"xla#45393.*annotator"):
        STREAMING[name]()
    monkeypatch.setattr(gpu_faults, "_DISABLED", True)
    compiled = STREAMING[name]()
    assert (len(compiled.wrong), compiled.figures.slices) == (4, 0)


@pytest.mark.parametrize("name", ["streamed"] if REFUSES else [])
def test_the_flag_named_in_the_error_prevents_wrong_slices(name, monkeypatch):
    monkeypatch.setattr(gpu_faults, "_DISABLED", True)
    plain = jax.stages.Lowered.compile
    options = {"xla_disable_hlo_passes": gpu_faults._PASS}
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda x: plain(x, options))
    assert not STREAMING[name]().wrong


def test_a_layers_update_needs_no_memory_and_keeps_the_other_bits_of_masters():
    compiled = programs.layer_update()
    memory, size = compiled.memory_analysis(), programs.WIDTH * programs.INNER
    assert memory.temp_size_in_bytes < 4096
    assert memory.alias_size_in_bytes == 12 * size
    # With `astype` in place of `reduce_precision` they would be a constant, zero.
    bits = rf"= s16\[{programs.WIDTH},{programs.INNER}\]\S* (broadcast|constant|convert)\("
    assert re.findall(bits, compiled.as_text()) == ["convert"]
