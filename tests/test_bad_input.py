"""What users are told: every mistake that can be seen is named, with a remedy, before it does harm.

Each row of a table is a call, the exception, and words that must all be in its message: what is
wrong, what came, and what to do.
"""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx

import zenflow_jax
from zenflow_jax._exchange.pinned import check_pinned

DEVICE = jax.devices()[0]
SETTINGS = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 2}
PARAMS = jax.device_put({"bias": jnp.zeros(3), "weight": jnp.ones((6, 3))}, DEVICE)
SQUARE = {"bias": jnp.zeros(3), "weight": jnp.ones((3, 6))}


@pytest.fixture(autouse=True)
def _annotations_are_not_checked():
    """As in a user's process; where they are, they get ahead of the library's own words."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def make(learning_rate=1e-2, **options):
    return zenflow_jax.zenflow(learning_rate, **{**SETTINGS, **options})


def init(params, **options):
    return make(**options).init(params)


def nnx_model():
    """A model whose parameters are `PARAMS`."""
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    model.weight = nnx.Param(PARAMS["weight"])
    del model.kernel
    return model


def table(rows):
    """Rows of (id, call, exception, words) as pytest wants them."""
    ids = [row[0] for row in rows]
    assert len(set(ids)) == len(ids)
    return pytest.mark.parametrize(("call", "exception", "words"), [r[1:] for r in rows], ids=ids)


def assert_told(call, exception, words):
    with pytest.raises(exception) as caught:
        call()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# --- zenflow(...) ---------------------------------------------------------------------------

NUMBERS = ["learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm"]


@pytest.mark.parametrize("value", [jnp.nan, np.inf, -np.inf, -1e-3, np.float32("nan")], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("kind", [float, jnp.float32])
def test_hyperparameters_that_could_only_make_nan_are_refused(name, value, kind):
    assert_told(
        lambda: make(**{name: kind(value)}),
        ValueError,
        [
            f"`{name}`",
            "finite and not negative",
            f"got {float(jnp.float32(value)) if kind is not float else float(value)}",
            "check where it comes from",
        ],
    )


@pytest.mark.parametrize("value", ["0.1", [0.1, 0.2], np.ones(3), 1j], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_hyperparameters_that_are_no_real_number_are_refused(name, value):
    assert_told(
        lambda: make(**{name: value}), TypeError, [f"`{name}`", "a number or a scalar", "got"]
    )


@pytest.mark.parametrize("name", ["learning_rate", "b1", "b2", "eps", "weight_decay"])
def test_only_clipping_can_be_left_out_with_none(name):
    assert_told(lambda: make(**{name: None}), TypeError, [f"`{name}`", "a number", "None"])


@pytest.mark.parametrize("name", ["b1", "b2", "eps", "max_grad_norm"])
def test_a_schedule_of_what_optax_has_no_schedule_of_is_refused(name):
    assert_told(
        lambda: make(**{name: lambda count: 0.5}), TypeError, [f"`{name}`", "inject_hyperparams"]
    )


IF_INJECTED = "static_args=zenflow_jax.STATIC_ARGS"


@table(
    [
        (
            "b1 of 1",
            lambda: make(b1=1.0),
            ValueError,
            ["`b1`", "[0, 1)", "got 1.0", "default is 0.9"],
        ),
        ("b2 of 2", lambda: make(b2=2), ValueError, ["`b2`", "[0, 1)", "got 2", "0.999"]),
        (
            "max_grad_norm of 0",
            lambda: make(max_grad_norm=0),
            ValueError,
            ["`max_grad_norm`", "positive", "got 0", "pass None for no clipping"],
        ),
        (
            "topk_ratio in percent",
            lambda: make(topk_ratio=10.0),
            ValueError,
            ["`topk_ratio`", "[0, 1]", "got 10.0", "for a tenth of them pass 0.1"],
        ),
        (
            "topk_ratio below 0",
            lambda: make(topk_ratio=-0.1),
            ValueError,
            ["`topk_ratio`", "got -0.1"],
        ),
        (
            "topk_ratio of nan",
            lambda: make(topk_ratio=float("nan")),
            ValueError,
            ["`topk_ratio`", "got nan"],
        ),
        ("topk_ratio None", lambda: make(topk_ratio=None), TypeError, ["`topk_ratio`", "a float"]),
        ("topk_ratio True", lambda: make(topk_ratio=True), TypeError, ["`topk_ratio`", "got True"]),
        (
            "update_interval of 0",
            lambda: make(update_interval=0),
            ValueError,
            [
                "`update_interval`",
                "at least 1",
                "got 0",
                "1 updates the deferred channels at every",
            ],
        ),
        (
            "update_interval of a word",
            lambda: make(update_interval="often"),
            TypeError,
            ["`update_interval`", '"auto"', "AutoWindow", "got 'often'"],
        ),
        (
            "an adaptive update_interval with nothing selected",
            lambda: make(topk_ratio=0.0, update_interval="auto"),
            ValueError,
            ["`topk_ratio`", "above 0", "got 0", "pass an int"],
        ),
        (
            "select_interval of a word",
            lambda: make(select_interval="epoch"),
            TypeError,
            ["`select_interval`", '"auto"', "EpochSelect", "got 'epoch'"],
        ),
        (
            "select_interval of 0 with adaptive windows",
            lambda: make(update_interval="auto", select_interval=0),
            ValueError,
            ["`select_interval`", "at least 1", "got 0", "None for"],
        ),
        (
            "max_interval of 0",
            lambda: zenflow_jax.AutoWindow(max_interval=0),
            ValueError,
            ["`AutoWindow.max_interval`", "at least 1", "got 0", "longest window"],
        ),
        (
            "max_interval of True",
            lambda: zenflow_jax.AutoWindow(max_interval=True),
            TypeError,
            ["`AutoWindow.max_interval`", "an int", "got True"],
        ),
        (
            "share of a percentage",
            lambda: zenflow_jax.AutoWindow(share=99),
            ValueError,
            ["`AutoWindow.share`", "[0, 1]", "got 99", "0.99"],
        ),
        (
            "share of 0",
            lambda: zenflow_jax.AutoWindow(share=0),
            ValueError,
            ["`AutoWindow.share`", "above 0", "got 0", "update_interval=2"],
        ),
        (
            "keep of nan",
            lambda: zenflow_jax.AutoSelect(keep=float("nan")),
            ValueError,
            ["`AutoSelect.keep`", "[0, 1]", "got nan"],
        ),
        (
            "keep of a word",
            lambda: zenflow_jax.AutoSelect(keep="most"),
            TypeError,
            ["`AutoSelect.keep`", "a float", "got 'most'"],
        ),
        (
            "max_windows of 2.5",
            lambda: zenflow_jax.AutoSelect(max_windows=2.5),
            TypeError,
            ["`AutoSelect.max_windows`", "an int", "got 2.5"],
        ),
        (
            "an epoch of no steps",
            lambda: zenflow_jax.EpochSelect(steps_per_epoch=0),
            ValueError,
            ["`EpochSelect.steps_per_epoch`", "at least 1", "got 0", "never be selected"],
        ),
        (
            "an epoch of unknown length",
            lambda: zenflow_jax.EpochSelect(steps_per_epoch=None),
            TypeError,
            ["`EpochSelect.steps_per_epoch`", "an int", "got None", "len(loader)"],
        ),
        (
            "update_interval of 2.0",
            lambda: make(update_interval=2.0),
            TypeError,
            ["`update_interval`", "an int", "got 2.0"],
        ),
        (
            "select_interval between windows",
            lambda: make(update_interval=4, select_interval=10),
            ValueError,
            ["`select_interval`", "multiple of `update_interval`", "got 10", "pass 8, or None"],
        ),
        (
            "select_interval shorter than a window",
            lambda: make(update_interval=4, select_interval=2),
            ValueError,
            ["`select_interval`", "got 2 with update_interval=4", "pass 4, or None"],
        ),
        (
            "select_interval of 0",
            lambda: make(select_interval=0),
            ValueError,
            ["`select_interval`", "positive multiple", "got 0", "pass 2, or None"],
        ),
        (
            "select_interval below 0",
            lambda: make(select_interval=-2),
            ValueError,
            ["`select_interval`", "positive multiple", "got -2", "pass 2, or None"],
        ),
        (
            "full_warm_up_rounds below 0",
            lambda: make(full_warm_up_rounds=-1),
            ValueError,
            ["`full_warm_up_rounds`", "negative", "got -1", "0 for none"],
        ),
        (
            "full_warm_up_rounds None",
            lambda: make(full_warm_up_rounds=None),
            TypeError,
            ["`full_warm_up_rounds`", "an int", "got None"],
        ),
        (
            "overlap_step of 1",
            lambda: make(overlap_step=1),
            TypeError,
            ["`overlap_step`", "a bool", "got 1"],
        ),
        (
            "rolling of 1",
            lambda: make(rolling=1),
            TypeError,
            ["`rolling`", "a bool", "got 1"],
        ),
        (
            "staleness below 0",
            lambda: make(staleness=-1),
            ValueError,
            ["`staleness`", "between 0 and `update_interval`", "got -1 with update_interval=2"],
        ),
        *(
            (
                f"staleness longer than a window, rolling={rolling}",
                lambda rolling=rolling: make(
                    update_interval=4, select_interval=4, staleness=5, rolling=rolling
                ),
                ValueError,
                ["`staleness`", "between 0 and `update_interval`", "got 5 with update_interval=4"],
            )
            for rolling in (True, False)
        ),
        (
            "staleness of 1.0",
            lambda: make(staleness=1.0),
            TypeError,
            ["`staleness`", "an int or None", "got 1.0"],
        ),
        (
            "staleness of True",
            lambda: make(staleness=True),
            TypeError,
            ["`staleness`", "an int or None", "got True"],
        ),
        (
            "staleness without overlap",
            lambda: make(staleness=1, overlap_step=False),
            ValueError,
            ["`staleness`", "0 or None", "overlap_step=False, got 1", "leave `overlap_step` out"],
        ),
        (
            "staleness of adaptive windows",
            lambda: make(update_interval=zenflow_jax.AutoWindow(4), staleness=2),
            ValueError,
            ["`staleness`", "adaptive `update_interval`, got 2", "leave `staleness` out"],
        ),
        (
            "window_scaling above 1",
            lambda: make(window_scaling=2),
            ValueError,
            ["`window_scaling`", "in [0, 1] or be None, got 2", "0.5 for the square root"],
        ),
        (
            "window_scaling below 0",
            lambda: make(window_scaling=-0.5),
            ValueError,
            ["`window_scaling`", "in [0, 1] or be None, got -0.5"],
        ),
        (
            "window_scaling NaN",
            lambda: make(window_scaling=float("nan")),
            ValueError,
            ["`window_scaling`", "in [0, 1] or be None, got nan"],
        ),
        (
            "window_scaling in words",
            lambda: make(window_scaling="sqrt"),
            TypeError,
            ["`window_scaling`", 'a float, "auto" or None', "got 'sqrt'"],
        ),
        (
            "provisional_share above 1",
            lambda: make(provisional_share=2),
            ValueError,
            ["`provisional_share`", "in [0, 1] or be None, got 2"],
        ),
        (
            "provisional_share NaN",
            lambda: make(provisional_share=float("nan")),
            ValueError,
            ["`provisional_share`", "in [0, 1] or be None, got nan"],
        ),
        (
            "provisional_share in words",
            lambda: make(provisional_share="half"),
            TypeError,
            ["`provisional_share`", "a float or None", "got 'half'"],
        ),
        ("offload None", lambda: make(offload=None), TypeError, ["`offload`", "a bool", "None"]),
        (
            "channel_axis None",
            lambda: make(channel_axis=None),
            TypeError,
            ["`channel_axis`", "an int or a function", "got None"],
        ),
        (
            "resident of names",
            lambda: make(resident=["bias"]),
            TypeError,
            ["`resident`", "function of (key path, leaf)", "['bias']"],
        ),
        (
            "mask of an array",
            lambda: make(mask=np.ones(3, bool)),
            TypeError,
            ["`mask`", "tree of bools or a function", "array("],
        ),
        (
            "eps_root of adamw by position",
            lambda: zenflow_jax.zenflow(1e-3, 0.9, 0.95, 1e-8, 1e-12),
            TypeError,
            ["at most four", "got 5", "fifth of `optax.adamw` is `eps_root`", "weight_decay=0.01"],
        ),
        *(
            (
                f"{name} of adamw",
                lambda name=name, value=value: make(**{name: value}),
                TypeError,
                [
                    "`zenflow` has all arguments of `optax.adamw` but",
                    f"got {name}=",
                    "Leave it out",
                ],
            )
            for name, value in (("eps_root", 1e-8), ("mu_dtype", jnp.bfloat16), ("nesterov", True))
        ),
        (
            "an argument that nobody has",
            lambda: make(topk=0.1),
            TypeError,
            ["unexpected keyword argument 'topk'"],
        ),
        (
            "eps_root by position under inject_hyperparams",
            lambda: optax.inject_hyperparams(
                zenflow_jax.zenflow, static_args=zenflow_jax.STATIC_ARGS
            )(1e-3, 0.9, 0.95, 1e-8, 1e-12),
            TypeError,
            ["too many positional arguments"],
        ),
    ]
)
def test_zenflow_refuses(call, exception, words):
    assert_told(call, exception, words)


@pytest.mark.parametrize(
    "options",
    [
        {"topk_ratio": 1},
        {"topk_ratio": np.float32(0.25)},
        {"update_interval": np.int64(2)},
        {"overlap_step": np.True_},
        {"rolling": np.False_, "staleness": np.int32(0)},
        {"staleness": 2},
        {"overlap_step": False, "staleness": 0},
        {"update_interval": "auto", "select_interval": None, "staleness": 0},
        {"window_scaling": 0},
        {"window_scaling": None},
        {"window_scaling": np.float32(1.0)},
        {"provisional_share": 0},
        {"provisional_share": np.float32(1.0)},
        {"max_grad_norm": None},
        {"max_grad_norm": 1},
        {"learning_rate": 0},
        {"learning_rate": jnp.float32(0.1)},
        {"learning_rate": np.float64(0.1)},
        {"b1": 0, "b2": 0.0},
        {"channel_axis": np.int32(-1)},
        {"channel_axis": lambda path, leaf: np.int64(-1)},
        {"mask": True},
        {"mask": {"bias": jnp.bool_(True), "weight": np.False_}},
    ],
    ids=lambda options: " and ".join(options),
)
def test_the_neighbours_of_what_is_refused_are_taken(options):
    state = init(PARAMS, **options)
    assert len(state.leaves) == 2
    hash(jax.tree.structure(state))


# --- under optax.inject_hyperparams -----------------------------------------------------------

INJECTED = {
    "topk_ratio": 0.3,
    "update_interval": 2,
    "select_interval": 4,
    "full_warm_up_rounds": 3,
    # Numbers alone: what is a bool it leaves as it is.
    "overlap_step": jnp.array(True),
    "rolling": jnp.array(True),
    "staleness": 1,
    "window_scaling": 0.5,
    "provisional_share": 0.5,
    "channel_axis": -1,
}


@pytest.mark.parametrize("name", INJECTED)
def test_what_inject_hyperparams_would_make_an_array_of_is_refused_with_static_args(name):
    others = [a for a in zenflow_jax.STATIC_ARGS if a != name]
    tx = optax.inject_hyperparams(zenflow_jax.zenflow, static_args=others)
    assert_told(
        lambda: tx(1e-2, **{name: INJECTED[name]}).init(PARAMS),
        TypeError,
        [f"`{name}`", "inject_hyperparams", IF_INJECTED],
    )


def test_a_mask_function_that_inject_hyperparams_took_for_a_schedule_is_refused():
    others = [a for a in zenflow_jax.STATIC_ARGS if a != "mask"]
    tx = optax.inject_hyperparams(zenflow_jax.zenflow, static_args=others)
    # It is called as a schedule is: with a count.
    injected = tx(1e-2, mask=lambda count: jnp.ones_like(count))
    assert_told(lambda: injected.init(PARAMS), TypeError, ["`mask`", IF_INJECTED])


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_hyperparameters_that_inject_hyperparams_cast_to_bfloat16_are_refused(jit):
    # bfloat16(0.999) is 1, which makes every parameter NaN. `optax.adamw` trains on with it.
    params = {"weight": jnp.ones((6, 3), jnp.bfloat16)}
    factory = optax.inject_hyperparams(zenflow_jax.zenflow, static_args=zenflow_jax.STATIC_ARGS)
    tx = factory(1e-2, **SETTINGS, offload=False)

    def run():
        state = (jax.jit(tx.init) if jit else tx.init)(params)
        (jax.jit(tx.update) if jit else tx.update)(params, state, params)

    assert_told(
        run, (TypeError, ValueError), ["must not be rounded", "hyperparam_dtype=jnp.float32"]
    )


# --- tx.init --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["complex64", "int32", "bool", "uint8", "float8_e4m3fn"])
def test_leaves_of_other_dtypes_are_refused_by_name(dtype):
    assert_told(
        lambda: init({"good": jnp.ones(3), "bad": jnp.ones((6, 3), dtype)}),
        ValueError,
        ["['bad']", dtype, "float32, bfloat16 and float16", "Cast the leaf", "optax.masked"],
    )


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64"])
def test_wide_leaves_are_refused_by_name(dtype):
    with jax.enable_x64(True):
        params = {"nested": [jnp.ones((6, 3), dtype)]}
        words = ["['nested'][0]", dtype, "its arithmetic is float32", "Cast the leaf"]
        assert_told(lambda: init(params), ValueError, words)
        assert_told(lambda: jax.eval_shape(make().init, params), ValueError, words)


def test_random_keys_are_refused_by_name():
    assert_told(
        lambda: init({"dropout": jax.random.key(0), **PARAMS}),
        ValueError,
        ["a random key", "['dropout']", "nnx.state(model, nnx.Param)", "`optax.masked`"],
    )


@pytest.mark.parametrize(
    ("tx", "params", "warned"),
    [
        (optax.flatten(make()), PARAMS, True),
        (make(resident=lambda *_: True), PARAMS, True),
        (make(), PARAMS, False),
        (make(topk_ratio=1.0), PARAMS, False),
        (make(offload=False), {"bias": jnp.zeros(3)}, False),
        (make(), {}, False),
    ],
    ids=["flattened", "resident", "usual", "all selected", "in-graph", "empty"],
)
def test_who_saves_no_memory_is_warned(caplog, tx, params, warned):
    tx.init(params)
    messages = [r.getMessage() for r in caplog.records if r.name == "zenflow_jax"]
    assert len(messages) == warned
    assert all("saves no memory" in m and "`optax.flatten`" in m for m in messages)


@pytest.mark.parametrize("leaf", [1.0, "name"], ids=str)
def test_leaves_that_are_no_arrays_are_refused_by_name(leaf):
    assert_told(lambda: init({"scale": leaf}), (TypeError, ValueError), ["['scale']", "array"])


@table(
    [
        (
            "channel_axis beyond the leaf",
            lambda: init(PARAMS, channel_axis=2),
            ValueError,
            ["`channel_axis`", "got 2 for ['weight']", "(6, 3)", "Pass a function", "`resident`"],
        ),
        (
            "channel_axis below the leaf",
            lambda: init(PARAMS, channel_axis=-3),
            ValueError,
            ["`channel_axis`", "got -3 for ['weight']"],
        ),
        (
            "channel_axis function to None",
            lambda: init(PARAMS, channel_axis=lambda path, leaf: None),
            (TypeError, ValueError),
            ["`channel_axis`", "None", "['weight']"],
        ),
        (
            "channel_axis function to a float",
            lambda: init(PARAMS, channel_axis=lambda path, leaf: -1.0),
            (TypeError, ValueError),
            ["`channel_axis`", "-1.0", "['weight']"],
        ),
        (
            "mask of another tree",
            lambda: init(PARAMS, mask={"kernel": True}),
            ValueError,
            ["`mask`", "'kernel'", "'weight'", "function of the parameters"],
        ),
        (
            "mask deeper than the tree",
            lambda: init(PARAMS, mask={"bias": True, "weight": {"kernel": True}}),
            ValueError,
            ["`mask`", "'kernel'", "function of the parameters"],
        ),
        (
            "mask function to another tree",
            lambda: init(PARAMS, mask=lambda params: [True]),
            ValueError,
            ["`mask`", "[*]", "'weight'"],
        ),
    ]
)
def test_init_refuses(call, exception, words):
    assert_told(call, exception, words)


# --- tx.update ------------------------------------------------------------------------------

IN_GRAPH = make(offload=False)
IN_GRAPH_STATE = IN_GRAPH.init(PARAMS)


def update(gradients=PARAMS, state=IN_GRAPH_STATE, params=PARAMS, tx=IN_GRAPH):
    return tx.update(gradients, state, params)


def with_weight(x):
    return {**PARAMS, "weight": x}


ANEW = "`tx.init(params)`"


@table(
    [
        (
            "no params",
            lambda: update(params=None),
            ValueError,
            ["`update` needs the parameters", "None", "tx.update(gradients, opt_state, params)"],
        ),
        (
            "params with fewer leaves",
            lambda: update(params={"bias": PARAMS["bias"]}),
            ValueError,
            ["`params`", "the 2 leaves", "got 1", ANEW],
        ),
        (
            "gradients with more leaves",
            lambda: update({**PARAMS, "more": jnp.ones(2)}),
            ValueError,
            ["`gradients`", "the 2 leaves", "got 3", ANEW],
        ),
        (
            "params of another shape",
            lambda: update(params=SQUARE),
            ValueError,
            ["`params`", "(6, 3) at ['weight']", "got (3, 6)", ANEW],
        ),
        (
            "gradients of another shape",
            lambda: update(SQUARE),
            ValueError,
            ["`gradients`", "(6, 3) at ['weight']", "got (3, 6)", ANEW],
        ),
        (
            "gradients of a batch",
            lambda: update(with_weight(jnp.ones((2, 6, 3)))),
            ValueError,
            ["`gradients`", "['weight']", "got (2, 6, 3)"],
        ),
        (
            "params cast after init",
            lambda: update(params=with_weight(jnp.ones((6, 3), jnp.bfloat16))),
            ValueError,
            ["`params`", "float32 at ['weight']", "got bfloat16", ANEW, "after a cast"],
        ),
        (
            "complex gradients",
            lambda: update(with_weight(jnp.ones((6, 3), jnp.complex64))),
            ValueError,
            ["`gradients`", "real floating point", "complex64 at ['weight']", "jax.grad"],
        ),
        (
            "integer gradients",
            lambda: update(with_weight(jnp.ones((6, 3), jnp.int32))),
            ValueError,
            ["`gradients`", "real floating point", "int32 at ['weight']"],
        ),
        (
            "int4 gradients",
            lambda: update(with_weight(jnp.ones((6, 3), jnp.int4))),
            ValueError,
            ["`gradients`", "real floating point", "int4 at ['weight']"],
        ),
        (
            "gradients of integers",
            lambda: update(with_weight(np.zeros((6, 3), jax.dtypes.float0))),
            ValueError,
            ["`gradients`", "real floating point", "at ['weight']"],
        ),
        (
            "another optimizer's state",
            lambda: update(state=optax.adam(1e-2).init(PARAMS)),
            (TypeError, ValueError),
            ["ZenFlowState", "tuple", "tx.init(params)"],
        ),
        (
            "an engine's state without offload",
            lambda: update(state=make(offload=True).init(PARAMS)),
            ValueError,
            ["offload", "tx.init(params)"],
        ),
        (
            "an in-graph state with offload",
            lambda: update(tx=make(offload=True)),
            ValueError,
            ["offload", "tx.init(params)"],
        ),
    ]
)
def test_update_refuses(call, exception, words):
    assert_told(call, exception, words)
    # Inside the user's program too, while it is traced.
    assert_told(lambda: jax.jit(call)(), exception, words)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_init_and_update_inside_shard_map_are_refused(offload, jit):
    mesh = jax.sharding.Mesh([DEVICE], "data")
    everywhere = jax.sharding.PartitionSpec()
    tx = make(offload=offload)
    state = tx.init(PARAMS)
    for name, call in (
        ("tx.init", lambda params: tx.init(params).step),
        ("tx.update", lambda params: tx.update(params, state, params)[0]),
    ):
        mapped = jax.shard_map(call, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
        assert_told(
            lambda mapped=mapped: (jax.jit(mapped) if jit else mapped)(PARAMS),
            ValueError,
            [
                f"expected `{name}` outside of `jax.shard_map`",
                "'data'",
                f"call `{name}` on what comes out",
            ],
        )


def test_a_second_update_without_exchange_is_refused_outside_jit():
    tx = make()
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert_told(
        lambda: tx.update(PARAMS, state, PARAMS),
        RuntimeError,
        [
            "mail of the last step was not taken",
            "engine.exchange(params, opt_state)",
            "offload=False",
        ],
    )


def test_a_second_update_without_exchange_makes_nan_under_jit():
    tx = make()
    step = jax.jit(tx.update)
    _, state = step(PARAMS, tx.init(PARAMS), PARAMS)
    updates, _ = step(PARAMS, state, PARAMS)
    assert all(bool(jnp.isnan(u).all()) for u in jax.tree.leaves(updates))


# --- find_state and flush -------------------------------------------------------------------

NO_STATE = ["one ZenFlowState", "got 0", "contains `zenflow(...)`", "`nnx.Optimizer` its"]
TWO_STATES = ["one ZenFlowState", "got 2", "one `zenflow(...)` for all leaves", "`resident`"]
TWO = optax.partition({"a": make(), "b": make()}, {"bias": "a", "weight": "b"}).init(PARAMS)


@table(
    [
        (
            "no state",
            lambda: zenflow_jax.find_state(optax.adam(1.0).init(PARAMS)),
            ValueError,
            NO_STATE,
        ),
        ("nothing", lambda: zenflow_jax.find_state(None), ValueError, NO_STATE),
        ("the transformation", lambda: zenflow_jax.find_state(make()), ValueError, NO_STATE),
        ("two states", lambda: zenflow_jax.find_state(TWO), ValueError, TWO_STATES),
        (
            "flush without a state",
            lambda: zenflow_jax.flush(PARAMS, optax.adam(1.0).init(PARAMS)),
            ValueError,
            NO_STATE,
        ),
        ("flush with two", lambda: zenflow_jax.flush(PARAMS, TWO), ValueError, TWO_STATES),
        (
            "flush with an engine's state",
            lambda: zenflow_jax.flush(PARAMS, make().init(PARAMS)),
            ValueError,
            ["offload=False", "with an engine", "`engine.flush(params, opt_state)`"],
        ),
        (
            "flush with arguments exchanged",
            lambda: zenflow_jax.flush(IN_GRAPH_STATE, PARAMS),
            ValueError,
            NO_STATE,
        ),
        (
            "flush with params of another shape",
            lambda: zenflow_jax.flush(SQUARE, IN_GRAPH_STATE),
            ValueError,
            ["`params`", "(6, 3) at ['weight']", "got float32 (3, 6)", "`tx.init`"],
        ),
        (
            "flush without the params",
            lambda: zenflow_jax.flush(None, IN_GRAPH_STATE),
            ValueError,
            ["`params`", "['bias']", "got 0 leaves", "`tx.init`"],
        ),
    ]
)
def test_looking_for_the_state_refuses(call, exception, words):
    assert_told(call, exception, words)


# --- HostEngine(...) ------------------------------------------------------------------------

TX = make()
STATE = TX.init(PARAMS)


def engine(params=PARAMS, state=STATE, **options):
    """An engine that is closed again, should one come of it."""
    with zenflow_jax.HostEngine(params, state, **{"host_kernel": "numpy", **options}):
        pass


def after_a_step():
    return jax.jit(TX.update)(PARAMS, TX.init(PARAMS), PARAMS)[1]


def wrapped_in_nnx():
    model = nnx.Linear(3, 6, rngs=nnx.Rngs(0))
    return nnx.state(nnx.Optimizer(model, optax.adam(1.0), wrt=nnx.Param))


STACKED = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
NUMPY_STATE = ["jax arrays", "ndarray", "jax.device_put(x, like.sharding)"]
JOINED = ["single vector of 21", "`optax.flatten` makes", "Leave `optax.flatten` out"]
NO_BRANCH = [
    "withholds updates with send_gradients",
    "inside the step",
    "leave `send_gradients` out",
]
LATE = make(send_gradients="after_step")

THAT_INIT_SAW = "Pass the parameters that `tx.init` saw"


@table(
    [
        ("no state", lambda: engine(state=optax.adam(1.0).init(PARAMS)), ValueError, NO_STATE),
        ("nothing", lambda: engine(state=None), ValueError, NO_STATE),
        ("no state in nnx", lambda: engine(state=wrapped_in_nnx()), ValueError, NO_STATE),
        ("two states", lambda: engine(state=TWO), ValueError, TWO_STATES),
        ("arguments exchanged", lambda: engine(STATE, PARAMS), ValueError, NO_STATE),
        (
            "a state with offload=False",
            lambda: engine(state=IN_GRAPH_STATE),
            ValueError,
            ["offload=True", "needs no engine"],
        ),
        (
            "the states of several runs in one",
            lambda: engine(STACKED, jax.vmap(TX.init)(STACKED)),
            ValueError,
            ["the state of one run", "those of 2", "`jax.vmap(tx.init)`", "offload=False"],
        ),
        (
            "an nnx model in place of its state",
            lambda: engine(nnx.Linear(3, 6, rngs=nnx.Rngs(0))),
            ValueError,
            ["['bias']", "`nnx.state(model)`, not the model"],
        ),
        (
            "an abstract state",
            lambda: engine(state=jax.eval_shape(TX.init, PARAMS)),
            ValueError,
            ["a state of arrays", "ShapeDtypeStruct", "what `tx.init(params)` returned"],
        ),
        (
            "abstract params",
            lambda: engine(jax.eval_shape(lambda: PARAMS)),
            (TypeError, ValueError),
            ["arrays", "ShapeDtypeStruct"],
        ),
        (
            "NumPy params",
            lambda: engine(jax.tree.map(np.asarray, PARAMS)),
            (TypeError, ValueError),
            ["['bias']", "ndarray", "jax.device_put"],
        ),
        (
            "a NumPy state",
            lambda: engine(state=numpy_state(STATE)),
            TypeError,
            NUMPY_STATE,
        ),
        (
            "a NumPy state in mid-run",
            lambda: engine(state=numpy_state(after_a_step()), engine_state={}),
            TypeError,
            NUMPY_STATE,
        ),
        (
            "leaves that were joined to a vector",
            lambda: engine(state=optax.flatten(TX).init(PARAMS)),
            ValueError,
            JOINED,
        ),
        *(
            (
                f"mail that leaves late behind {name}",
                lambda wrapped=wrapped: engine(state=wrapped.init(PARAMS)),
                ValueError,
                [*NO_BRANCH, name],
            )
            for name, wrapped in (
                ("MultiSteps", optax.MultiSteps(LATE, 2)),
                ("ApplyIfFinite", optax.apply_if_finite(LATE, 3)),
            )
        ),
        (
            "a traced state",
            lambda: jax.jit(lambda p: (engine(p, TX.init(p)), p)[1])(PARAMS),
            ValueError,
            ["a state of arrays", "Tracer", "outside of jit"],
        ),
        (
            "a state in mid-run",
            lambda: engine(state=after_a_step()),
            ValueError,
            ["a state from `tx.init`", "after 1 steps", "before the first step"],
        ),
        (
            "params of another tree",
            lambda: engine({"kernel": PARAMS["weight"]}),
            ValueError,
            ["`params`", "['bias']", "got 1 leaves", THAT_INIT_SAW],
        ),
        (
            "params of another shape",
            lambda: engine(SQUARE),
            ValueError,
            ["`params`", "float32 (6, 3) at ['weight']", "got float32 (3, 6)", THAT_INIT_SAW],
        ),
        (
            "params of another dtype",
            lambda: engine(with_weight(jnp.ones((6, 3), jnp.float16))),
            ValueError,
            ["`params`", "float32 (6, 3) at ['weight']", "got float16 (6, 3)", THAT_INIT_SAW],
        ),
        (
            "an unknown kernel",
            lambda: engine(host_kernel="cuda"),
            ValueError,
            ["`host_kernel`", "'numba', 'numpy'", "got 'cuda'", "Leave it at 'numba'"],
        ),
        *(
            (
                f"host_state {x!r}",
                lambda x=x: engine(host_state=x),
                ValueError,
                ["`host_state`", "'float32', 'compact'", f"got {x!r}"],
            )
            for x in ("int8", None)
        ),
        *(
            (
                f"threads {threads!r}",
                lambda threads=threads: engine(threads=threads),
                ValueError,
                ["`threads`", "positive integer or None", f"got {threads!r}", "all but one"],
            )
            for threads in (0, -1, 1.5, True, "2")
        ),
        *(
            (
                f"prefetch_bytes {size!r}",
                lambda size=size: engine(prefetch_bytes=size),
                ValueError,
                ["`prefetch_bytes`", "whole number from 0 or None", f"got {size!r}"],
            )
            for size in (-1, 1e9, True, "1G")
        ),
        *(
            (
                f"max_skipped {number!r}",
                lambda number=number: engine(max_skipped=number),
                ValueError,
                ["`max_skipped`", "whole number from 1", f"got {number!r}"],
            )
            for number in (0, 2.0, True)
        ),
    ]
)
def test_the_engine_is_not_made_of(call, exception, words):
    assert_told(call, exception, words)


GIB = 2**30


@pytest.mark.parametrize("limit", [None, "", "64"])
def test_pinned_memory_that_jax_would_not_give_is_refused_with_the_number_needed(limit):
    assert_told(
        lambda: check_pinned(25 * GIB, 3, GIB // 2, "cuda", limit),
        ValueError,
        [
            "3 mails of 25.0 GiB",
            "0.5 GiB",
            "limit of 64 GiB",
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=77",
        ],
    )


def test_a_pinned_memory_limit_that_is_no_number_is_refused():
    words = ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "'much'", "unset it"]
    assert_told(lambda: check_pinned(GIB, 3, 0, "cuda", "much"), ValueError, words)


@pytest.mark.parametrize(
    ("mail", "platform", "limit"),
    [(21 * GIB, "cuda", None), (25 * GIB, "cuda", "76"), (25 * GIB, "cpu", "1"), (0, "gpu", "0")],
)
def test_pinned_memory_that_is_there_is_taken(mail, platform, limit):
    check_pinned(mail, 3, 0, platform, limit)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"send_gradients": "later"},
            ["`send_gradients`", "'after_step' or 'per_window'", "'later'", "Leave it"],
        ),
        ({"send_gradients": None}, ["`send_gradients`", "got None"]),
        ({"transfer_dtype": "float16"}, ["`transfer_dtype` must be bfloat16", "'float16'"]),
        (
            {"transfer_dtype": 3},
            ["`transfer_dtype` must be bfloat16", "got 3", "in their own dtype"],
        ),
    ],
    ids=str,
)
def test_ways_for_gradients_that_do_not_exist_are_refused_with_the_choices(options, words):
    assert_told(lambda: make(**options), ValueError, words)


# --- engine.exchange and engine.flush -------------------------------------------------------


@pytest.fixture
def running():
    """An engine after its first exchange, with what that returned."""
    engine = zenflow_jax.HostEngine(PARAMS, STATE_FOR_RUNS, host_kernel="numpy")
    yield engine, *engine.exchange(*step(PARAMS, STATE_FOR_RUNS))
    engine.close()  # no `with`: leaving one complains of what was not flushed


@jax.jit
def step(params, state):
    gradients = jax.tree.map(lambda p: jnp.sin(3 * p) + 0.1, params)
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


STATE_FOR_RUNS = TX.init(PARAMS)


def finish(engine, params, state, steps=4):
    for _ in range(steps):
        params, state = engine.exchange(*step(params, state))
    return engine.flush(params, state)[0]


OTHER_RUN = ["the run that this engine was made for", "other leaves or settings", "of its own"]


def numpy_state(state):
    return jax.tree.map(np.asarray, state)


def abstract_state(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


# Before the second step: calls with what the first exchange returned.
BEFORE = [
    (
        "exchange without a step",
        lambda e, p, s: e.exchange(p, s),
        RuntimeError,
        ["the state of a new step", "once after each step"],
    ),
    (
        "exchange with another optimizer's state",
        lambda e, p, s: e.exchange(p, optax.adam(1.0).init(p)),
        ValueError,
        NO_STATE,
    ),
    ("flush with two states", lambda e, p, s: e.flush(p, (s, s)), ValueError, TWO_STATES),
    (
        "exchange with a state of other settings",
        lambda e, p, s: e.exchange(p, make(update_interval=1).init(p)),
        ValueError,
        OTHER_RUN,
    ),
    (
        "exchange with a state of other leaves",
        lambda e, p, s: e.exchange(SQUARE, TX.init(SQUARE)),
        ValueError,
        OTHER_RUN,
    ),
    (
        "flush with params of another shape",
        lambda e, p, s: e.flush(SQUARE, s),
        ValueError,
        ["`params`", "(6, 3) at ['weight']", "got float32 (3, 6)"],
    ),
    (
        "exchange with the state of an nnx optimizer",
        lambda e, p, s: e.exchange(p, nnx.Optimizer(nnx_model(), TX, wrt=nnx.Param).opt_state),
        TypeError,
        ["a state of jax arrays", "`exchange_nnx`"],
    ),
    (
        "exchange_nnx with trees",
        lambda e, p, s: e.exchange_nnx(p, s),
        TypeError,
        ["`model` to be an `nnx.Module`", "got dict", "methods without `_nnx`"],
    ),
    (
        "peek_nnx with a state in place of the optimizer",
        lambda e, p, s: e.peek_nnx(nnx.Linear(3, 6, rngs=nnx.Rngs(0)), s),
        TypeError,
        ["`optimizer` to be an `nnx.Optimizer`", "got ZenFlowState", "methods without `_nnx`"],
    ),
    (
        "flush with a NumPy state",
        lambda e, p, s: e.flush(p, numpy_state(s)),
        TypeError,
        NUMPY_STATE,
    ),
    (
        "flush with another state of the same run",
        lambda e, p, s: e.flush(p, STATE_FOR_RUNS),
        RuntimeError,
        ["the state that the last `exchange` returned", "Call `flush` with the one it returned"],
    ),
]

# After it: calls with what the step returned. A window closes here.
AFTER = [
    (
        "flush instead of exchange",
        lambda e, p, s: e.flush(p, s),
        RuntimeError,
        ["one whose step's mail has not been taken", "Call `exchange` first, then `flush`"],
    ),
    (
        "exchange with params of another shape",
        lambda e, p, s: e.exchange(SQUARE, s),
        ValueError,
        ["`params`", "(6, 3) at ['weight']", "got float32 (3, 6)"],
    ),
    (
        "exchange with other params",
        lambda e, p, s: e.exchange({"kernel": p["weight"]}, s),
        ValueError,
        ["`params`", "['bias']", "got 1 leaves"],
    ),
    (
        "exchange without params",
        lambda e, p, s: e.exchange(None, s),
        ValueError,
        ["`params`", "['bias']", "got 0 leaves"],
    ),
    (
        "exchange with NumPy params",
        lambda e, p, s: e.exchange(jax.tree.map(np.asarray, p), s),
        (TypeError, ValueError),
        ["['bias']", "ndarray"],
    ),
    (
        "exchange with a NumPy state",
        lambda e, p, s: e.exchange(p, numpy_state(s)),
        TypeError,
        NUMPY_STATE,
    ),
    (
        "exchange with an abstract state",
        lambda e, p, s: e.exchange(p, abstract_state(s)),
        (TypeError, ValueError),
        ["arrays", "ShapeDtypeStruct"],
    ),
]


@pytest.fixture(scope="module")
def undisturbed():
    with zenflow_jax.HostEngine(PARAMS, STATE_FOR_RUNS, host_kernel="numpy") as engine:
        return finish(engine, PARAMS, STATE_FOR_RUNS, 5)


def assert_as_if_nothing_had_happened(params, undisturbed):
    for key, expected in undisturbed.items():
        np.testing.assert_array_equal(params[key], expected)


@table(BEFORE)
def test_between_two_steps_the_engine_refuses_and_the_run_goes_on(
    running, undisturbed, call, exception, words
):
    engine, params, state = running
    before = engine.stats
    assert_told(lambda: call(engine, params, state), exception, words)
    # What the worker, which may still be at the last mail, and the clock change.
    moving = {f.name: 0.0 for f in dataclasses.fields(before) if f.name.endswith("_s")}
    moving |= {"bytes_to_host": 0, "host_bytes": 0, "pinned_bytes": 0}
    assert dataclasses.replace(engine.stats, **moving) == dataclasses.replace(before, **moving)
    assert_as_if_nothing_had_happened(finish(engine, params, state), undisturbed)


@table(AFTER)
def test_after_a_step_the_engine_refuses_and_the_run_goes_on(
    running, undisturbed, call, exception, words
):
    engine, params, state = running
    params, state = step(params, state)
    assert_told(lambda: call(engine, params, state), exception, words)
    assert engine.stats.steps == 1
    params, state = engine.exchange(params, state)
    assert_as_if_nothing_had_happened(finish(engine, params, state, 3), undisturbed)


@pytest.mark.parametrize(
    ("change", "exception", "words"),
    [
        (
            lambda p: p | {"weight": p["weight"][:, :1]},
            ValueError,
            ["`params`", "(6, 3) at ['weight']", "got float32 (6, 1)"],
        ),
        (
            lambda p: p | {"weight": p["weight"].astype(jnp.bfloat16)},
            ValueError,
            ["`params`", "(6, 3) at ['weight']", "got bfloat16 (6, 3)"],
        ),
        (lambda p: jax.tree.map(np.asarray, p), TypeError, ["['bias']", "ndarray"]),
    ],
    ids=["shape", "dtype", "NumPy"],
)
def test_other_parameters_are_refused_where_an_update_arrives_and_no_window_closes(
    change, exception, words
):
    tx = make(update_interval=4, select_interval=4, staleness=2)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    with zenflow_jax.HostEngine(params, state, host_kernel="numpy") as engine:
        for _ in range(5):
            params, state = engine.exchange(*step(params, state))
        params, state = step(params, state)
        assert_told(lambda: engine.exchange(change(params), state), exception, words)
        # What is right is taken as if nothing had happened.
        params, state = engine.exchange(params, state)
        engine.flush(params, state)


def until_told(engine, params, state):
    """Steps on until the engine has read the mail that is wrong; two mails may be unread."""
    for _ in range(4):
        params, state = engine.exchange(*step(params, state))
    engine.flush(params, state)


WORKER_FAILED = ["takes no more work", "last checkpoint"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        lambda tx: optax.apply_if_finite(tx, 3),
    ],
    ids=["MultiSteps", "apply_if_finite"],
)
def test_an_update_that_a_wrapper_withholds_is_told_of_once_its_mail_is_read(wrap):
    tx = wrap(TX)
    withheld = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS)
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)

    def go_on():
        nonlocal params, state
        for _ in range(4):
            with jax.numpy_dtype_promotion("standard"):  # optax is not strict-clean
                _, state = update(withheld, state, params)
            params, state = engine.exchange(params, state)
        engine.flush(params, state)

    with zenflow_jax.HostEngine(params, state, host_kernel="numpy") as engine:
        assert_told(
            go_on,
            RuntimeError,
            [
                "the mail of step 1",
                "`optax.MultiSteps`, `optax.apply_if_finite`, a `lax.cond` around `tx.update`",
                "has_updated",
                "inside the step",
                *WORKER_FAILED,
            ],
        )


def test_two_steps_without_exchange_are_told_of_once_the_mail_is_read(running):
    engine, params, state = running
    params, state = step(*step(params, state))
    assert_told(
        lambda: until_told(engine, *engine.exchange(params, state)),
        RuntimeError,
        ["two steps were made without `exchange`", "after every step", *WORKER_FAILED],
    )


def test_a_state_of_another_run_is_told_of_once_its_mail_is_read(running):
    engine, params, _ = running
    theirs = TX.init(SHIFTED)
    other = zenflow_jax.HostEngine(SHIFTED, theirs, host_kernel="numpy")
    _, theirs = step(*other.exchange(*step(SHIFTED, theirs)))
    assert_told(
        lambda: until_told(engine, *engine.exchange(params, theirs)),
        RuntimeError,
        ["that this engine did not return", "an engine of its own", *WORKER_FAILED],
    )
    other.close()


SHIFTED = jax.tree.map(lambda p: p + 0.5, PARAMS)


@pytest.mark.parametrize("rate", [np.nan, np.inf], ids=str)
def test_a_schedule_that_becomes_nan_is_told_of_with_the_step(rate):
    tx = make(lambda count: jnp.where(count == 1, rate, 1e-2))
    update = jax.jit(tx.update)
    engine = zenflow_jax.HostEngine(PARAMS, tx.init(PARAMS), host_kernel="numpy")

    def run(params, state):
        for _ in range(4):
            updates, state = update(params, state, params)
            params = optax.apply_updates(params, updates)
            params, state = engine.exchange(params, state)

    words = ["finite hyperparameters at step 2", f"learning_rate={rate}", "schedule"]
    assert_told(lambda: run(PARAMS, tx.init(PARAMS)), RuntimeError, words + WORKER_FAILED)
    engine.close()


def test_a_failed_engine_says_so_at_every_further_call(running):
    engine, params, state = running
    stepped = step(*step(params, state))
    with pytest.raises(RuntimeError):
        until_told(engine, *engine.exchange(*stepped))
    for call in (engine.exchange, engine.flush):
        assert_told(lambda call=call: call(params, state), RuntimeError, WORKER_FAILED)


def test_a_closed_engine_says_so(running):
    engine, params, state = running
    engine.close()
    for call in (engine.exchange, engine.flush):
        assert_told(
            lambda call=call: call(params, state),
            RuntimeError,
            ["expected an open engine", "`close`", "HostEngine(params, tx.init(params))"],
        )


def test_leaving_with_updates_that_never_reached_the_parameters_is_an_error():
    def leave():
        with zenflow_jax.HostEngine(PARAMS, STATE_FOR_RUNS, host_kernel="numpy") as engine:
            engine.exchange(*step(PARAMS, STATE_FOR_RUNS))

    assert_told(
        leave, RuntimeError, ["never reached the parameters", "engine.flush(params, opt_state)"]
    )


def test_leaving_because_of_an_error_does_not_hide_it():
    def leave():
        with zenflow_jax.HostEngine(PARAMS, STATE_FOR_RUNS, host_kernel="numpy") as engine:
            engine.exchange(*step(PARAMS, STATE_FOR_RUNS))
            raise KeyError("the user's own")

    assert_told(leave, KeyError, ["the user's own"])
