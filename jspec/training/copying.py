"""Heads that copy: attention taught to find where the text last ended as it ends now, and to say what came next there.

Such induction heads (Olsson et al., arXiv 2209.11895) did not form by themselves in a draft trained on 380,000 tokens. Where to look is known from the
text alone, so it can be taught from the first step, beside the loss of the tokens.
"""

import jax.numpy as jnp

LONGEST = 3
"""Tokens that are compared: the longest run that matches wins."""


def copy_source(tokens, *, depth: int, row_depth: int = 0):
    """i32[B, T]: the row to copy from, of a chain that started at each row, at `depth`.

    The chain's last token is `tokens[t + 1 + depth]`; a row `j <= t` holds what follows it if `tokens[j + row_depth]` is the same, since the row's layer
    reads the token after that. The longest run wins, then the last row. 0, the first row, where there is none.

    Args:
        tokens: i32[B, T + 1].
        depth: of the chain, from 0.
        row_depth: depth of the rows attended to: 0 where they are features, that of the module in a draft of several.
    """
    length = tokens.shape[1] - 1
    row = jnp.arange(length)
    run, matched = jnp.ones((), bool), jnp.zeros((tokens.shape[0], length, length), jnp.int32)
    for back in range(LONGEST):
        ours, theirs = _from(tokens, depth + 1 - back, length), _from(tokens, row_depth - back, length)
        run = run & (ours[:, :, None] == theirs[:, None, :]) & (theirs[:, None, :] >= 0)
        matched += run
    usable = (matched > 0) & (row <= row[:, None]) & (row > 0)
    order = jnp.where(usable, matched * length + row, 0)  # the first row is the one of no match
    return jnp.argmax(order, axis=-1)


def _from(tokens, first: int, length: int):
    """`tokens[:, first : first + length]`, -1 outside."""
    before, after = max(0, -first), max(0, first + length - tokens.shape[1])
    padded = jnp.pad(tokens, ((0, 0), (before, after)), constant_values=-1)
    return padded[:, first + before : first + before + length]
