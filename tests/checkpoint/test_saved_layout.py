"""A saved state names its layout; a different layout is rejected with both names."""

import zipfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests import runs
from tests.resuming import PLAN, SETTINGS, go, resumed, saved
from tests.runs import FIRST, Training
from zenflow_jax import _version

NOW = _version.LAYOUT_NAME
NEWER = "layout_7_of_zenflow_jax_0_9"


@pytest.fixture(scope="module")
def checkpoint():
    """Returns a run with an open window, and its three trees."""
    with Training(FIRST, SETTINGS) as training:
        go(training, PLAN, 6)
        yield training, saved(training)


@pytest.mark.parametrize("written", [NEWER, None])
def test_an_engine_state_with_another_layout_is_rejected_with_both_names(checkpoint, written):
    training, (params, state, engine_state) = checkpoint
    other = {"leaves": engine_state["leaves"]} | ({written: np.zeros(9)} if written else {})
    with pytest.raises(ValueError, match=f"reads {NOW}, but .* has {written or 'none'}"):
        resumed(training, (params, state, other))


@pytest.fixture(scope="module")
def of_0_2(tmp_path_factory):
    """Unpacks files from 0.2.0 for `FIRST`."""
    folder = tmp_path_factory.mktemp("saved")
    with zipfile.ZipFile(Path(__file__).parents[1] / "fixtures" / "saved" / "0.2.0.zip") as file:
        file.extractall(folder)
    return folder


def template(leaves):
    return runs.transformation(leaves, SETTINGS).init(runs.initial(leaves))


def test_orbax_rejects_an_optimizer_state_from_0_2_with_both_names(of_0_2):
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template(FIRST))
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match=NOW) as caught:
        checkpointer.restore(of_0_2 / "opt_state", abstract)
    assert "layout_1_of_zenflow_jax_0_2" in str(caught.value)
