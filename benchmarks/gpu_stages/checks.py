"""The questions of the stage `correct`, and what answers them.

    python -m benchmarks.gpu_stages.checks rows.jsonl 0

Answers from the question of that number on, and writes to the file when it begins with one and
what came of it. A question gives rows: a largest difference, what it may be, and whether it is.
What is held against what: `optax.adamw`, the slow NumPy reference of the whole arithmetic
(`tests/reference.py`), the same run done in another way that must give the same bits.

Gradients are functions of the step alone, so a difference does not grow from step to step.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import zenflow_jax
from benchmarks.gpu_stages.__main__ import NO_GPU
from tests.reference import Reference, Settings
from zenflow_jax import HostEngine

# Float32, the same operations in another order and of another machine; parameters up to 4, where a
# unit in the last place is 2.4e-7, and updates near 1e-2. The tests allow a CPU half of it.
ATOL = 2e-6
# Moments, relative to the largest of a leaf.
MOMENT_TOL = 2e-6
# A master that is off by ATOL is cast to the other neighbour where it lies that close to the middle
# of two bfloat16 numbers.
FLIPPED = 0.005

OPTIONS = {"weight_decay": 0.01, "topk_ratio": 0.2, "update_interval": 4, "select_interval": 8}
STEPS = 18  # four windows and an open one, the first and a second selection


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    axis: int | None  # of the channels, from the back; None keeps it resident
    dtype: str


Leaves = dict[str, Leaf]


class Row(NamedTuple):
    what: str
    difference: float | None
    tolerance: float | None
    passed: bool


class World(NamedTuple):
    """What the questions train: few elements for the reference, many to make transfers last."""

    few: Leaves
    many: Leaves


def world(rehearse: bool) -> World:
    def leaves(n: int, width: int) -> Leaves:
        found = {
            "bias": Leaf((width,), None, "float32"),
            "columns": Leaf((2, width // 2, n), -1, "bfloat16"),
            "empty": Leaf((0, 3), None, "float32"),
            "rows": Leaf((n, width), -2, "float32"),
        }
        if not rehearse:  # what it would compile in vain
            found["stack"] = Leaf((2, n, width // 2), -2, "bfloat16")
        return found

    if rehearse:  # the same, so that what is compiled for the one serves the other
        return World(leaves(12, 8), leaves(12, 8))
    return World(leaves(192, 128), leaves(8192, 2048))


def rate(count: Any) -> jax.Array:
    return 1e-2 * 0.95 ** jnp.asarray(count, jnp.float32)


# --- runs -----------------------------------------------------------------------------------


def first(leaves: Leaves) -> dict[str, jax.Array]:
    """The initial parameters, bound to the device."""
    values = dict(_drawn(tuple(leaves.items())))
    if jax.devices()[0].platform == "cpu":
        # The CPU backend takes aligned NumPy memory for its own, and what donates writes there.
        values = jax.tree.map(np.copy, values)
    return jax.device_put(values, jax.devices()[0])


@functools.cache
def _drawn(many: tuple[tuple[str, Leaf], ...]) -> list[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (name, rng.standard_normal(x.shape, np.float32).astype(np.dtype(x.dtype)))
        for name, x in many
    ]


@functools.cache
def gradients_of(many: tuple[tuple[str, Leaf], ...]) -> Any:
    """Of a step: the device draws them, which is fast; channels differ much, and not for long."""

    @jax.jit
    def draw(step: jax.Array) -> dict[str, jax.Array]:
        found = {}
        for number, (name, leaf) in enumerate(many):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), step), number)
            x = jax.random.normal(key, leaf.shape)
            if leaf.axis is not None:
                shape = [1] * len(leaf.shape)
                shape[leaf.axis] = leaf.shape[leaf.axis]
                x = x * jnp.exp(jax.random.normal(jax.random.fold_in(key, 1), shape))
            found[name] = x.astype(leaf.dtype)
        return found

    return draw


def gradients(leaves: Leaves, step: int, bad: Sequence[int] = ()) -> dict[str, jax.Array]:
    found = gradients_of(tuple(leaves.items()))(jnp.int32(step))
    if step in bad:
        spoilt = np.array(found["rows"])
        spoilt[0, 0] = np.nan
        found["rows"] = jax.device_put(spoilt, jax.devices()[0])
    return found


def transformation(leaves: Leaves, **options: Any) -> Any:
    def of(path: Any) -> Leaf:
        return next(leaf for name, leaf in leaves.items() if name in jax.tree_util.keystr(path))

    return zenflow_jax.zenflow(
        rate,
        channel_axis=lambda path, _: of(path).axis,
        resident=lambda path, _: of(path).axis is None,
        **options,
    )


def jitted(tx: Any, donate: tuple[int, ...] = ()) -> Any:
    @functools.partial(jax.jit, donate_argnums=donate)
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def program(many: tuple[tuple[str, Leaf], ...], options: tuple[tuple[str, Any], ...]) -> Any:
    """Transformation and step, compiled once however many runs use them."""
    tx = transformation(dict(many), **dict(options))
    return tx, jitted(tx)


class Run:
    """A training loop as a user has it, with what is in it at hand."""

    def __init__(self, leaves: Leaves, step: Any = None, bad: Sequence[int] = (), **options: Any):
        self.leaves, self.bad = leaves, bad
        self.tx, plain = program(tuple(leaves.items()), tuple((OPTIONS | options).items()))
        self.step = step or plain
        self.params = first(leaves)
        self.state = self.tx.init(self.params)
        self.engine: Any = None
        self.done = 0

    def start(self, **options: Any) -> "Run":
        self.engine = HostEngine(self.params, self.state, **options)
        return self

    def advance(self, steps: int) -> "Run":
        for _ in range(steps):
            self.done += 1
            grads = gradients(self.leaves, self.done, self.bad)
            self.params, self.state = self.step(self.params, self.state, grads)
            if self.engine is not None:
                self.params, self.state = self.engine.exchange(self.params, self.state)
        return self

    def flush(self) -> dict[str, np.ndarray]:
        """The parameters when everything has come in."""
        self.params, self.state = self.engine.flush(self.params, self.state)
        return jax.device_get(self.params)

    def masters(self) -> dict[str, np.ndarray]:
        return jax.device_get(zenflow_jax.master_params(self.params, self.state, self.engine))


@contextmanager
def running(*args: Any, engine: dict[str, Any] | None = None, **options: Any) -> Iterator[Run]:
    run = Run(*args, **options).start(**(engine or {}))
    try:
        yield run
    finally:
        run.engine.close()


def plainly(leaves: Leaves, steps: int = STEPS, **options: Any) -> dict[str, np.ndarray]:
    with running(leaves, **options) as run:
        return run.advance(steps).flush()


# --- rows -----------------------------------------------------------------------------------


def same_bits(what: str, ours: Any, theirs: Any) -> Row:
    worst = 0.0
    equal = True
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return Row(f"{what}: {a.dtype}{a.shape}, {b.dtype}{b.shape}", None, 0, False)
        if a.tobytes() != b.tobytes():
            equal = False
            worst = max(worst, float(np.nanmax(np.abs(a.astype(np.float64) - b))))
    return Row(f"{what}: same bits", worst, 0.0, equal)


def close(what: str, pairs: Any, tolerance: float = ATOL) -> Row:
    """Of pairs of arrays of numbers; NaN is never close."""
    worst = 0.0
    for a, b in pairs:
        apart = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        worst = max(worst, float(apart.max(initial=0)) if not np.isnan(apart).any() else np.inf)
    return Row(what, worst, tolerance, worst <= tolerance)


def _rank(x: np.ndarray) -> np.ndarray:
    """The place of each bfloat16 number among all of them."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def parameters(what: str, ours: Sequence[Any], theirs: Sequence[Any]) -> list[Row]:
    """Step by step: float32 within a tolerance, bfloat16 equal but for a few neighbours."""
    pairs = [
        (np.asarray(mine[name]), np.asarray(yours[name]))
        for mine, yours in zip(ours, theirs, strict=True)
        for name in mine
    ]
    wide = [(a, b) for a, b in pairs if a.dtype == np.float32]
    narrow = [np.abs(_rank(a) - _rank(b)) for a, b in pairs if a.dtype != np.float32]
    flipped = sum(np.count_nonzero(x) for x in narrow) / max(1, sum(x.size for x in narrow))
    apart = max((int(x.max()) for x in narrow), default=0)
    return [
        close(f"{what}: float32 parameters", wide),
        Row(f"{what}: share of bf16 parameters that differ", flipped, FLIPPED, flipped <= FLIPPED),
        Row(f"{what}: bf16 numbers that these are apart", apart, 1, apart <= 1),
    ]


