"""Answers the questions of the stage `correct`.

    python -m benchmarks.gpu_stages.checks rows.jsonl 0

Answers the questions from that number on, and records each start and verdict in the file. A
question is a function that compares a run with `optax.adamw`, with the slow NumPy reference
(`tests/reference.py`), or bit by bit with another form of the same run. It raises an
`AssertionError` that describes the difference. Runs and comparisons come from the tests
(`tests/runs.py`, `tests/comparisons.py`).
"""

import argparse
import functools
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zenflow_jax
from benchmarks.gpu_stages.__main__ import NO_GPU
from tests import comparisons, runs
from tests.reference import Settings
from tests.runs import SCANNED, SECOND, THIRD, Leaf, Leaves, Plan, Training
from train.model.attention import attention
from zenflow_jax import streaming

#: Twice the tolerance on a CPU in float32, because powers and roots round differently on a GPU.
TOLERANCE = 2e-6
SETTINGS = Settings(weight_decay=0.01, topk_ratio=0.2, update_interval=4, select_interval=8)
STEPS = 18  # four windows and an open window, two selections


def changed(**options: Any) -> Settings:
    return Settings(**{**vars(SETTINGS), **options})


#: Large enough that transfers take a while.
MANY: Leaves = (
    Leaf("bias", (2048,), None, "float32"),
    Leaf("columns", (2, 1024, 8192), -1, "bfloat16"),
    Leaf("rows", (8192, 2048), -2, "float32"),
)


def drawn(leaves: Leaves, step: int, seed: int = 0, bad: bool = False) -> dict[str, jax.Array]:
    """Returns a step's gradient for large leaves, drawn on the device, which is fast."""
    del seed, bad
    return _draw(leaves)(jnp.int32(step))


