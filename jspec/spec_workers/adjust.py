"""What a request asks of the target's logits before anything reads them: penalties, biases, tokens and words that may not come."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.config import MAX_BAD_WORD_LEN
from jspec.spec_workers.base import DeviceState
from jspec.spec_workers.forward import history
from jspec.spec_workers.run_if import run_if

BANNED = -1e30
"""Logit of a token that may not be chosen: finite, so that it is not taken for a fault of the model, and of no weight in any softmax."""


class Path(NamedTuple):
    """Nodes after which logits are known, and what precedes each of them. `W` nodes a row."""

    start: Any  # i32[B]  position of node 0; before it are the row's tokens as its pages hold them
    tokens: Any  # i32[B, W]
    depths: Any  # i32[B, W]  a node's position past `start`
    above: Any  # bool[B, W, W]  [b, i, j]: node j is node i, or on its path


def chain_path(start, tokens) -> Path:
    """Nodes one after another."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    above = jnp.broadcast_to(place <= place[:, None], (*tokens.shape, tokens.shape[1]))
    return Path(start, tokens, jnp.broadcast_to(place, tokens.shape), above)


def tree_path(start, tokens, depths, ancestors) -> Path:
    """Nodes of a tree; `ancestors: u32[B, W]`, a node's own bit among them."""
    node = jnp.arange(tokens.shape[1], dtype=jnp.uint32)
    return Path(start, tokens, depths, (ancestors[..., None] >> node) & 1 == 1)


