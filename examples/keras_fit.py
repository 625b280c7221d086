"""Uses zenflow in Keras's `fit` on the JAX backend, with an optimizer class and a callback.

    model.compile(optimizer=ZenFlow(learning_rate=1e-3), loss=...)
    exchange = Exchange()
    model.fit(x, y, callbacks=[exchange])

Put `Exchange` before callbacks that save. To resume, build the optimizer, load the weights, and
pass the saved engine state: `Exchange(engine_state)`. Needs Keras 3.15.1 with `KERAS_BACKEND=jax`.
"""

from typing import Any

import jax
import keras
import optax

import zenflow_jax


class ZenFlow(keras.optimizers.Optimizer):
    """Keeps the leaves of zenflow's state, in order, as the optimizer's variables."""

    def __init__(self, **options: Any):
        super().__init__(learning_rate=options["learning_rate"], name="zenflow")
        self.tx = zenflow_jax.zenflow(**options)

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.first = len(self.variables)  # after Keras's own variables
        leaves, self.treedef = jax.tree.flatten(self.tx.init([v.value for v in variables]))
        for x in leaves:
            self.add_variable(x.shape, dtype=str(x.dtype), name="zenflow")._value = x

    def opt_state(self, values: list[Any]) -> Any:
        return jax.tree.unflatten(self.treedef, values[self.first :])

    def stateless_apply(self, values: Any, gradients: Any, weights: Any) -> tuple[Any, Any]:
        updates, state = self.tx.update(list(gradients), self.opt_state(values), list(weights))
        values = [values[0] + 1, *values[1 : self.first], *jax.tree.leaves(state)]
        return optax.apply_updates(list(weights), updates), values


class Exchange(keras.callbacks.Callback):
    """Calls the engine after each batch, and flushes after the last batch."""

    def __init__(self, engine_state: Any = None):
        super().__init__()
        self.engine_state = engine_state
        self.engine: zenflow_jax.HostEngine | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.build(self.model.trainable_variables)
        if self.engine is None:
            weights, state = self._values()
            state = zenflow_jax.place(weights, state)  # loaded weights are in device memory
            self._assign(weights, state)
            self.engine = zenflow_jax.HostEngine(weights, state, engine_state=self.engine_state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._assign(*self.engine.exchange(*self._values()))

    def on_train_end(self, logs: Any = None) -> None:
        self._assign(*self.engine.flush(*self._values()))

    def _values(self) -> tuple[list[Any], Any]:
        self.model.jax_state_sync()  # during `fit`, only Keras's arrays are current
        optimizer = self.model.optimizer
        weights = [v.value for v in self.model.trainable_variables]
        return weights, optimizer.opt_state([v.value for v in optimizer.variables])

    def _assign(self, weights: Any, state: Any) -> None:
        optimizer = self.model.optimizer
        variables = [*self.model.trainable_variables, *optimizer.variables[optimizer.first :]]
        for variable, x in zip(variables, [*weights, *jax.tree.leaves(state)], strict=True):
            variable._value = x  # `assign` would copy it to device memory