# --- questions ------------------------------------------------------------------------------


def windows_of_one_step_are_adamw(world: World) -> list[Row]:
    """S = 1 without overlap, against `optax.adamw` on float32 masters."""
    tx = optax.adamw(rate, weight_decay=OPTIONS["weight_decay"])
    theirs = jitted(tx)
    widened = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree))
    masters = widened(first(world.few))
    state = tx.init(masters)
    wide, ours, seen = [], [], []
    with running(world.few, update_interval=1, overlap_step=False, select_interval=5) as run:
        for t in range(1, STEPS + 1):
            run.advance(1)
            masters, state = theirs(masters, state, widened(gradients(world.few, t)))
            exact = jax.device_get(masters)
            ours.append(jax.device_get(run.params))
            seen.append({n: m.astype(np.dtype(world.few[n].dtype)) for n, m in exact.items()})
            wide += zip(run.masters().values(), exact.values(), strict=True)
    what = "S = 1 is `optax.adamw`"
    return [close(f"{what}: masters at every step", wide), *parameters(what, ours, seen)]


def against_the_reference(
    world: World, what: str, bad: Sequence[int] = (), **options: Any
) -> list[Row]:
    """Every step of a run, against the slow NumPy of the same arithmetic."""
    leaves = world.few
    known = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{k: v for k, v in (OPTIONS | options).items() if k in known})
    slow = Reference(
        list(jax.device_get(first(leaves)).values()),
        rate,
        settings,
        channel_axes=[leaf.axis for leaf in leaves.values()],
    )
    ours, theirs, chosen = [], [], []
    with running(leaves, bad=bad, **options) as run:
        for t in range(1, STEPS + 1):
            run.advance(1)
            expected = slow.step(list(jax.device_get(gradients(leaves, t, bad)).values()))
            ours.append(jax.device_get(run.params))
            theirs.append(dict(zip(leaves, expected, strict=True)))
            chosen += [
                (leaf.channels, channels)
                for leaf, channels in zip(run.state.leaves, slow.selected, strict=True)
                if channels is not None
            ]
        ours.append(run.flush())
        theirs.append(dict(zip(leaves, slow.flush(), strict=True)))
        masters = list(run.masters().values())
        moments = [slow.moments(i) for i in range(len(leaves))]
        stats = run.engine.stats
        state = run.state
    counted = (stats.skipped_steps, stats.reselections)
    expected_counts = (slow.skipped, slow.reselections)
    mu = [
        (np.asarray(leaf.mu).ravel() / np.abs(m).max(), m.ravel() / np.abs(m).max())
        for leaf, (_, m, _, _) in zip(state.leaves, moments, strict=True)
        if leaf.channels is None and m.size
    ]
    return [
        *parameters(what, ours, theirs),
        close(f"{what}: masters at the end", zip(masters, (m[0] for m in moments), strict=True)),
        close(f"{what}: moments of what is resident", mu, MOMENT_TOL),
        close(f"{what}: selected channels at every step", chosen, 0.0),
        Row(
            f"{what}: {counted[0]} skipped steps and {counted[1]} selections of "
            f"{expected_counts[0]} and {expected_counts[1]}",
            None,
            None,
            counted == expected_counts and stats.reselections > 1,
        ),
    ]