@functools.cache
def _draw(leaves: Leaves) -> Callable[[jax.Array], dict[str, jax.Array]]:
    @jax.jit
    def draw(step: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), step), len(leaves))
        return {
            leaf.name: jax.random.normal(key, leaf.shape, leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        }

    return draw


def large(leaves: Leaves, settings: Settings = SETTINGS, **options: Any) -> Training:
    return Training(leaves, settings, gradients=drawn, **options)


def flushed(training: Training, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Returns the parameters after `steps` steps and a flush."""
    with training:
        training.go(steps)
        training.flush()
        return training.values()


# --- questions ------------------------------------------------------------------------------


def windows_of_one_step_are_adamw(_: Leaves) -> None:
    settings = changed(update_interval=1, staleness=0, select_interval=5)
    expected = comparisons.adamw(SECOND, None, settings.weight_decay, STEPS, seed=0)
    with Training(SECOND, settings) as training:
        comparisons.assert_close([params for _, params in training.follow(Plan(STEPS))], expected)


REFERENCE: dict[str, tuple[Leaves, dict[str, Any], Plan]] = {
    "windows of four steps": (SECOND, {}, Plan(STEPS)),
    "stacks in ranges, with steps of NaN": (SCANNED, {}, Plan(STEPS, bad=(6, 7), flush_at=(11,))),
    "clipping": (SECOND, {"max_grad_norm": 30.0}, Plan(STEPS)),
    "hand-over at every window": (SECOND, {"select_interval": 4}, Plan(STEPS)),
    "mail in bfloat16": (THIRD, {"transfer_dtype": "bfloat16"}, Plan(STEPS)),
}


def equals_the_reference(_: Leaves, *, name: str) -> None:
    leaves, options, plan = REFERENCE[name]
    expected, slow = comparisons.reference(leaves, changed(**options), plan)
    with Training(leaves, changed(**options)) as training:
        comparisons.assert_agree(training.history(plan), expected)
        assert training.engine.stats.reselections == slow.reselections > 1


def mail_that_leaves_later_has_the_same_bits(leaves: Leaves) -> None:
    expected = flushed(large(leaves))
    for options in (
        {"send_gradients": "after_step"},
        {},  # the same run again
        {"threads": 1},
        {"prefetch_bytes": 0},
    ):
        comparisons.assert_same_bits(flushed(large(leaves, **options)), expected)


def a_resumed_run_goes_on_bit_for_bit(leaves: Leaves) -> None:
    """Resumes inside a window, with an update in flight."""
    for sending in ("during_step", "after_step"):
        with large(leaves, send_gradients=sending) as training:
            training.go(10)
            params, engine_state = jax.device_get((training.params, training.engine.state()))
            # Values without their shardings, as in a checkpoint.
            places = jax.tree.map(lambda x: x.sharding, training.state)
            state = jax.tree.map(np.array, training.state)
            expected = flushed(training, STEPS - 10)
        again = large(leaves, send_gradients=sending)
        again.engine.close()
        again.t = 10
        again.params = runs.place(params, None)
        again.state = jax.tree.map(jax.device_put, state, places)
        again.engine = zenflow_jax.HostEngine(again.params, again.state, engine_state=engine_state)
        comparisons.assert_same_bits(flushed(again, STEPS - 10), expected)


def masters_requested_in_an_open_window_are_not_overwritten(leaves: Leaves) -> None:
    """Makes the next windows overwrite the memory that the uploads of `master_params` read."""
    ends = []
    for wait in (True, False):
        with large(leaves) as training:
            training.go(10)
            live = zenflow_jax.master_params(training.params, training.state, training.engine)
            if wait:
                live = jax.device_get(live)
            training.go(4)
            ends.append((jax.device_get(live), training.values()))
    comparisons.assert_same_bits(*ends)


def a_step_of_nan_changes_nothing(_: Leaves) -> None:
    with Training(SECOND, changed(provisional_share=None)) as training:
        training.go(5)
        before = training.values()
        training.step(bad=True)
        comparisons.assert_same_bits(training.values(), before)
        training.exchange()


def donation_changes_no_bit(leaves: Leaves, *, donate: tuple[int, ...], sending: str) -> None:
    def run(donate: tuple[int, ...]) -> Any:
        training = large(leaves, send_gradients=sending)
        plain = runs.jitted(training.tx)
        training.program = jax.jit(plain, donate_argnums=donate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some donated buffers are not usable
            return flushed(training)

    comparisons.assert_same_bits(run(donate), run(()))


def _update_nnx(model: nnx.Module, optimizer: nnx.Optimizer, gradients: Any) -> None:
    """Takes a step with gradients in pure arrays."""
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, gradients)
    optimizer.update(model, state)


def donation_by_nnx_jit_changes_no_bit(_: Leaves) -> None:
    expected = flushed(Training(SECOND, SETTINGS))
    tx = runs.transformation(SECOND, SETTINGS)
    step = nnx.jit(_update_nnx, donate_argnames=("model", "optimizer"))
    model = nnx.Dict({name: nnx.Param(p) for name, p in runs.initial(SECOND).items()})
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zenflow_jax.HostEngine(nnx.state(model, nnx.Param), optimizer.opt_state) as engine:
            for t in range(1, STEPS + 1):
                step(model, optimizer, jax.tree.map(jnp.asarray, runs.gradients(SECOND, t)))
                engine.exchange_nnx(model, optimizer)
            engine.flush_nnx(model, optimizer)
    comparisons.assert_same_bits(
        jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param))), expected
    )


def attention_equals_its_plain_form(_: Leaves) -> None:
    """Compares in bfloat16, with masks for packed texts and windows; repeats are bit-identical."""
    shapes = ((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    keys = jax.random.split(jax.random.key(0), 3)
    heads = [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True)]
    text = jnp.broadcast_to(jnp.arange(256) // 100, (2, 256))
    packed = (text[:, :, None] == text[:, None, :])[:, None]

    def gradients(mask: Any, window: int | None, dtype: Any) -> Any:
        def loss(heads: Any) -> jax.Array:
            mixed = attention(*heads, mask=mask, causal=True, window=window)
            return jnp.mean(mixed.astype(jnp.float32) ** 2)

        options = {"xla_gpu_exclude_nondeterministic_ops": True}
        gradient = jax.jit(jax.grad(loss), compiler_options=options)
        return jax.device_get(gradient([x.astype(dtype) for x in heads]))

    for mask, window in ((None, None), (packed, None), (packed, 50)):
        fused, repeated = (gradients(mask, window, jnp.bfloat16) for _ in range(2))
        with jax.default_matmul_precision("highest"):
            plain = gradients(mask, window, jnp.float32)  # cuDNN's kernel does not support float32
        for x, again, expected in zip(fused, repeated, plain, strict=True):
            np.testing.assert_array_equal(x, again)
            off = np.abs(np.float32(x) - expected).max() / np.abs(expected).max()
            assert off < 0.03, f"off by {off:.1%} of the largest"


#: Questions, the most important first; those that may abort the process come last.
QUESTIONS: dict[str, Callable[[Leaves], None]] = {
    # This comes first, because streaming is unusable if it fails.
    "streamed gradients equal those of a plain scan": lambda _: streaming.check_device(),
    "S = 1 is `optax.adamw`": windows_of_one_step_are_adamw,
    **{f"the reference: {x}": functools.partial(equals_the_reference, name=x) for x in REFERENCE},
    "mail that leaves later: bit-identical": mail_that_leaves_later_has_the_same_bits,
    "resume: bit-identical": a_resumed_run_goes_on_bit_for_bit,
    "master_params, then steps at once": masters_requested_in_an_open_window_are_not_overwritten,
    "a step of NaN changes nothing": a_step_of_nan_changes_nothing,
    **{
        f"donated: arguments {donate}, {sending}": functools.partial(
            donation_changes_no_bit, donate=donate, sending=sending
        )
        for donate, sending in (
            ((0, 1), "during_step"),
            ((0, 1, 2), "during_step"),
            ((0, 1, 2), "after_step"),
        )
    },
    "attention by cuDNN equals its plain form": attention_equals_its_plain_form,
    "donated: nnx.jit": donation_by_nnx_jit_changes_no_bit,
}


def questions(rehearse: bool) -> dict[str, Callable[[Leaves], None]]:
    """Returns all questions or, for a rehearsal, the first of each function."""
    functions = {getattr(ask, "func", ask): name for name, ask in reversed(QUESTIONS.items())}
    names = functions.values() if rehearse else QUESTIONS
    return {name: ask for name, ask in QUESTIONS.items() if name in names}


def answer(path: Path, begin: int, *, rehearse: bool) -> None:
    """Appends two JSON lines to the file for each question from `begin` on."""
    chosen = questions(rehearse)
    # A rehearsal uses the same leaves everywhere, so that all questions share programs.
    leaves = SECOND if rehearse else MANY

    def note(number: int, **more: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"number": number, "of": len(chosen), **more}) + "\n")

    for number, (name, ask) in enumerate(chosen.items()):
        if number < begin:
            continue
        note(number, question=name)
        start = time.perf_counter()
        try:
            ask(leaves)
            verdict = "pass"
        except Exception as error:  # noqa: BLE001 - a failing question must not stop the next
            traceback.print_exc()
            message = " ".join(str(error).split())[:300]
            verdict = f"FAILED, {type(error).__name__}: {message}"
        note(number, verdict=verdict, s=time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if jax.devices()[0].platform == "cpu" and not args.rehearse:
        print(f"No GPU, only {jax.devices()}. Pass --rehearse on a CPU.", file=sys.stderr)
        sys.exit(NO_GPU)
    comparisons.ATOL = comparisons.MOMENT_TOL = TOLERANCE
    answer(args.path, args.first, rehearse=args.rehearse)


if __name__ == "__main__":
    main()
