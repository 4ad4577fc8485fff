"""Acceptance: how much of a proposal becomes output."""

import jax
import jax.numpy as jnp
from jax import lax

from jspec.spec_workers.sampling import ACCEPT_COIN, TARGET_TOKEN, SamplingState, filtered_probs, position_key


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


def prefer_drafts(sampling: SamplingState, rows, logits, tokens, drafts, parents, counts, *, threshold: float):
    """LOSSY: where the token drawn after a node is none of the node's drafts, but the target gives one of them at least `threshold`, that draft takes its
    place: more is accepted, and what sampled rows emit has no longer the target's law. A threshold of 1 would change nothing.

    Greedy rows are left alone.

    Args:
        sampling: parameters of all rows.
        rows: i32[B].
        logits: f32[B, W, V], of the target, after each node.
        tokens: i32[B, W], the target's own token after each node.
        drafts: i32[B, W], the token of each node.
        parents: i32[B, W], the node before each node; of the first one, itself.
        counts: bool[B, W], nodes that count; the first one is no draft.
        threshold: a probability, after temperature and filters.

    Returns:
        i32[B, W], to be accepted as `tokens` would be. Of several such drafts the first is taken.

    Source: the `speculative_accept_threshold_single` of SGLang; typical acceptance (Medusa, arXiv 2401.10774) has the same aim.
    """
    width = drafts.shape[1]
    node = jnp.arange(width)

    def prefer(item):
        row, logits, tokens, drafts, parents, counts = item
        probs = lax.map(lambda one: filtered_probs(sampling, row, one), logits)
        child = (parents == node[:, None]) & counts & (node > 0)  # [node, draft]
        likely = child & (probs[parents, drafts] >= threshold)
        first = drafts[jnp.argmax(likely, axis=1)]
        drawn = jnp.any(child & (drafts == tokens[:, None]), axis=1)
        return jnp.where(jnp.any(likely, axis=1) & ~drawn, first, tokens)

    def one_row(item):
        return lax.cond(sampling.temperature[item[0]] > 0, prefer, lambda item: item[2], item)

    return lax.map(one_row, (rows, logits, tokens, drafts, parents, counts))


def accept_rejection(sampling: SamplingState, rows, candidates, logits, draft_probs, num_drafts, positions):
    """Speculative sampling: draft `x`, drawn from `draft_probs`, is accepted with probability `min(1, target_probs[x] / draft_probs[x])`; the first
    rejected one is replaced by a draw from `max(0, target_probs - draft_probs)`, renormalised. What is emitted has the target's law.

    `target_probs` is what plain decoding draws from: the same temperature and filters in the same order.

    Args:
        sampling: parameters of all rows.
        rows: i32[B], none of them greedy where the result is used.
        candidates: i32[B, W], the pending token, then the drafts.
        logits: f32[B, W, V], of the target, after each candidate.
        draft_probs: f32[B, W - 1, V], the very distributions that the drafts were drawn from.
        num_drafts: i32[B], drafts that count, at most W - 1.
        positions: i32[B, W], absolute position that the token after each candidate takes.

    Returns:
        `tokens: i32[B, W]`, of which the first `accept_lens` are the row's run, and `accept_lens: i32[B]`.

    Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """
    width = candidates.shape[1]

    def accept(item):
        row, candidates, logits, draft_probs, num_drafts, positions = item
        seed = sampling.seed[row]
        target_probs = lax.map(lambda one: filtered_probs(sampling, row, one), logits)
        place = jnp.arange(width - 1)
        coins = jax.vmap(lambda position: jax.random.uniform(position_key(seed, position, ACCEPT_COIN)))(positions[:-1])
        drafts = candidates[1:]
        # Written so that NaN rejects.
        taken = coins * draft_probs[place, drafts] < target_probs[place, drafts]
        count = jnp.sum(jnp.cumprod((taken & (place < num_drafts)).astype(jnp.int32)))
        refused = jnp.where(count < num_drafts, jnp.pad(draft_probs, ((0, 1), (0, 0)))[count], 0.0)
        rest = jnp.maximum(target_probs[count] - jnp.nan_to_num(refused), 0.0)
        rest = jnp.where(jnp.sum(rest) > 0, rest, target_probs[count])
        key = position_key(seed, positions[count], TARGET_TOKEN)
        last = jnp.argmax(jnp.log(rest) + jax.random.gumbel(key, rest.shape, jnp.float32)).astype(jnp.int32)
        return jnp.where(jnp.arange(width) < count, jnp.pad(drafts, (0, 1)), last), 1 + count

    tokens, accept_lens = lax.map(accept, (rows, candidates, logits, draft_probs, num_drafts, positions))
    return tokens, accept_lens.astype(jnp.int32)
