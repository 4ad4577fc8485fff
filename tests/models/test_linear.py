"""The matrix product, on both of its ways through XLA:CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.linear import project


@pytest.mark.parametrize("num_tokens", [1, 2, 32, 33])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_plain_product_in_f32(num_tokens, dtype):
    x = jax.random.normal(jax.random.key(0), (num_tokens, 24), dtype)
    weight = jax.random.normal(jax.random.key(1), (40, 24), dtype)
    got = jax.jit(project)(x, weight)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.float64(x) @ np.float64(weight).T, atol=1e-5)


def test_maps_and_differentiates():
    x, weight = jnp.ones((3, 4, 8)), jnp.full((5, 8), 0.5)
    np.testing.assert_array_equal(jax.vmap(project, (0, None))(x, weight), jnp.full((3, 4, 5), 4.0))
    gradient = jax.grad(lambda w: project(x[0], w).sum())(weight)
    np.testing.assert_array_equal(gradient, jnp.full((5, 8), 4.0))