def windows_of_four_steps_are_the_reference(world: World) -> list[Row]:
    return against_the_reference(world, "S = 4")


def clipping_is_the_reference(world: World) -> list[Row]:
    return against_the_reference(world, "max_grad_norm", max_grad_norm=30.0)


def sums_of_the_device_are_the_reference(world: World) -> list[Row]:
    return against_the_reference(world, 'send_gradients="per_window"', send_gradients="per_window")


def rounded_mail_is_the_reference(world: World) -> list[Row]:
    return against_the_reference(
        world, "transfer_dtype=bfloat16", transfer_dtype=jnp.dtype(jnp.bfloat16)
    )


def a_step_that_is_not_finite_changes_nothing(world: World) -> list[Row]:
    rows = against_the_reference(world, "NaN at steps 6 and 7", bad=(6, 7))
    with running(world.few, bad=(6,)) as run:
        before = jax.device_get(run.advance(5).params)
        after = jax.device_get(run.advance(1).params)
    return [*rows, same_bits("parameters before and after a step of NaN", before, after)]


def mail_that_leaves_later_has_the_same_bits(world: World) -> list[Row]:
    expected = plainly(world.many)
    return [
        same_bits(
            'send_gradients="after_step"',
            plainly(world.many, send_gradients="after_step"),
            expected,
        ),
        same_bits("the same run again", plainly(world.many), expected),
        same_bits("with one thread", plainly(world.many, engine={"threads": 1}), expected),
        same_bits("prefetch_bytes=0", plainly(world.many, engine={"prefetch_bytes": 0}), expected),
    ]


