"""How likely the model finds tokens: computed only for those who ask, and copied to the host only then."""

import jax
import jax.numpy as jnp
from jax import lax

from jspec.config import MAX_LOGPROBS
from jspec.models.target import TargetModel
from jspec.spec_workers.run_if import run_if

COLUMNS = 1 + 2 * MAX_LOGPROBS
"""Words a token: its log-probability as bits, the ids of the likeliest tokens, theirs."""

_BLOCK = 16
"""Tokens whose logits are computed together."""


def token_logprobs(target: TargetModel, params, wanted, hidden, tokens):
    """`i32[T, COLUMNS]`, zeros unless `wanted`: the model's own log-probabilities, before temperature, penalties and filters.

    The logits are computed again from the hidden states: kept beside the adjusted ones they would double the step's largest buffer, for everybody.

    Args:
        target, params: the model.
        wanted: bool[], whether any request of the batch asks.
        hidden: [T, H], after which
        tokens: i32[T] follow.
    """
    size = tokens.shape[0]
    padded = -(-size // _BLOCK) * _BLOCK

    def block(item):
        hidden, tokens = item
        logits = jax.nn.log_softmax(target.logits(params, hidden))
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        best, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
        missing = ((0, 0), (0, MAX_LOGPROBS - best.shape[1]))
        best, ids = jnp.pad(best, missing, constant_values=-jnp.inf), jnp.pad(ids, missing, constant_values=-1)
        chosen, best = (lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) for x in (chosen, best))
        return jnp.concatenate([chosen, ids.astype(jnp.int32), best], axis=1)

    def compute(_):
        whole = (jnp.pad(x, ((0, padded - size), *[(0, 0)] * (x.ndim - 1))) for x in (hidden, tokens))
        blocks = tuple(x.reshape(-1, _BLOCK, *x.shape[1:]) for x in whole)
        return lax.map(block, blocks).reshape(padded, COLUMNS)[:size]

    return run_if(wanted, compute, jnp.zeros((size, COLUMNS), jnp.int32))
