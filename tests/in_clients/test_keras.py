"""zenflow in Keras on its JAX backend: a loop over `stateless_call`, and `fit`."""

import keras
import numpy as np
import pytest
from keras import layers

from examples.keras_fit import Exchange, ZenFlow

OPTIONS = {"learning_rate": 1e-2, "weight_decay": 1e-2, "channel_axis": lambda _, x: 0}
EXACT = {"update_interval": 1, "staleness": 0}
#: Losses near 4 in float32; the order of sums differs.
TOLERANCE = 1e-4

_X = (np.random.default_rng(0).integers(0, 64, (80, 1)) + 5 * np.arange(17)[None]) % 64
X, Y = _X[:, :-1].astype("int32"), _X[:, 1:].astype("int32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(64, 32)(tokens)
    x = x + layers.Dense(32)(layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(64)(layers.BatchNormalization()(x)))


class Losses(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


def fit(optimizer, batches, *, loaded=None, engine_state=None, at_end=None):
    """Returns the losses of `fit` over `batches`, a slice."""
    model = make()
    model.compile(optimizer=optimizer, loss=LOSS)
    if loaded:
        model.optimizer.build(model.trainable_variables)
        model.load_weights(loaded)
    exchange = [Exchange(engine_state)] if isinstance(optimizer, ZenFlow) else []
    data = slice(8 * batches.start, 8 * batches.stop)
    losses = Losses()
    callbacks = [*exchange, *([at_end(exchange[0])] if at_end else []), losses]
    model.fit(X[data], Y[data], batch_size=8, shuffle=False, callbacks=callbacks, verbose=0)
    for x in exchange:
        x.engine.close()
    return losses.losses


def test_fit_has_the_same_losses_as_keras_adamw():
    adamw = keras.optimizers.AdamW(1e-2, weight_decay=1e-2, epsilon=1e-8)
    losses = fit(ZenFlow(**OPTIONS, **EXACT), slice(0, 10))
    assert losses == pytest.approx(fit(adamw, slice(0, 10)), abs=TOLERANCE)


def test_fit_resumes_inside_a_window_from_keras_own_file(tmp_path):
    path, saved = str(tmp_path / "model.keras"), {}

    class Save(keras.callbacks.Callback):
        def __init__(self, exchange):
            super().__init__()
            self.exchange = exchange

        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                self.model.jax_state_sync()
                self.model.save(path)
                saved["engine"] = self.exchange.engine.state()

    whole = fit(ZenFlow(**OPTIONS), slice(0, 10), at_end=Save)
    resumed = fit(ZenFlow(**OPTIONS), slice(6, 10), loaded=path, engine_state=saved["engine"])
    # `fit` reports the mean over its batches.
    means = np.cumsum(np.diff(np.arange(1, 11) * whole, prepend=0)[6:]) / np.arange(1, 5)
    np.testing.assert_allclose(resumed, means, atol=TOLERANCE)
