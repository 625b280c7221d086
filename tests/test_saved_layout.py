"""What is saved says its layout and who wrote it; another layout is read rightly or refused."""

import dataclasses
import functools
import re
import zipfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import zenflow_jax
from tests import make_saved_fixtures as made
from tests import runs
from tests.runs import ONE, Training
from tests.test_resume import PLAN, SETTINGS, end, go, resumed, saved
from zenflow_jax import _version
from zenflow_jax._checkpoint import layout
from zenflow_jax._checkpoint.handler import EngineCheckpointHandler
from zenflow_jax._checkpoint.stream import read_engine_state
from zenflow_jax._exchange.messages import PENDING

KERNEL = {"host_kernel": "numpy"}
NOW = _version.layout_name(_version.LAYOUT)
NEWER = "layout_7_of_zenflow_jax_0_9"
READS = f"of layout {_version.LAYOUT}, which zenflow_jax {re.escape(zenflow_jax.__version__)} reads"
MISSING = f"{READS}, got one that does not say its layout, of a version before 0.2.0. Finish its"


def said(name: str, number: int) -> dict[str, np.ndarray]:
    return {name: np.array(number, np.int32)}


@pytest.fixture(scope="module")
def checkpoint():
    """A run in the midst of a window, and its three trees."""
    with Training(ONE, SETTINGS, threads=1, **KERNEL) as training:
        go(training, PLAN, 6)
        yield training, saved(training)


@pytest.fixture
def later(monkeypatch):
    """The version after this one, in which the engine's half has another layout."""
    monkeypatch.setattr(_version, "__version__", "1.3.1")
    monkeypatch.setattr(_version, "LAYOUT", _version.LAYOUT + 1)
    monkeypatch.setattr(_version, "SINCE", _version.SINCE | {_version.LAYOUT: "1.3"})


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


def test_an_older_layout_that_can_be_read_goes_on_bit_for_bit(checkpoint, later, monkeypatch):
    training, (params, state, engine_state) = checkpoint
    older = {**engine_state, "counts": engine_state["counts"] | {"renamed": np.int32(6)}}
    del older["counts"]["step"]
    with pytest.raises(
        ValueError, match="zenflow_jax 1.3.1 reads, got layout 1, .* Finish its run"
    ):
        resumed(training, (params, state, older))

    def to_next(tree):
        counts = dict(tree["counts"])
        counts["step"] = counts.pop("renamed")
        return {**tree, "counts": counts}

    monkeypatch.setitem(layout.TO_NEXT, 1, to_next)
    with Training(ONE, SETTINGS, threads=1, **KERNEL) as whole:
        go(whole, PLAN, 12)
        params_then, state_then = end(whole)
    with resumed(training, (params, state, older), **KERNEL) as again:
        ((name, version),) = again.engine.state()["layout"].items()
        assert name == "layout_2_of_zenflow_jax_1_3"
        assert version == 1_003_001
        again.t = 6
        go(again, PLAN, 12)
        params, state = end(again)
        runs.assert_same_bits((params, state.leaves), (params_then, state_then.leaves))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {b'"layout":"1"': b'"layout":"7"', b'"zenflow_jax":"0': b'"zenflow_jax":"9'},
            r"engine-00000.*{READS}, got layout 7, which zenflow_jax 9\.\d.* Go on with zenflow_",
        ),
        ({b'"layout":"1"': b'"layout":"0"'}, "{READS}, got layout 0, .* Finish its run with zenfl"),
        ({b'"layout":"1"': b'"version":"1"'}, "{MISSING}"),
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


def test_files_of_an_older_layout_that_can_be_read_are(checkpoint, tmp_path, later, monkeypatch):
    training, (params, state, _) = checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(_version, "LAYOUT", 1)
        EngineCheckpointHandler().save(tmp_path, args=zenflow_jax.EngineSave(training.engine))
    with pytest.raises(ValueError, match=r"engine-00000.* reads, got layout 1, which zenflow_jax"):
        read_engine_state(tmp_path)
    monkeypatch.setitem(layout.TO_NEXT, 1, dict)
    found = read_engine_state(tmp_path)
    assert list(found["layout"]) == ["layout_1_of_zenflow_jax_0_2"]
    with resumed(training, (params, state, found), **KERNEL) as again:
        assert again.engine.stats.steps == 6


