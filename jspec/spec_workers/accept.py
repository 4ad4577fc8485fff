"""Acceptance: how much of a proposal becomes output."""

import jax.numpy as jnp


def accept_chain(candidates, target_tokens, num_drafts):
    """Accepts the drafts that equal the target's own tokens, up to the first that does not.

    `target_tokens` may be greedy or sampled. A sampled token is drawn first and compared afterwards, so what is emitted has the target's law
    whatever was proposed; a draft `d` is accepted with the target's probability of `d`. That is the acceptance rate of target-only rejection sampling
    (Leviathan et al., arXiv 2211.17192, with a one-hot draft distribution), and it makes sampled output equal to plain decoding token for token.

    Args:
        candidates: i32[B, W], the pending token, then the drafts.
        target_tokens: i32[B, W], the target's token after each candidate.
        num_drafts: i32[B], drafts that count, at most W - 1; the rest of `candidates` is padding.

    Returns:
        `accept_lens: i32[B]`, 1 to W: accepted drafts and the bonus token. The run of row `b` is `target_tokens[b, :accept_lens[b]]`.
    """
    width = candidates.shape[1]
    matches = (candidates[:, 1:] == target_tokens[:, :-1]) & (jnp.arange(1, width) <= num_drafts[:, None])
    return 1 + jnp.sum(jnp.cumprod(matches.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