def adjust_logits(device: DeviceState, rows, logits, path: Path, *, table_width: int):
    """`f32[B, W, V]`: the logits as the row's request wants them, at each node of a draft's path, so that sampling, acceptance and plain decoding see one
    and the same distribution.

    In this order: the repetition penalty over every token of prompt and path (CTRL, arXiv 1909.05858: positive logits are divided by it, negative ones
    multiplied), frequency and presence penalties over those emitted, the biases; then tokens that would complete a bad word, stop tokens while the output is
    shorter than `min_new_tokens`, and what the row's grammar does not allow, are banned. Counts are taken from the pages' tokens, so they need no state, and a retraction or a shared prefix
    cannot make them wrong. Costs nothing while no row asks for anything.

    Args:
        device: its sampling parameters, tokens and page table.
        rows: i32[B], 0 is padding.
        logits: f32[B, W, V], after each node.
        path: the nodes.
        table_width: static; pages of a row to look at.
    """
    s = device.sampling
    early = path.start[:, None] + path.depths + 1 < s.stop_from[rows][:, None]
    penalised = (s.repetition_penalty != 1) | (s.presence_penalty != 0) | (s.frequency_penalty != 0)
    listed = (s.bias_ids[:, 0] >= 0) | (s.bad_words[:, 0, 0] >= 0)
    wanted = jnp.any(early, axis=1) | (penalised | listed)[rows]

    batch_size, width, vocab_size = logits.shape

    def adjust(flat):
        # A row at a time, of those that ask: what it takes is a few times as large as the logits of a row. Nodes are not an axis of their own between
        # the rows, since a TPU would pad an axis of one to eight.
        def one(i, flat):
            def own(x):
                return lax.dynamic_slice_in_dim(x, i, 1)

            def change(x):
                x, row, nodes = x[None], own(rows), Path(*map(own, path))
                before = history(device, row, table_width=table_width)
                x = _edit(s, row, _penalise(s, row, x, nodes, before), nodes, before)
                # Compared one id after another, neither scattered nor reduced: elementwise, so that XLA writes over the logits.
                vocabulary = jnp.arange(x.shape[-1], dtype=jnp.int32)
                stops = functools.reduce(operator.or_, (ids == vocabulary for ids in s.stop_token_ids[row[0]]))
                return jnp.where(own(early)[..., None] & stops, BANNED, x)[0]

            x = lax.dynamic_slice_in_dim(flat, i * width, width)
            x = lax.cond(wanted[i], change, lambda x: x, x)
            return lax.dynamic_update_slice_in_dim(flat, x, i * width, 0)

        return lax.fori_loop(0, batch_size, one, flat)

    logits = run_if(jnp.any(wanted), adjust, logits.reshape(-1, vocab_size)).reshape(logits.shape)
    if device.masks is None:
        return logits
    ask, num_words = device.masks, -(-logits.shape[-1] // 32)

    def mask(logits):
        before = history(device, rows, table_width=table_width)
        shape = jax.ShapeDtypeStruct((*logits.shape[:2], num_words), jnp.uint32)
        words = jax.pure_callback(ask, shape, s.grammar[rows], s.prompt_len[rows], path.start, before, *path[1:])
        vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        allowed = (words[..., vocabulary // 32] >> (vocabulary % 32)) & 1
        return jnp.where(allowed == 1, logits, BANNED)

    return run_if(jnp.any(s.grammar[rows] > 0), mask, logits)


def _penalise(s, rows, logits, path: Path, before):
    """Repetition, frequency and presence penalties, a node at a time: the counts of one node are as large as its logits."""
    row = jnp.arange(rows.shape[0])[:, None]
    position = jnp.arange(before.shape[1], dtype=jnp.int32)
    known, prompt_len = position < path.start[:, None], s.prompt_len[rows][:, None]
    none = jnp.zeros((rows.shape[0], logits.shape[-1]), jnp.int32)
    seen = none.at[row, before].add(known)
    emitted = none.at[row, before].add(known & (position >= prompt_len))
    is_output = path.start[:, None] + path.depths >= prompt_len
    repetition, presence, frequency = (
        x[rows][:, None] for x in (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    )

    def one(node, logits):
        above = lax.dynamic_index_in_dim(path.above, node, axis=1, keepdims=False)
        seen_here = seen.at[row, path.tokens].add(above)
        count = emitted.at[row, path.tokens].add(above & is_output)
        x = lax.dynamic_index_in_dim(logits, node, axis=1, keepdims=False)
        x = jnp.where(seen_here > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * count - presence * (count > 0)
        return lax.dynamic_update_index_in_dim(logits, x, node, axis=1)

    return lax.fori_loop(0, logits.shape[1], one, logits)


def _edit(s, rows, logits, path: Path, before):
    """Biases, and the last tokens of bad words whose others have just been emitted."""
    vocab_size = logits.shape[-1]
    row, node = jnp.arange(rows.shape[0])[:, None, None], jnp.arange(logits.shape[1])[None, :, None]

    def among(ids):
        return jnp.where(ids >= 0, ids, vocab_size)[:, None, :]  # past the end: dropped

    logits = logits.at[row, node, among(s.bias_ids[rows])].add(s.bias[rows][:, None, :], mode="drop")

    # recent[b, w, o]: the token o places before the next one; -1 in the prompt, of which no bad word begins.
    position = (path.start[:, None] + path.depths)[..., None] - jnp.arange(MAX_BAD_WORD_LEN - 1)
    depth = position - path.start[:, None, None]
    here = path.above[:, :, None, :] & (path.depths[:, None, None, :] == depth[..., None])
    on_path = jnp.sum(jnp.where(here, path.tokens[:, None, None, :], 0), axis=-1)
    index = jnp.clip(position, 0, before.shape[1] - 1).reshape(rows.shape[0], -1)
    in_pages = jnp.take_along_axis(before, index, axis=1).reshape(position.shape)
    recent = jnp.where(depth >= 0, on_path, in_pages)
    recent = jnp.where(position >= s.prompt_len[rows][:, None, None], recent, -1)
    words = s.bad_words[rows][:, None]  # [B, 1, N, L]
    complete = jnp.all((words[..., 1:] < 0) | (words[..., 1:] == recent[:, :, None, :]), axis=-1)  # [B, W, N]
    last = jnp.where(complete & (words[..., 0] >= 0), words[..., 0], vocab_size)
    return logits.at[row, node, last].min(BANNED, mode="drop")
