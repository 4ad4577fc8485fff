"""A branch that copies nothing, and is not computed where it is not taken."""

import jax
import jax.numpy as jnp
from jax import lax


def run_if(condition, function, carried):
    """`function(carried)` if `condition`, else `carried`, its buffers updated in place.

    XLA:CPU copies what a conditional is given, a KV pool too, but not what a loop of at most one round carries; on a TPU it is the other way round. A loop's
    body that does not depend on the round would be moved out of it, and so be computed always: a barrier makes everything it reads depend on the round.
    """
    structure = jax.tree.structure(carried)

    def flat(*leaves):
        return jax.tree.leaves(function(jax.tree.unflatten(structure, leaves)))

    def loop(carried):
        closed = jax.make_jaxpr(flat)(*jax.tree.leaves(carried))

        def body(i, leaves):
            _, consts = lax.optimization_barrier((i, closed.consts))
            return jax.core.eval_jaxpr(closed.jaxpr, consts, *leaves)

        done = lax.fori_loop(0, condition.astype(jnp.int32), body, jax.tree.leaves(carried))
        return jax.tree.unflatten(structure, done)

    def branch(carried):
        return lax.cond(condition, function, lambda carried: carried, carried)

    return lax.platform_dependent(carried, cpu=loop, default=branch)
