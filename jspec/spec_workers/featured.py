"""What the workers with a draft model share: the target's forwards, which hand its features to a second program, and how a run is published."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.future_map import publish, resolve
from jspec.models.block_draft import BlockDraftModel
from jspec.models.draft import DraftModel
from jspec.models.frozen_kv_draft import FrozenKVDraft
from jspec.models.recurrence import Accepted
from jspec.models.target import TargetModel
from jspec.spec_workers.accept import accept_chain, accept_rejection, prefer_drafts
from jspec.spec_workers.adjust import adjust_logits, chain_path, tree_path
from jspec.spec_workers.base import DeviceState, PhaseOutput
from jspec.spec_workers.forward import (
    Prefill,
    begin_extend,
    chain_run,
    packed_batch,
    pad_axis,
    row_slots,
    verify_batch,
    write_tokens,
)
from jspec.spec_workers.logprobs import token_logprobs
from jspec.spec_workers.prompt import sample_prompts
from jspec.spec_workers.run_if import run_if
from jspec.spec_workers.sampling import sample
from jspec.spec_workers.tree import Tree, accept_tree
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs, apply_decode, pack_outcome
from jspec.state.results import RowStatus


class ExtendHandoff(NamedTuple):
    """From a prefill to the draft's."""

    prompts: Prefill
    tokens: Any  # i32[B]  the token after each row's last one: sampled, or the prompt's own
    captured: Any  # [T, M, H]  the target's hidden states after the captured layers
    hidden: Any  # [T, H]  and after its final norm


class Owed(NamedTuple):
    """What `TargetModel.commit` is to be told of a verify."""

    intermediates: Any
    accepted: Accepted


class Handoff(NamedTuple):
    """From a verify to its draft extend. `O` is the most tokens this verify could emit."""

    seq_lens: Any  # i32[B]  frontier before the verify
    tokens: Any  # i32[B, O]  emitted; past `accept_lens` meaningless
    accept_lens: Any  # i32[B]
    captured: Any  # [B, O, M, H]  features along the accepted path
    hidden: Any  # [B, O, H]
    owed: Owed | tuple[()] = ()  # to a target with recurrent layers; () where there is nothing, or nothing any more


class Start(NamedTuple):
    """What a verify begins with."""

    device: DeviceState  # the upload applied
    page_table: Any  # i32[B, P]
    seq_lens: Any  # i32[B]
    carry: Any
    fresh: Any  # bool[B]
    num_drafts: Any  # i32[B]  drafts that count; 0 where the draft's context is at its end: the row decodes on


def check_pair(target: TargetModel, draft: DraftModel | BlockDraftModel | FrozenKVDraft) -> None:
    """Raises ValueError where `draft` was not made for such a target."""
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(draft.facts, field), getattr(target.facts, field)
        if ours != theirs:
            raise ValueError(
                f"the draft's {field}={ours}, the target's is {theirs}: choose a draft made for this target"
            )
    if any(layer >= target.facts.num_layers for layer in draft.facts.capture_layers):
        raise ValueError(
            f"the draft reads target layers {draft.facts.capture_layers}, but the target has {target.facts.num_layers}: choose a draft made for it"
        )


def prefill(target: TargetModel, params, device: DeviceState, inputs: ExtendInputs, layers) -> PhaseOutput:
    """The target's part of a prefill: forward, sample, PUBLISH."""
    device, prompts = begin_extend(device, inputs)
    new_seq_lens = prompts.new_seq_lens
    out = target.forward(params, prompts.batch, device.kv_pages, capture_layers=layers, recurrent=device.recurrent)
    device = dataclasses.replace(device, kv_pages=out.kv_pages, recurrent=out.recurrent)
    sampled = sample_prompts(target, params, device, prompts, out.hidden)
    future = publish(device.future, prompts.batch.rows, new_seq_lens, forward_iter=inputs.forward_iter)
    device = dataclasses.replace(device, future=future)
    outcome = pack_outcome(sampled.tokens, jnp.where(prompts.goes_on, 0, 1), new_seq_lens, sampled.status)
    tokens = jnp.where(prompts.goes_on, prompts.next_ids[:, 0], sampled.tokens[:, 0])
    return PhaseOutput(device, outcome, ExtendHandoff(prompts, tokens, out.captured, out.hidden), sampled.logprobs)


def start(device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int, context_len: int) -> Start:
    """Applies the upload and reads the relay. `depth` drafts need positions up to `context_len`, the draft's."""
    device = apply_decode(device, inputs)
    seq_lens, carry, fresh = resolve(device.future, inputs.rows, expected_iter=inputs.expected_iter)
    device = write_tokens(device, inputs.rows, seq_lens, carry.bonus[:, None], (inputs.rows > 0).astype(jnp.int32))
    num_drafts = jnp.where((inputs.rows > 0) & (seq_lens + depth <= context_len), depth, 0)
    return Start(device, device.page_table[inputs.rows, :table_width], seq_lens, carry, fresh, num_drafts)


