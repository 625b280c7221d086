"""The slow NumPy reference against optax where the two must be equal, and by hand elsewhere.

By hand: with `b1 = b2 = 0`, `eps = 1` and no weight decay an AdamW step is `p -= lr g / (|g| + 1)`,
so gradients of 1, 3 and 7 move a parameter by 1/2, 3/4 and 7/8 of the learning rate, exactly.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from tests.reference import Reference, Settings

# Float32, the same operations, parameters up to 4 (one unit in the last place is 2.4e-7, which is
# the worst seen) and updates near 1e-2, of which `b2**n`, rounded otherwise, may weigh 3e-5.
ATOL = 1e-6

SHAPES = [(12, 5), (5, 12), (2, 6, 4), (2, 3, 4), (3, 5, 2), (7,), ()]
AXES = [-2, -1, -2, -1, 0, None, None]  # trailing, stacked, ahead of the last two, resident
DECAY = [True, False, True, True, True, False, True]

BY_HAND = dict(b1=0.0, b2=0.0, eps=1.0, weight_decay=0.0, provisional_share=None)


def schedule(count):
    return 1e-2 * 0.9**count


def example_params():
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def example_gradients(steps):
    """Gradients whose large channels are others every few steps, so that selections move."""
    rng = np.random.default_rng(2)
    for _ in range(steps):
        yield [(rng.normal(size=s) * np.exp(rng.normal(size=s))).astype(np.float32) for s in SHAPES]


def optax_trajectory(transformation, steps):
    params = [jnp.asarray(p) for p in example_params()]
    state = transformation.init(params)
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict-clean
        update = jax.jit(transformation.update)
        for gradients in example_gradients(steps):
            updates, state = update([jnp.asarray(g) for g in gradients], state, params)
            params = optax.apply_updates(params, updates)
            yield params


def one_leaf(n, learning_rate=1.0, *, dtype=np.float32, **options):
    """A reference for one `(n, 1)` leaf of zeros whose steps can be done by hand."""
    settings = Settings(**{"rolling": False, "window_scaling": None, **BY_HAND, **options})
    return Reference([np.zeros((n, 1), dtype)], learning_rate, settings, channel_axes=[-2])


def step(reference, *gradient):
    """One step with a number for each channel; what the channels of the parameter then are."""
    (param,) = reference.step([np.array(gradient, np.float32)[:, None]])
    return param[:, 0].tolist()


def flush(reference):
    (param,) = reference.flush()
    return param[:, 0].tolist()


STEP_BY_STEP = dict(update_interval=1, staleness=0)


@pytest.mark.parametrize(
    ("options", "reselections"),
    [
        (dict(STEP_BY_STEP, topk_ratio=0.0, select_interval=1000), 1),
        (dict(STEP_BY_STEP, topk_ratio=0.25, select_interval=1), 10),
        (dict(STEP_BY_STEP, topk_ratio=0.6, select_interval=7, weight_decay=0.05), 2),
        (dict(topk_ratio=1.0, update_interval=3, select_interval=3), 3),
        (dict(topk_ratio=1.0, update_interval=4, select_interval=4, staleness=0), 2),
        (dict(topk_ratio=0.25, update_interval=4, full_warm_up_rounds=11), 0),
        # Clipped always, at some steps, never.
        (dict(STEP_BY_STEP, topk_ratio=0.25, select_interval=2, max_grad_norm=0.5), 6),
        (dict(STEP_BY_STEP, topk_ratio=0.25, select_interval=2, max_grad_norm=25.0), 6),
        (dict(STEP_BY_STEP, topk_ratio=0.25, select_interval=2, max_grad_norm=1e6), 6),
    ],
    ids=str,
)
def test_where_nothing_is_stale_it_equals_optax_adamw(options, reselections):
    settings, steps = Settings(**options), 10
    adamw = optax.adamw(schedule, weight_decay=settings.weight_decay, mask=DECAY)
    if settings.max_grad_norm is not None:
        adamw = optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), adamw)
    ours = Reference(example_params(), schedule, settings, channel_axes=AXES, decay=DECAY)
    theirs = optax_trajectory(adamw, steps)
    for gradients, expected in zip(example_gradients(steps), theirs, strict=True):
        for p, q in zip(ours.step(gradients), expected, strict=True):
            np.testing.assert_allclose(p, q, rtol=0, atol=ATOL)
    assert ours.reselections == reselections


def test_scores_and_the_window_mean_are_of_clipped_gradients():
    reference = one_leaf(2, topk_ratio=0.5, update_interval=2, max_grad_norm=5.0, b2=0.5)
    step(reference, 6.0, 8.0)  # of norm 10: halved
    np.testing.assert_array_equal(reference.scores[0], [9.0, 16.0])
    step(reference, 0.0, 2.0)
    _, mu, nu, _ = reference.moments(0)
    np.testing.assert_array_equal(mu[1], 3.0)
    np.testing.assert_array_equal(nu[1], 4.5)


def test_finite_leaves_of_infinite_norm_are_clipped_to_zero_as_optax_does():
    settings = Settings(**BY_HAND, max_grad_norm=1.0)
    leaves = [np.zeros(1, np.float32)] * 2
    reference = Reference(leaves, 1.0, settings, channel_axes=[None, None])
    huge = np.array([1.5e19], np.float32)
    np.testing.assert_array_equal(reference.step([huge, huge]), 0.0)
    assert reference.skipped == 0


def test_a_deferred_channel_takes_one_step_with_the_mean_of_its_window():
    reference = one_leaf(2, topk_ratio=0.5, update_interval=2, staleness=0)
    assert step(reference, 1.0, 1.0) == [-0.5, 0.0]
    assert step(reference, 1.0, 5.0) == [-1.0, -0.75]
    _, _, _, steps = reference.moments(0)
    np.testing.assert_array_equal(steps, [[2], [1]])


def test_a_deferred_channel_uses_the_learning_rate_of_the_last_step_of_its_window():
    rates = [8.0, 4.0]
    reference = one_leaf(2, rates.__getitem__, topk_ratio=0.5, update_interval=2, staleness=0)
    assert step(reference, 1.0, 1.0) == [-4.0, 0.0]
    assert step(reference, 1.0, 1.0) == [-6.0, -2.0]


def test_an_overlapped_update_is_stale_by_exactly_one_window():
    reference = one_leaf(2, topk_ratio=0.5, update_interval=3)
    seen = [step(reference, 9.0, 1.0 if t <= 3 else 3.0)[1] for t in range(1, 10)]
    # The third window's update is still on its way at the end.
    assert seen == [0.0] * 5 + [-0.5] * 3 + [-1.25]
    assert reference.moments(0)[0][1, 0] == -2.0
    assert reference.windows == 3


def test_an_entering_channel_receives_the_update_of_the_closed_window_at_once():
    reference = one_leaf(3, topk_ratio=0.3, update_interval=2, select_interval=2)
    step(reference, 0.0, 1.0, 3.0)
    assert step(reference, 0.0, 1.0, 3.0) == [0.0, 0.0, -0.75]
    np.testing.assert_array_equal(reference.selected[0], [2])
    # It is an ordinary selected channel from here on; the other is still stale.
    assert step(reference, 0.0, 1.0, 3.0) == [0.0, 0.0, -1.5]
    assert step(reference, 0.0, 1.0, 3.0) == [0.0, -0.5, -2.25]


def test_a_leaving_channel_keeps_its_adam_state_and_joins_the_next_window():
    reference = one_leaf(
        2, topk_ratio=0.5, update_interval=2, select_interval=2, staleness=0, b1=0.5
    )
    step(reference, 1.0, 4.0)
    step(reference, 1.0, 4.0)
    np.testing.assert_array_equal(reference.selected[0], [1])
    before = reference.moments(0)
    np.testing.assert_array_equal(before[1][0], 0.75)
    np.testing.assert_array_equal(before[3][0], 2)

    step(reference, 1.0, 4.0)
    for old, new in zip(before, reference.moments(0), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
    step(reference, 3.0, 4.0)
    _, mu, _, steps = reference.moments(0)
    np.testing.assert_array_equal(mu[0], 1.375)  # half of 0.75 and half of the mean of 1 and 3
    np.testing.assert_array_equal(steps[0], 3)


def test_the_first_channels_stand_in_until_the_first_boundary():
    reference = one_leaf(4, topk_ratio=0.5, update_interval=2, select_interval=4)
    chosen = [reference.selected[0].tolist()]
    for t in range(1, 7):
        step(reference, *([1.0, 2.0, 3.0, 4.0] if t <= 2 else [4.0, 3.0, 2.0, 1.0]))
        chosen.append(reference.selected[0].tolist())
    # Chosen at step 2, the first boundary, then at 4; the scores of steps 1 and 2 are gone by then.
    assert chosen == [[0, 1]] * 2 + [[2, 3]] * 2 + [[0, 1]] * 3
    np.testing.assert_array_equal(reference.scores[0], [32.0, 18.0, 8.0, 2.0])
    assert reference.reselections == 2


def test_ties_go_to_the_lower_channel():
    reference = one_leaf(5, topk_ratio=0.4, update_interval=1)
    step(reference, 1.0, -2.0, 3.0, 2.0, 2.0)
    np.testing.assert_array_equal(reference.selected[0], [1, 2])


def test_stack_entries_select_separately_and_trailing_channels_do_not_stack():
    gradient = np.zeros((2, 3, 4), np.float32)
    gradient[0, 1, 3] = gradient[1, 2, 0] = 1.0
    settings = Settings(topk_ratio=0.25, update_interval=1)
    zeros = np.zeros_like(gradient)
    reference = Reference([zeros] * 3, 1.0, settings, channel_axes=[-2, -1, -3])
    reference.step([gradient] * 3)
    rows, columns, blocks = reference.selected
    np.testing.assert_array_equal(rows, [[1], [2]])
    np.testing.assert_array_equal(columns, [[3], [0]])
    np.testing.assert_array_equal(blocks, [0])
    assert [s.shape for s in reference.scores] == [(2, 3), (2, 4), (2,)]


def test_a_warm_up_updates_everything_and_ends_with_the_first_selection():
    reference = one_leaf(3, topk_ratio=0.3, update_interval=2, full_warm_up_rounds=3)
    chosen, seen = [], []
    for _ in range(7):
        seen.append(step(reference, 1.0, 1.0, 3.0)[1:])
        chosen.append(reference.selected[0].tolist())
    assert chosen == [[0]] * 2 + [[2]] * 5
    # Windows close at steps 5 and 7 from then on, so the first reaches the parameters at 7.
    assert [third for _, third in seen] == [-0.75 * t for t in range(1, 8)]
    assert [second for second, _ in seen] == [-0.5, -1.0] + [-1.5] * 4 + [-2.0]
    assert reference.windows == 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_a_gradient_without_finite_square_is_skipped_wherever_it_is(bad):
    params = [np.zeros((2, 1), np.float32), np.zeros(1, np.float32)]
    settings = Settings(**BY_HAND, topk_ratio=0.5, update_interval=2)
    reference = Reference(params, 1.0, settings, channel_axes=[-2, None])
    ones = [np.ones_like(p) for p in params]
    before = reference.step(ones)
    state, scores = reference.moments(0), reference.scores[0]
    after = reference.step([ones[0], np.array([bad], np.float32)])

    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old)
    assert (reference.skipped, reference.step_count, reference.windows) == (1, 2, 1)
    for old, new in zip(state, reference.moments(0), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
    # The boundary was held: the deferred channel moved and the scores, `[1, 1]`, chose again.
    np.testing.assert_array_equal(scores, [1.0, 1.0])
    np.testing.assert_array_equal(reference.scores[0], [0.0, 0.0])
    assert reference.moments(0)[0][1, 0] == -0.5


def test_a_skipped_step_counts_for_schedule_and_window_but_not_for_the_mean():
    rates = [1.0, 2.0, 4.0]
    reference = one_leaf(2, rates.__getitem__, topk_ratio=0.5, update_interval=3, staleness=0)
    assert step(reference, 1.0, 1.0) == [-0.5, 0.0]
    assert step(reference, 1.0, 5.0) == [-1.5, 0.0]
    # Mean 3 of the two steps before it, rate 4 of its own.
    assert step(reference, np.nan, 1.0) == [-1.5, -3.0]


@pytest.mark.parametrize("staleness", [0, None])
def test_a_window_of_skipped_steps_makes_no_host_update(staleness):
    reference = one_leaf(
        2, topk_ratio=0.5, update_interval=2, staleness=staleness, weight_decay=0.5
    )
    for _ in range(4):
        assert step(reference, 0.0, np.nan) == [0.0, 0.0]
    _, _, _, steps = reference.moments(0)
    np.testing.assert_array_equal(steps, 0)
    assert (reference.skipped, reference.windows, reference.reselections) == (4, 2, 1)


def test_flush_closes_the_open_window_early_and_leaves_the_schedule_alone():
    rates = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    reference = one_leaf(2, rates.__getitem__, topk_ratio=0.5, update_interval=4)
    assert step(reference, 9.0, 1.0)[1] == 0.0
    assert step(reference, 9.0, 5.0)[1] == 0.0
    assert flush(reference)[1] == -1.5  # mean 3, rate 2
    assert flush(reference)[1] == -1.5
    assert (reference.windows, reference.reselections) == (1, 0)

    # What is left of the first window: mean 7, rate 8, and stale like any other.
    assert [step(reference, 9.0, g)[1] for g in [6.0, 8.0, 1.0, 1.0, 1.0]] == [-1.5] * 5
    assert (reference.windows, reference.reselections) == (2, 1)
    assert step(reference, 9.0, 1.0)[1] == -1.5 - 7.0


def test_flush_brings_home_what_is_waiting_and_the_open_window():
    reference = one_leaf(2, topk_ratio=0.0, update_interval=2)
    step(reference, 1.0, 3.0)
    assert step(reference, 1.0, 3.0) == [0.0, 0.0]
    assert step(reference, 3.0, 7.0) == [0.0, 0.0]
    assert flush(reference) == [-1.25, -1.625]
    np.testing.assert_array_equal(reference.params, reference.moments(0)[:1])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=lambda d: d.__name__)
def test_a_low_precision_parameter_is_the_cast_of_a_float32_master(dtype):
    tiny = 2.0**-14  # below half a unit in the last place of 1.0 in either dtype
    reference = Reference(
        [np.ones((2, 1), dtype)],
        tiny,
        Settings(**BY_HAND, topk_ratio=0.5, update_interval=1, staleness=0),
        channel_axes=[-2],
    )
    ones = np.ones((2, 1), dtype)
    for _ in range(512):
        (param,) = reference.step([ones])
    master, _, _, steps = reference.moments(0)
    assert param.dtype == dtype
    assert master.dtype == np.float32
    np.testing.assert_array_equal(steps, 512)
    np.testing.assert_array_equal(master, 1 - 512 * tiny / 2)
    np.testing.assert_array_equal(param, master.astype(dtype))
