"""How a budget of draft tokens is shared out among the rows of a batch: DSpark's ragged verify."""

import jax
import jax.numpy as jnp

LEAST_SURVIVAL = 1e-6
"""Draft tokens that survive more rarely are never verified."""


def survival(raw, temperatures):
    """f32[B, K], the chance that each draft and all before it are accepted; it never rises along a row.

    Args:
        raw: f32[B, K], logits of the confidence head; NaN counts as no confidence.
        temperatures: f32[K], of sequential temperature scaling; ones leave the head as it is.
    """
    raw = jnp.where(jnp.isnan(raw), -jnp.inf, raw)
    return jnp.cumprod(jax.nn.sigmoid(raw / temperatures), axis=1)


def verify_lens(chances, budget, num_drafts):
    """i32[B], the tokens of each row that are verified, the pending one included.

    The `budget` likeliest drafts of the whole batch are taken; ties go to the earlier place, then to the lower row. Since chances fall along a row, what is
    taken of a row is its front.

    Whether a draft is tested never depends on that draft: its chance was fixed by the tokens before it, those that outrank it are before it or of other rows,
    and `budget` is older than the drafts. So the output keeps the target's law. A budget made of these very chances would see drafts that come later in the
    row, and with them the tested one: the law would be another.

    Args:
        chances: f32[B, K], from `survival`.
        budget: i32[], drafts to verify in all; negative: every one of them.
        num_drafts: i32[B], drafts of each row that count; 0 for padding.

    Source: DSpark (arXiv 2607.05147); SGLang's top-k layout.
    """
    batch, count = chances.shape
    usable = (chances >= LEAST_SURVIVAL) & (jnp.arange(count) < num_drafts[:, None])
    keys = jnp.where(usable, chances, -1.0).T.reshape(-1)  # place by place, so that a stable sort breaks ties as said
    order = jnp.argsort(-keys, stable=True)
    rank = jnp.zeros(batch * count, jnp.int32).at[order].set(jnp.arange(batch * count, dtype=jnp.int32))
    taken = usable & (budget > rank.reshape(count, batch).T)
    return 1 + jnp.where(budget < 0, num_drafts, jnp.sum(taken, axis=1, dtype=jnp.int32))