@pytest.fixture(scope="module", params=sorted(made.FOLDER.glob("*.zip")), ids=lambda x: x.stem)
def of_version(request, tmp_path_factory):
    """A folder with the checkpoints that a version has written."""
    folder = tmp_path_factory.mktemp("saved")
    with zipfile.ZipFile(request.param) as file:
        file.extractall(folder)
    return folder


def gone_on(name, folder):
    """A run that goes on from its checkpoint, with what it has restored."""
    run = made.RUNS[name]
    training = run.begin()
    trees = made.restored(name, folder)
    training.params, training.state, engine_state = trees
    training.t = run.saved
    if training.engine is not None:
        training.engine.close()
        training.engine = zenflow_jax.HostEngine(
            training.params,
            training.state,
            engine_state=engine_state,
            host_kernel="numpy",
            host_state=run.host_state,
            threads=1,
        )
    return training, trees


@pytest.fixture(scope="module")
def expected():
    """By the reference: the whole run of each name."""

    @functools.cache
    def of_run(run):
        return runs.reference(
            run.leaves,
            run.settings,
            run.plan,
            gradients=made.gradients,
            initial=made.initial,
            host_state=run.host_state,
        )[0]

    return lambda name: of_run(made.RUNS[name])


def test_there_are_checkpoints_of_each_layout():
    versions = {path.stem.rpartition(".")[0] for path in made.FOLDER.glob("*.zip")}
    assert versions >= set(_version.SINCE.values())
    assert max(_version.SINCE) == _version.LAYOUT


@pytest.mark.parametrize("name", made.RUNS)
def test_a_run_goes_on_from_the_checkpoint_of_each_version(of_version, expected, name):
    """As the reference does, and up to the last digits: compilers and machines differ in these."""
    training, (params, then, engine_state) = gone_on(name, of_version)
    run, whole = made.RUNS[name], expected(name)
    with training:
        values = [{x: np.asarray(y) for x, y in params.items()}]
        selected = []
        for t in range(run.saved + 1, run.plan.steps + 1):
            made.go(training, run.plan, t)
            values.append(training.values())
            selected.append(training.selected())
        training.settle()
        history = runs.History(values, selected, training.moments(), int(training.state.skipped))
    since = whole._replace(
        params=whole.params[run.saved - 1 :], selected=whole.selected[run.saved :]
    )
    if run.host_state == "compact":
        # 0.2.0 rounded the units of second moments to fewer bits.
        runs.assert_agree_where_rounded(history, since, another_code=1.0)
    else:
        runs.assert_agree(history, since)
    # There was something of each kind to read.
    if name == "in_graph":
        halves = [leaf.deferred for leaf in then.leaves if leaf.deferred is not None]
        assert all(np.any(half.pending) or np.any(half.total) for half in halves)
        return
    counts = jax.tree.map(np.asarray, engine_state["counts"])
    assert counts["skipped"] == 1
    if name == "fit":
        assert [int(x) for x in then.schedule_state] == [2, 16], "windows of two, of four before"
    else:
        assert (counts["pending"] >= PENDING).any()
    assert (counts["counted"] > 0).any()
    sums = [x for x in then.mail if x is not None]
    if name != "compact":
        sums = [leaf["total"] for leaf in engine_state["leaves"]]
    assert any(np.any(x) for x in sums)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("files", r"layout 2, which zenflow_jax 1.3.1 reads, got layout 1, which zenflow_jax 0\.2"),
        ("tree", "layout_1_of_zenflow_jax_0_2.*layout_2_of_zenflow_jax_1_3"),
    ],
)
def test_a_later_version_that_cannot_read_them_says_both_versions(of_version, later, name, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        made.restored(name, of_version)


def test_both_ways_of_saving_have_saved_the_same_bits(of_version):
    found = []
    for name in ("files", "tree"):
        training, (_, _, engine_state) = gone_on(name, of_version)
        with training:
            leaves = [
                # A sum without a step is anything; the end depends on the others.
                {name: np.asarray(x) for name, x in leaf.items() if name != "total"}
                for leaf in engine_state["leaves"]
            ]
            # Each engine has its own token.
            counts = {name: x for name, x in engine_state["counts"].items() if name != "token"}
            others = {"counts": counts, "options": engine_state["options"]}
            then = jax.tree.map(np.asarray, (training.params, training.state.leaves, others))
            made.go(training, made.PLAN, made.PLAN.steps)
            found.append((leaves, then, end(training)))
    runs.assert_same_bits(*found)


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
