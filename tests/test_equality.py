"""Where this library must equal something trusted: `optax.adamw`, and the slow reference.

Runs and tolerances are in `runs.py`. What is compared at every step is the parameters and the
selected channels, at the end masters, moments and step counts, wherever they live. Steps that are
held to `optax.adamw`, or to each other's bits, are compiled as users have them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import comparisons, runs
from tests.runs import FIRST, SCANNED, SECOND, THIRD, Leaf, Plan, Settings, Training
from zenflow_jax import AutoSelect, EpochSelect

KERNELS = ("numba", "numpy")
SEEDS = (0, 1)
STEPS = 12

# Of the norms in these runs, about half are above it.
MAX_NORM = 30.0

WARM = dict(
    topk_ratio=0.3,
    update_interval=3,
    select_interval=6,
    full_warm_up_rounds=5,
    max_grad_norm=MAX_NORM,
)


def modes(leaves, options, seed):
    """The run in-graph, and with an engine; its kernel and threads go by the seed."""
    yield Training(leaves, options, seed=seed, offload=False)
    # Numba compiles each pair of dtypes anew; `test_host_adam.py` has those that differ.
    kernel = "numpy" if options.transfer_dtype else KERNELS[seed]
    yield Training(leaves, options, seed=seed, host_kernel=kernel, threads=1 + seed)


def assert_equals_adamw(leaves, options, steps=STEPS):
    for seed in SEEDS:
        expected = comparisons.adamw(
            leaves, options.max_grad_norm, options.weight_decay, steps, seed
        )
        for training in modes(leaves, options, seed):
            with training:
                comparisons.assert_close([p for _, p in training.follow(Plan(steps))], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "ratio", "select_interval", "max_norm"),
    [(FIRST, 0.0, 1000, None), (SECOND, 0.25, 1, MAX_NORM)],
    ids=["nothing selected", "selecting at every step, clipped"],
)
def test_windows_of_one_step_without_overlap_equal_optax_adamw(
    leaves, ratio, select_interval, max_norm
):
    norms = [
        np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradients.values()))
        for gradients in (runs.gradients(leaves, t) for t in range(1, STEPS + 1))
    ]
    assert max_norm is None or min(norms) < max_norm < max(norms)
    options = Settings(
        max_grad_norm=max_norm,
        weight_decay=0.1,
        topk_ratio=ratio,
        update_interval=1,
        select_interval=select_interval,
        staleness=0,
        provisional_share=0.5,
    )
    assert_equals_adamw(leaves, options)


def test_selections_move_in_the_runs_that_are_compared_with_optax():
    options = Settings(topk_ratio=0.25, update_interval=1, select_interval=1, staleness=0)
    history, _ = comparisons.reference(SECOND, options, Plan(STEPS))
    assert len({chosen["rows"].tobytes() for chosen in history.selected}) > STEPS // 2


def test_selecting_every_channel_equals_optax_adamw():
    options = Settings(weight_decay=0.1, topk_ratio=1.0, update_interval=4, provisional_share=0.5)
    assert_equals_adamw(FIRST, options)


@pytest.mark.slow
def test_a_warm_up_as_long_as_the_run_equals_optax_adamw():
    # What is resident knows no warm-up.
    leaves = tuple(leaf for leaf in runs.FEW if leaf.axis is not None)
    options = Settings(weight_decay=0.1, provisional_share=0.5, **WARM)
    assert_equals_adamw(leaves, options, WARM["full_warm_up_rounds"])


AGREEMENTS = {
    "one step stale": (
        SECOND,
        dict(topk_ratio=0.5, update_interval=1, select_interval=2, provisional_share=1),
        Plan(12),
    ),
    "selecting at every window, skipped and flushed everywhere": (
        THIRD,
        dict(topk_ratio=0.3, select_interval=4, provisional_share=0.5),
        # In mid-window, twice, in a window of which everything was skipped, at a boundary.
        Plan(23, bad=(3, 4, 9, 10, 11, 12, 17), flush_at=(6, 7, 10, 16)),
    ),
    "all windows at once, two of four steps stale": (
        FIRST,
        dict(
            WARM,
            update_interval=4,
            select_interval=8,
            rolling=False,
            window_scaling=None,
            staleness=2,
            provisional_share=0.25,
        ),
        # A window of which everything was skipped; ends in mid-window, twice, at a boundary.
        Plan(23, bad=(2, 6, 7, 8, 9, 13), flush_at=(11, 12, 16, 20)),
    ),
    "in turn, as stale as a window is long": (
        SECOND,
        dict(topk_ratio=0.3, update_interval=3, select_interval=6, staleness=3),
        Plan(20, bad=(4, 5, 6, 8), flush_at=(11,)),
    ),
    "in turn, two steps stale, scaled, float32 that travels as bf16": (
        THIRD,
        dict(
            WARM,
            update_interval=4,
            select_interval=4,
            staleness=2,
            window_scaling=0.5,
            provisional_share=0.5,
            eps=0.01,  # by default too small to be seen
            transfer_dtype="bfloat16",
        ),
        Plan(20, bad=(2, 12, 13, 14, 15, 17), flush_at=(11, 18)),
    ),
    "in turn, not stale, selecting by epochs, one window all skipped": (
        SECOND,
        dict(
            topk_ratio=0.3,
            update_interval=4,
            select_interval=EpochSelect(6),
            full_warm_up_rounds=4,
            staleness=0,
        ),
        Plan(20, bad=(2, 9, 10, 11, 12), flush_at=(14,)),
    ),
    # Not clipped where sums are bf16: a factor that is off by a bit moves one in some hundreds of
    # them to its neighbour.
    "added up on the device, scaled betas": (
        SECOND,
        dict(
            topk_ratio=0.3,
            update_interval=4,
            select_interval=8,
            send_gradients="per_window",
            window_scaling=0.0,
            provisional_share=0.5,
        ),
        Plan(20, bad=(2, 7, 8, 9, 14), flush_at=(4, 11, 12)),
    ),
    "stacks in ranges, after a warm-up, clipped": (
        SCANNED,
        dict(WARM, select_interval=3, provisional_share=0.5),
        Plan(20, bad=(2, 7, 8, 9, 10, 14), flush_at=(12, 17)),
    ),
    "stacks in ranges, two steps stale, selecting when others matter more": (
        SCANNED,
        dict(
            topk_ratio=0.3,
            update_interval=3,
            select_interval=AutoSelect(0.9, max_windows=3),
            staleness=2,
            provisional_share=0.5,
        ),
        Plan(20, bad=(4, 10), flush_at=(7,)),
    ),
    "stacks in ranges, added up on the device, not stale": (
        SCANNED,
        dict(
            topk_ratio=0.3,
            update_interval=4,
            select_interval=8,
            send_gradients="per_window",
            staleness=0,
        ),
        Plan(14, bad=(2, 7), flush_at=(9,)),
    ),
    "added up on the device, not stale, clipped": (
        tuple(leaf._replace(dtype="float32") for leaf in FIRST),
        dict(WARM, send_gradients="per_window", staleness=0),
        Plan(20, bad=(2, 5, 13), flush_at=(10,)),
    ),
    "nothing selected, float32 that is added up and travels as bf16": (
        THIRD,
        dict(
            topk_ratio=0.0,
            update_interval=2,
            send_gradients="per_window",
            transfer_dtype="bfloat16",
            provisional_share=0.5,
        ),
        Plan(9),
    ),
}


COMMON = {"weight_decay": 0.1, "provisional_share": None}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGREEMENTS)
def test_engine_and_in_graph_mode_equal_the_reference(name):
    leaves, options, plan = AGREEMENTS[name]
    options = Settings(**COMMON | options)
    for seed in SEEDS:
        expected, slow = comparisons.reference(leaves, options, plan, seed)
        assert expected.skipped == len(plan.bad)
        for training in modes(leaves, options, seed):
            with training:
                comparisons.assert_agree(training.history(plan), expected)
                if training.engine is not None:
                    stats = training.engine.stats
                    assert (stats.steps, stats.skipped_steps) == (plan.steps, slow.skipped)
                    assert (stats.windows, stats.reselections) == (slow.windows, slow.reselections)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "selecting at every window, skipped and flushed everywhere", marks=pytest.mark.slow
        ),
        "all windows at once, two of four steps stale",
    ],
)
def test_an_engine_with_compact_moments_equals_the_reference_that_rounds_them(name):
    leaves, options, plan = AGREEMENTS[name]
    options = Settings(**COMMON | options)
    expected, _ = comparisons.reference(leaves, options, plan, host_state="compact")
    exact, _ = comparisons.reference(leaves, options, plan)
    with pytest.raises(AssertionError, match="numbers differ"):
        comparisons.assert_agree_where_rounded(exact, expected)
    with Training(leaves, options, host_kernel="numpy", host_state="compact") as training:
        comparisons.assert_agree_where_rounded(training.history(plan), expected)


def test_an_engine_with_compact_moments_gives_the_same_bits_with_either_kernel():
    leaves, options, _ = AGREEMENTS["all windows at once, two of four steps stale"]
    options = Settings(**COMMON | options)
    # Each window has two gradients that count, as in `test_moments.py`: Numba takes seconds for
    # each number of them. After the second one channels are selected anew.
    plan = Plan(19, bad=(1, 2, 3, 4, 5, 6, 8, 10, 13, 15, 16, 18, 19))
    expected, slow = comparisons.reference(leaves, options, plan, host_state="compact")
    assert expected.selected[12]["rows"].tolist() != expected.selected[11]["rows"].tolist()
    histories = []
    for kernel in KERNELS:
        with Training(leaves, options, host_kernel=kernel, host_state="compact") as training:
            histories.append(training.history(plan))
        comparisons.assert_agree_where_rounded(histories[-1], expected)
    comparisons.assert_same_bits(*histories)


@pytest.mark.slow
def test_neither_donating_nor_when_gradients_leave_changes_a_bit():
    options = Settings(topk_ratio=0.3, update_interval=2, select_interval=4, provisional_share=0.5)
    histories = []
    for sending in ("during_step", "after_step"):
        for donate in (False, True):
            more = {"donate": donate, "send_gradients": sending}
            with Training(runs.FEW[:2], options, host_kernel="numpy", **more) as training:
                histories.append(training.history(Plan(9, bad=(3,), flush_at=(5,))))
    for history in histories[1:]:
        comparisons.assert_same_bits(history, histories[0])


@pytest.mark.slow
def test_a_sum_on_the_device_of_one_step_is_its_gradient():
    histories = []
    for sending in ("during_step", "per_window"):
        options = Settings(
            topk_ratio=0.3,
            update_interval=1,
            select_interval=3,
            provisional_share=0.5,
            send_gradients=sending,
        )
        with Training(runs.FEW, options, host_kernel="numpy") as training:
            histories.append(training.history(Plan(7, bad=(3,), flush_at=(5,))))
    comparisons.assert_same_bits(*histories)


@st.composite
def small_runs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    axis = draw(st.integers(-len(shape), -1))
    leaf = Leaf("w", shape, axis, draw(st.sampled_from(["float32", "bfloat16"])))
    interval = draw(st.integers(1, 3))
    options = Settings(
        weight_decay=0.1,
        topk_ratio=draw(st.sampled_from([0.0, 0.2, 0.5, 0.9])),
        update_interval=interval,
        select_interval=interval * draw(st.integers(1, 3)),
        full_warm_up_rounds=draw(st.integers(0, 3)),
        rolling=draw(st.booleans()),
        staleness=draw(st.none() | st.integers(0, interval)),
        window_scaling=draw(st.none() | st.sampled_from([0.0, 0.5, 1.0])),
        provisional_share=draw(st.sampled_from([None, 0.5, 1.0])),
    )
    steps = st.lists(st.integers(1, 10), max_size=3).map(tuple)
    return (leaf,), options, Plan(10, bad=draw(steps)), draw(st.integers(0, 9))


@pytest.mark.slow
@given(small_runs())
@settings(max_examples=4)
def test_any_shape_axis_and_interval_equals_the_reference(run):
    leaves, options, plan, seed = run
    expected, _ = comparisons.reference(leaves, options, plan, seed)
    with Training(leaves, options, seed=seed, offload=False) as training:
        comparisons.assert_agree(training.history(plan), expected)
    with Training(leaves, options, seed=seed, host_kernel="numpy") as training:
        comparisons.assert_agree(training.history(plan), expected)


def test_an_in_graph_run_resumed_from_saved_arrays_gives_the_same_bits():
    options = Settings(topk_ratio=0.3, update_interval=2, select_interval=4)
    with Training(runs.ONE, options, offload=False) as training:
        training.go(5)
        saved = jax.tree.map(np.array, (training.params, training.state))
        training.go(4)
        expected = training.values()
        training.params, training.state = jax.tree.map(jnp.asarray, saved)
        training.t = 5
        training.go(4)
        comparisons.assert_same_bits(training.values(), expected)
