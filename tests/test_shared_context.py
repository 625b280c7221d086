import jax
import jax.numpy as jnp


def test_programs_of_a_thread_share_a_context_of_mlir():
    contexts = [
        jax.jit(lambda x, by=by: x + by).lower(jnp.ones(3)).compiler_ir().context for by in (1, 2)
    ]
    assert contexts[0] is contexts[1]