def a_resumed_run_goes_on_bit_for_bit(world: World) -> list[Row]:
    """From the middle of a window, with an update under way."""
    rows = []
    for name, options in {
        "resume": {},
        'resume, send_gradients="per_window"': {"send_gradients": "per_window"},
    }.items():
        with running(world.many, **options) as run:
            run.advance(10)
            saved = jax.device_get((run.params, run.engine.state()))
            # As a checkpoint has it: values, without their places.
            places = jax.tree.map(lambda x: x.sharding, run.state)
            kept = jax.tree.map(np.array, run.state)
            expected = run.advance(STEPS - 10).flush()
            again = Run(world.many, step=run.step, **options)
        again.params = jax.device_put(saved[0], jax.devices()[0])
        again.state = jax.tree.map(jax.device_put, kept, places)
        again.done = 10
        again.start(engine_state=saved[1])
        try:
            rows.append(same_bits(name, again.advance(STEPS - 10).flush(), expected))
        finally:
            again.engine.close()
    return rows


def channels_are_handed_over_at_every_window(world: World) -> list[Row]:
    """Large leaves, against the same arithmetic wholly on the device."""
    options = {"select_interval": 4}
    with running(world.many, **options) as run:
        run.advance(16)
        run.flush()
        ours, moved = run.masters(), run.engine.stats.reselections
    whole = Run(world.many, offload=False, **options)
    whole.advance(16)
    whole.params, whole.state = jax.jit(zenflow_jax.flush)(whole.params, whole.state)
    pairs = zip(ours.values(), whole.masters().values(), strict=True)
    due = 4 * whole.state.schedule.groups  # leaves take turns
    return [
        close("hand-over: masters against `offload=False`", pairs),
        Row(f"hand-over: {moved} selections of {due}", None, None, moved == due),
    ]


def masters_asked_for_in_an_open_window_are_not_overwritten(world: World) -> list[Row]:
    """`flush` writes what the uploads of `master_params` just before it read."""
    with running(world.many) as run:
        run.advance(10)
        expected = run.masters()  # waited for
        whole = run.flush()
    with running(world.many) as run:
        run.advance(10)
        live = zenflow_jax.master_params(run.params, run.state, run.engine)
        flushed = run.flush()
        ours = jax.device_get(live)
    return [
        same_bits("master_params, then flush at once: the masters", ours, expected),
        same_bits("master_params, then flush at once: the parameters", flushed, whole),
    ]


