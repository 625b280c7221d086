"""What is saved says its layout and who wrote it; another layout is refused."""

import dataclasses
import re
import zipfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import zenflow_jax
from tests import runs
from tests.runs import ONE, Leaf, Training
from tests.test_resume import PLAN, SETTINGS, go, resumed, saved
from zenflow_jax import _version
from zenflow_jax._checkpoint.handler import EngineCheckpointHandler
from zenflow_jax._checkpoint.stream import read_engine_state

KERNEL = {"host_kernel": "numpy"}
NOW = _version.LAYOUT_NAME
IN_FILES = f'"layout":"{_version.LAYOUT}"'.encode()
NEWER = "layout_7_of_zenflow_jax_0_9"
READS = f"of layout {_version.LAYOUT}, which zenflow_jax {re.escape(_version.SINCE)} reads"
MISSING = f"{READS}, got one that does not say its layout, of a version before 0.2.0. Finish its"


def said(name: str, number: int) -> dict[str, np.ndarray]:
    return {name: np.array(number, np.int32)}


@pytest.fixture(scope="module")
def checkpoint():
    """A run in the midst of a window, and its three trees."""
    with Training(ONE, SETTINGS, threads=1, **KERNEL) as training:
        go(training, PLAN, 6)
        yield training, saved(training)


def test_a_state_says_its_layout_and_the_version_that_wrote_it(checkpoint):
    _, (_, state, engine_state) = checkpoint
    for found in (state.layout, engine_state["layout"]):
        ((name, version),) = found.items()
        assert name == NOW
        assert version.shape == ()
        assert _version.version_of(int(version)) == zenflow_jax.__version__


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            said(NEWER, 9_004),
            f"{READS}, got layout 7, which zenflow_jax 0.9.4 wrote. Go on with zenflow_jax 0.9.4,",
        ),
        (said("layout_0_of_zenflow_jax_0_1", 1_009), f"{READS}, got layout 0, .* 0.1.9 wrote."),
        ({}, MISSING),
        (None, MISSING),
    ],
    ids=["newer", "older", "empty", "missing"],
)
def test_an_engine_state_of_another_layout_is_refused_by_both_versions(checkpoint, record, words):
    training, (params, state, engine_state) = checkpoint
    # What else another version has is not looked at.
    other = {**engine_state, "layout": record, "counts": {"unknown": np.int32(1)}}
    if record is None:
        del other["layout"]
    with pytest.raises(ValueError, match="expected an `engine_state` " + words):
        resumed(training, (params, state, other))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {IN_FILES: b'"layout":"7"', b'"zenflow_jax":"0': b'"zenflow_jax":"9'},
            r"engine-00000.*{READS}, got layout 7, which zenflow_jax 9\.\d.* Go on with zenflow_",
        ),
        ({IN_FILES: b'"layout":"0"'}, "{READS}, got layout 0, .* Finish its run with zenfl"),
        ({IN_FILES: b'"version":"1"'}, "{MISSING}"),
        ({b'"zenflow_jax":': b'"zenflow_jam":'}, "{MISSING}"),
        (
            {b'"format"': b'"farmat"'},
            "expected a file of an engine's state, got .* of format None.",
        ),
    ],
    ids=["newer", "older", "of before", "without a version", "somebody else's"],
)
def test_files_of_another_layout_are_refused_by_both_versions(checkpoint, tmp_path, changes, words):
    training, _ = checkpoint
    EngineCheckpointHandler().save(tmp_path, args=zenflow_jax.EngineSave(training.engine))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, rest = whole[8 : 8 + length].rstrip(), whole[8 + length :]
    for old, new in changes.items():
        assert header.count(old) == 1
        header = header.replace(old, new)
    path.write_bytes(whole[:8] + header.ljust(length) + rest)
    with pytest.raises(ValueError, match=words.format(READS=READS, MISSING=MISSING)):
        read_engine_state(tmp_path)


#: The leaves of the run whose checkpoint 0.2.0 wrote.
LEAVES = (
    Leaf("bias", (5,), None, "bfloat16", decay=False),
    Leaf("columns", (4, 10), -1, "bfloat16"),
    Leaf("rows", (12, 5), -2, "float32"),
    Leaf("stack", (2, 7, 3), -2, "bfloat16"),
)


@pytest.fixture(scope="module")
def of_0_2(tmp_path_factory):
    """What 0.2.0 wrote by `StandardSave` of the optimizer state, and by `EngineSave`."""
    folder = tmp_path_factory.mktemp("saved")
    with zipfile.ZipFile(Path(__file__).parent / "fixtures" / "saved" / "0.2.0.zip") as file:
        file.extractall(folder)
    return folder


def test_the_files_of_an_engine_of_0_2_are_refused_by_both_versions(of_0_2):
    with pytest.raises(ValueError, match=f"{READS}, got layout 1, which zenflow_jax 0.2.0 wrote"):
        read_engine_state(of_0_2 / "engine")


def test_orbax_refuses_an_optimizer_state_of_0_2_with_both_names(of_0_2):
    state = runs.transformation(LEAVES, SETTINGS).init(runs.initial(LEAVES))
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match=NOW) as caught:
        checkpointer.restore(of_0_2 / "opt_state", template)
    assert "layout_1_of_zenflow_jax_0_2" in str(caught.value)


def of_layout(state, name):
    (version,) = state.layout.values()
    return dataclasses.replace(state, layout={name: version})


@pytest.mark.parametrize("offload", [True, False], ids=["engine", "in_graph"])
@pytest.mark.parametrize(
    ("save", "restore"),
    [
        (ocp.args.StandardSave, ocp.args.StandardRestore),
        (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
    ],
    ids=["standard", "pytree"],
)
def test_orbax_refuses_an_optimizer_state_of_another_layout_with_both_names(
    tmp_path, offload, save, restore
):
    state = runs.transformation(ONE, SETTINGS, offload=offload).init(runs.initial(ONE))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=save({"opt_state": of_layout(state, NEWER)}))
        manager.wait_until_finished()
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"opt_state": state})
        with pytest.raises(ValueError, match=NOW) as caught:
            manager.restore(0, args=restore(template))
    assert NEWER in str(caught.value)


@pytest.mark.parametrize("offload", [True, False], ids=["engine", "in_graph"])
def test_flax_refuses_an_optimizer_state_of_another_layout_by_both_versions(offload):
    state = runs.transformation(ONE, SETTINGS, offload=offload).init(runs.initial(ONE))
    tree = serialization.to_state_dict(state)
    for record, words in (
        (said(NEWER, 9_004), "got layout 7, which zenflow_jax 0.9.4 wrote. Go on with"),
        (said("layout_0_of_zenflow_jax_0_1", 1_009), "got layout 0, .* Finish its run with zenf"),
        ({}, "that does not say its layout, of a version before 0.2.0"),
    ):
        bytes_ = serialization.msgpack_serialize(tree | {"layout": record})
        with pytest.raises(ValueError, match=f"expected a ZenFlowState {READS}, .*{words}"):
            serialization.from_bytes(state, bytes_)
    del tree["layout"]
    with pytest.raises(ValueError, match="that does not say its layout, of a version before 0.2.0"):
        serialization.from_state_dict(state, tree)