class Run(NamedTuple):
    """A verify that is not published yet."""

    begun: Start  # as it was, but for the target's pool
    handoff: Handoff
    finite: Any  # bool[B, O]  of the logits along the accepted path


def verify_chain(
    target: TargetModel,
    params,
    begun: Start,
    inputs: DecodeInputs,
    candidates,
    draft_probs,
    *,
    output_stride: int,
    words=None,
    **options: Any,
) -> PhaseOutput:
    """Verify, accept, PUBLISH.

    Args:
        target, params, begun, candidates, draft_probs, options: as of `walk_chain`.
        inputs: the step's.
        output_stride: token columns of the outcome.
        words: i32[B, X] or None, for the worker's host side.
    """
    run = commit_run(target, walk_chain(target, params, begun, inputs.rows, candidates, draft_probs, **options))
    return publish_run(target, params, run, inputs, output_stride=output_stride, words=words)


def at_size(target: TargetModel, sizes: tuple[int, ...], needed, run: Callable[[int, Any], Any], kv_pages):
    """What `run(size, kv_pages)` returns, a pool first, at the smallest of the `sizes` that is at least `needed: i32[]`: chosen on the device."""
    if len(sizes) == 1:
        return run(sizes[0], kv_pages)
    chosen = jnp.sum(target.agreed(needed) > jnp.asarray(sizes, jnp.int32), dtype=jnp.int32)
    shapes = jax.eval_shape(lambda: run(sizes[-1], kv_pages))[1:]
    carried = (kv_pages, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    for i, size in enumerate(sizes):
        carried = run_if(chosen == i, lambda carried, size=size: run(size, carried[0]), carried)
    return carried


def forward_at(
    target: TargetModel, params, begun: Start, rows, tokens, size: int, kv_pages, *, layers, **nodes: Any
) -> tuple[Any, ...]:
    """Runs the target on the first `size` of each row's `tokens: i32[B, W]`; `nodes`: of a tree, as of `verify_batch`.

    Returns: the pool; captured and final hidden states, logits and what recurrent layers remember, each of `W` tokens a row, zeros behind.
    """
    device, (batch_size, width) = begun.device, tokens.shape
    batch = verify_batch(rows, begun.seq_lens, tokens[:, :size], begun.page_table, page_size=device.page_size, **nodes)
    out = target.forward(params, batch, kv_pages, capture_layers=layers, recurrent=device.recurrent)
    found = (out.captured, out.hidden, target.logits(params, out.hidden))
    padded = (pad_axis(x.reshape(batch_size, size, *x.shape[1:]), 1, width) for x in found)
    return out.kv_pages, *padded, jax.tree.map(lambda x: pad_axis(x, 0, width), out.intermediates)


def walk_chain(
    target: TargetModel,
    params,
    begun: Start,
    rows,
    candidates,
    draft_probs,
    *,
    layers,
    lossy_threshold: float = 1.0,
    widths: tuple[int, ...] | None = None,
    verify_lens=None,
    token_buckets: tuple[int, ...] = (),
) -> Run:
    """Verifies a chain and accepts what is right of it.

    Args:
        target: the model.
        params: its weights.
        begun: from `start`.
        rows: i32[B], the step's.
        candidates: i32[B, W], the pending token and the drafts.
        draft_probs: makes f32[B, W - 1, V], the distributions that drafts of sampling rows were drawn from: they are accepted by `accept_rejection`. None
            where drafts are the draft's best tokens. Called where a row samples, and there only.
        layers: the target's captured layers.
        lossy_threshold: below 1, as of `prefer_drafts`.
        widths: widths the target may be run at, ascending, ending with `W`; each step takes the narrowest that holds its longest chain, on the device.
        verify_lens: i32[B] or None, tokens of each row that are verified, the pending one included: no more is accepted.
        token_buckets: with `verify_lens`, numbers of packed tokens that the target may be run at instead, ascending, the last one enough for `W` of every
            row; each step takes the smallest that holds its tokens.
    """
    batch_size, width = candidates.shape
    device, page_table, seq_lens, _, _, num_drafts = begun
    if verify_lens is not None:
        verify_lens = jnp.where(rows > 0, verify_lens, 0)
        num_drafts = jnp.minimum(num_drafts, jnp.maximum(verify_lens - 1, 0))

    def forward_packed(num_tokens: int, kv_pages):
        """As `forward_at`, over packed tokens."""
        chains = (rows, seq_lens, candidates, verify_lens, page_table)
        batch = packed_batch(*chains, page_size=device.page_size, num_tokens=num_tokens)
        out = target.forward(params, batch, kv_pages, capture_layers=layers, recurrent=device.recurrent)
        found = (out.captured, out.hidden, target.logits(params, out.hidden))
        spread = (
            jnp.zeros((batch_size * width, *x.shape[1:]), x.dtype).at[batch.packed].set(x, mode="drop") for x in found
        )
        return out.kv_pages, *(x.reshape(batch_size, width, *x.shape[1:]) for x in spread), out.intermediates

    def forward(size: int, kv_pages):
        return forward_at(target, params, begun, rows, candidates, size, kv_pages, layers=layers)

    sizes = token_buckets or widths or (width,)
    run: Callable[[int, Any], Any] = forward_packed if token_buckets else forward
    needed = jnp.sum(verify_lens) if token_buckets else 1 + jnp.max(num_drafts)
    kv_pages, captured, hidden, logits, remembered = at_size(target, sizes, needed, run, device.kv_pages)
    place = jnp.arange(width, dtype=jnp.int32)
    positions = seq_lens[:, None] + 1 + place
    path = chain_path(seq_lens, candidates)
    logits = adjust_logits(device, rows, logits, path, table_width=page_table.shape[1])
    by_rejection = (device.sampling.temperature[rows] > 0) & (draft_probs is not None)
    # Rows that go by rejection are decided below; their tokens here are not looked at.
    active = (place <= num_drafts[:, None]) & ~by_rejection[:, None]
    tokens, finite = sample(device.sampling, rows, logits, positions, active)
    if lossy_threshold < 1:
        before = jnp.broadcast_to(jnp.maximum(place - 1, 0), candidates.shape)
        nodes = (candidates, before, place <= num_drafts[:, None])
        tokens = prefer_drafts(device.sampling, rows, logits, tokens, *nodes, threshold=lossy_threshold)
    accept_lens = accept_chain(candidates, tokens, num_drafts)
    if draft_probs is not None:
        tokens, accept_lens = jax.lax.cond(
            jnp.any(by_rejection),
            lambda: select(
                by_rejection,
                accept_rejection(device.sampling, rows, candidates, logits, draft_probs(), num_drafts, positions),
                (tokens, accept_lens),
            ),
            lambda: (tokens, accept_lens),
        )
    accepted = chain_run(rows, seq_lens, accept_lens, page_table, width=width)
    owed = Owed(remembered, accepted) if remembered else ()
    begun = begun._replace(device=dataclasses.replace(device, kv_pages=kv_pages))
    return Run(begun, Handoff(seq_lens, tokens, accept_lens, captured, hidden, owed), finite)


def commit_run(target: TargetModel, run: Run) -> Run:
    """`run`, the target's recurrent state moved on to its end."""
    device = commit_recurrent(target, run.begun.device, run.handoff)
    return run._replace(begun=run.begun._replace(device=device), handoff=run.handoff._replace(owed=()))


def commit_recurrent(target: TargetModel, device: DeviceState, handoff: Handoff) -> DeviceState:
    """`device`, the target's recurrent state moved on to the end of the run that `handoff` tells of."""
    if not handoff.owed:
        return device
    return dataclasses.replace(device, recurrent=target.commit(device.recurrent, *handoff.owed))


def verify_tree(
    target: TargetModel,
    params,
    begun: Start,
    inputs: DecodeInputs,
    tree: Tree,
    *,
    layers,
    output_stride: int,
    **options: Any,
) -> PhaseOutput:
    """Verify, accept, move the path's KV into place, PUBLISH. `options` as of `walk_tree`, the other arguments as of `verify_chain`."""
    options |= {"layers": layers, "max_depth": output_stride - 1}
    run = commit_run(target, walk_tree(target, params, begun, inputs.rows, tree, **options))
    return publish_run(target, params, run, inputs, output_stride=output_stride)


def walk_tree(
    target: TargetModel,
    params,
    begun: Start,
    rows,
    tree: Tree,
    *,
    layers,
    max_depth: int,
    lossy_threshold: float = 1.0,
    num_nodes=None,
    widths: tuple[int, ...] | None = None,
) -> Run:
    """Verifies a tree, accepts a path of at most `max_depth` drafts, and moves its KV into place.

    Args: as of `walk_chain`, and
        num_nodes: i32[B] or None, nodes of each row's tree that count, from the front; the others' depths are beyond the row's `num_drafts`.
        widths: with `num_nodes`, numbers of nodes that the target may be run at, ascending, ending with `W`; each step takes the fewest that hold its largest
            tree, on the device.
    """
    device, page_table, seq_lens, _, _, num_drafts = begun
    batch_size, width = tree.tokens.shape

    def forward(size: int, kv_pages):
        nodes = {"depths": tree.depths[:, :size], "ancestors": tree.ancestors[:, :size] if size > 1 else None}
        given = (target, params, begun, rows, tree.tokens, size, kv_pages)
        return forward_at(*given, layers=layers, **nodes)

    sizes, needed = ((width,), width) if widths is None else (widths, jnp.max(num_nodes))
    kv_pages, captured, hidden, logits, remembered = at_size(target, sizes, needed, forward, device.kv_pages)
    positions = seq_lens[:, None] + 1 + tree.depths
    path = tree_path(seq_lens, tree.tokens, tree.depths, tree.ancestors)
    logits = adjust_logits(device, rows, logits, path, table_width=page_table.shape[1])
    tokens, finite = sample(device.sampling, rows, logits, positions, tree.depths <= num_drafts[:, None])
    if lossy_threshold < 1:
        ours = (tree.tokens, tree.parents, tree.depths <= num_drafts[:, None])
        tokens = prefer_drafts(device.sampling, rows, logits, tokens, *ours, threshold=lossy_threshold)
    accept_lens, taken = accept_tree(tree, tokens, num_drafts, max_depth=max_depth)

    # The path's KV to the front of the block, before anything reads it.
    place = jnp.arange(max_depth + 1, dtype=jnp.int32)
    source = row_slots(rows, seq_lens[:, None] + taken, page_table, page_size=device.page_size)
    front = row_slots(rows, seq_lens[:, None] + place, page_table, page_size=device.page_size)
    front = jnp.where(place < accept_lens[:, None], front, 0)
    kv_pages = target.move_kv(kv_pages, source.reshape(-1), front.reshape(-1))
    accepted = Accepted(rows, seq_lens, accept_lens, taken, page_table)
    owed = Owed(remembered, accepted) if remembered else ()

    row = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
    tokens, finite = (jnp.take_along_axis(x, taken, axis=1) for x in (tokens, finite))
    handoff = Handoff(seq_lens, tokens, accept_lens, captured[row, taken], hidden[row, taken], owed)
    return Run(begun._replace(device=dataclasses.replace(device, kv_pages=kv_pages)), handoff, finite)


def select(chosen, ours, others):
    """Row by row, `ours` where `chosen: bool[B]`."""
    return tuple(jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(ours, others, strict=True))


def publish_run(
    target: TargetModel, params, run: Run, inputs: DecodeInputs, *, output_stride: int, words=None
) -> PhaseOutput:
    """PUBLISHES the frontier after an accepted run, and packs the outcome. `params`: the target's; `words: i32[B, X]`: for the worker's host side."""
    begun, handoff, finite = run
    tokens, accept_lens = handoff.tokens, handoff.accept_lens
    new_seq_lens = begun.seq_lens + accept_lens
    device = write_tokens(begun.device, inputs.rows, begun.seq_lens + 1, tokens, accept_lens)
    future = publish(device.future, inputs.rows, new_seq_lens, forward_iter=inputs.forward_iter)
    finite = jnp.all(finite | (jnp.arange(tokens.shape[1]) >= accept_lens[:, None]), axis=1)
    status = jnp.where(begun.fresh, jnp.where(finite, RowStatus.OK, RowStatus.NOT_FINITE), RowStatus.STALE_RELAY)
    status = jnp.where(inputs.rows > 0, status, RowStatus.OK)
    columns = jnp.pad(tokens, ((0, 0), (0, output_stride - tokens.shape[1])))
    outcome = pack_outcome(columns, accept_lens, new_seq_lens, status, words)
    asked = jnp.any(device.sampling.num_logprobs[inputs.rows] >= 0)
    hidden = handoff.hidden.reshape(tokens.size, -1)
    logprobs = token_logprobs(target, params, asked, hidden, tokens.reshape(-1)).reshape(*tokens.shape, -1)
    return PhaseOutput(dataclasses.replace(device, future=future), outcome, handoff, (logprobs,))


def check_acceptance(*, rejection_sampling: bool, lossy_threshold: float) -> None:
    """Raises ValueError where both ways of accepting more are asked for."""
    if rejection_sampling and lossy_threshold < 1:
        raise ValueError(
            f"rejection_sampling=True accepts by ratio and lossy_threshold={lossy_threshold} by the target's probability: choose one of them"
        )


def widen(draft: DraftModel | BlockDraftModel, params, probs):
    """f32[..., V]: distributions over the draft's vocabulary as ones over the target's; 0 at tokens that the draft cannot propose."""
    ids = draft.token_ids(params, jnp.arange(probs.shape[-1], dtype=jnp.int32))
    return jnp.zeros((*probs.shape[:-1], draft.facts.vocab_size), probs.dtype).at[..., ids].set(probs)