def _donated(world: World, what: str, step: Any, **options: Any) -> list[Row]:
    expected = plainly(world.few, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every donated buffer can be used
        with running(world.few, step=step, **options) as run:
            return [same_bits(f"donated: {what}", run.advance(STEPS).flush(), expected)]


def _donating(donate: tuple[int, ...], **options: Any) -> Callable[[World], list[Row]]:
    names = ", ".join(("parameters", "state", "gradients")[i] for i in donate)
    what = names + "".join(f", {k}={v!r}" for k, v in options.items())

    def ask(world: World) -> list[Row]:
        tx, _ = program(tuple(world.few.items()), tuple((OPTIONS | options).items()))
        return _donated(world, what, jitted(tx, donate), **options)

    ask.__name__ = f"donation of {what}"
    return ask


def donation_of_a_train_state(world: World) -> list[Row]:
    tx, _ = program(tuple(world.few.items()), tuple(OPTIONS.items()))

    @functools.partial(jax.jit, donate_argnums=0)
    def whole(ts: Any, grads: Any) -> Any:
        return ts.apply_gradients(grads=grads)

    def step(params: Any, state: Any, grads: Any) -> Any:
        ts = TrainState(step=0, apply_fn=None, params=params, tx=tx, opt_state=state)
        ts = whole(ts, grads)
        return ts.params, ts.opt_state

    return _donated(world, "a linen TrainState", step)


def donation_by_nnx_jit(world: World) -> list[Row]:
    expected = plainly(world.few)
    tx, _ = program(tuple(world.few.items()), tuple(OPTIONS.items()))

    @functools.partial(nnx.jit, donate_argnames=("model", "optimizer"))
    def step(model: Any, optimizer: Any, grads: Any) -> None:
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, grads)
        optimizer.update(model, state)

    model = nnx.Dict({name: nnx.Param(p) for name, p in first(world.few).items()})
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with HostEngine(nnx.state(model, nnx.Param), optimizer.opt_state) as engine:
            for t in range(1, STEPS + 1):
                step(model, optimizer, gradients(world.few, t))
                engine.exchange_nnx(model, optimizer)
            engine.flush_nnx(model, optimizer)
    ours = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return [same_bits("donated: nnx.jit, model and optimizer", ours, expected)]


#: In the order of their worth; what may abort the process comes last.
QUESTIONS: tuple[Callable[[World], list[Row]], ...] = (
    windows_of_one_step_are_adamw,
    windows_of_four_steps_are_the_reference,
    mail_that_leaves_later_has_the_same_bits,
    a_resumed_run_goes_on_bit_for_bit,
    channels_are_handed_over_at_every_window,
    masters_asked_for_in_an_open_window_are_not_overwritten,
    a_step_that_is_not_finite_changes_nothing,
    sums_of_the_device_are_the_reference,
    clipping_is_the_reference,
    rounded_mail_is_the_reference,
    _donating((0, 1)),
    _donating((1,)),
    _donating((0,)),
    _donating((0, 1, 2)),
    _donating((0, 1, 2), send_gradients="after_step"),
    _donating((0, 1, 2), send_gradients="per_window"),
    donation_of_a_train_state,
    donation_by_nnx_jit,
)


def answer(path: Path, begin: int, world: World, questions: Sequence[Any] = QUESTIONS) -> None:
    """Appends two lines of JSON for each question from `begin` on."""

    def note(number: int, **more: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"number": number, "of": len(questions), **more}) + "\n")

    for number in range(begin, len(questions)):
        question = questions[number]
        name = question.__name__
        name = name if " " in name else name.replace("_", " ")
        note(number, question=name)
        start = time.perf_counter()
        try:
            rows = [
                {
                    "what": row.what,
                    "difference": row.difference,
                    "tolerance": row.tolerance,
                    "verdict": "pass" if row.passed else "FAILED",
                }
                for row in question(world)
            ]
        except Exception as error:  # noqa: BLE001 - a row that fails never stops the next
            traceback.print_exc()
            text = str(error).splitlines()[0][:200] if str(error) else ""
            rows = [{"what": name, "verdict": f"raised {type(error).__name__}: {text}"}]
        note(number, rows=rows, s=time.perf_counter() - start, cpu_s=time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if jax.devices()[0].platform == "cpu" and not args.rehearse:
        print(f"expected a GPU, got {jax.devices()}; pass --rehearse on a CPU", file=sys.stderr)
        sys.exit(NO_GPU)
    answer(args.path, args.first, world(args.rehearse))


if __name__ == "__main__":
    main()
