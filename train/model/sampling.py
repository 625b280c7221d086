"""Continues a text token by token: greedily, or by sampling.

The prompt passes through the model at once, then each token separately, with a fixed-size cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import Failure


class Sampling(NamedTuple):
    temperature: float = 0.0  # divides the logits; 0 is greedy
    top_k: int | None = None  # the number of most likely tokens to sample from; None for all
    top_p: float | None = None  # sample from the fewest tokens that together reach this probability


LIKELIEST = Sampling()


def continue_tokens(
    graphdef: nnx.GraphDef,
    params: Any,
    prompt: Sequence[int],
    *,
    most: int,
    ends: Collection[int] = (),
    sampling: Sampling = LIKELIEST,
    seed: int = 0,
) -> Iterator[int]:
    """Yields the tokens that a decoder with stacked blocks adds to a prompt, up to an end token."""
    key = jax.random.key(seed)
    cache = nnx.merge(graphdef, params).empty_cache(1, len(prompt) + most)
    choose = partial(_extend, graphdef, sampling, params, key)
    token, cache = choose(cache, jnp.asarray(np.asarray(prompt, np.int32)), 0)
    for start in range(len(prompt), len(prompt) + most):
        # The device starts the next token before this token is known, because one extra step costs
        # less than a wait at every token.
        following = token
        if start < len(prompt) + most - 1:
            following, cache = choose(cache, token, start)
        number = int(token[0])
        if number < 0:
            raise Failure(
                "some logits are not finite: a weight is infinite or NaN, or too large for --dtype."
            )
        yield number
        if number in ends:
            return
        token = following


def choose(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the next token, int32 `()`, from its logits `(vocabulary,)`; -1 if not finite."""
    finite = jnp.isfinite(logits.max())
    if sampling.temperature == 0:
        token = jnp.argmax(logits)
    else:
        token = jax.random.categorical(key, narrow(logits / sampling.temperature, sampling))
    return jnp.where(finite, token, -1).astype(jnp.int32)


def narrow(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the logits, with minus infinity for tokens that may not be drawn."""
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, len(logits)))[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None:
        descending = jnp.sort(logits)[::-1]
        shares = jax.nn.softmax(descending)
        taken = jnp.cumsum(shares) - shares < sampling.top_p
        least = jnp.where(taken, descending, jnp.inf).min()
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _extend(graphdef, sampling, params, key, cache, tokens, start):
    """Returns the token `(1,)` after `tokens` `(t,)`, which begin at `start`, and the cache."""
    logits, cache = nnx.merge(graphdef, params).extend(tokens[None], cache, start)
    return choose(logits[0], jax.random.fold_in(key, start), sampling)[None], cache
