"""DSPARK: DFlash's block with a Markov head over it, and no more of it verified than pays."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.config import RAGGED_VERIFY
from jspec.models.block_draft import BlockDraftModel
from jspec.models.target import TargetModel
from jspec.spec_workers.base import (
    DeviceState,
    HostLaunch,
    HostOutcome,
    HostSide,
    PhaseOutput,
    SpecWorker,
    VerifyKind,
)
from jspec.spec_workers.block import block_rows, block_worker
from jspec.spec_workers.draft_cache import draft_cache
from jspec.spec_workers.draft_sampling import best_tokens, draw_tokens
from jspec.spec_workers.dspark_budget import ALL, Sps, budget
from jspec.spec_workers.dspark_layout import survival, verify_lens
from jspec.spec_workers.featured import Start, publish_run, start, walk_chain, widen
from jspec.spec_workers.upload import DecodeInputs


class Known(NamedTuple):
    """What the host knows of the drafts of each row: of the newest settled launch that it was in."""

    epochs: np.ndarray  # i64[R], -1 where nothing is known
    chances: np.ndarray  # f32[R, K]


class Block(NamedTuple):
    """What the draft proposes for every row of a batch."""

    candidates: Any  # i32[B, K + 1]  the pending token, then the drafts
    probs: Any  # f32[B, K, Vd]  what drafts of sampling rows were drawn from; zeros where no row samples
    confidence: Any  # f32[B, K]  logits; zeros without a confidence head


def dspark(
    target: TargetModel,
    draft: BlockDraftModel,
    *,
    name: str = "dspark",
    ragged_verify: str = "static",
    sps: Sps | None = None,
    temperatures: Sequence[float] | None = None,
    cache: str = "paged",
) -> SpecWorker:
    """A worker whose draft runs once before each verify, and then walks its block token by token with a small head; of all rows' drafts it verifies as many as
    pay, the likeliest ones.

        resolve -> draft block -> Markov walk -> confidence -> layout -> verify -> accept -> PUBLISH -> commit, inject, stash

    How many drafts are verified, the budget, comes up with the launch: the host makes it of `sps` and of the confidences of launches that were settled by then.
    Whose they are, the layout, is decided on the device by this step's own confidences; see `verify_lens` for why neither changes the output's law.
    A row keeps pages for its whole block, whatever is verified of it. What recurrent layers of the target remember is committed after PUBLISH, too.

    Rows that sample draw their drafts from the draft's own distribution and accept them by `accept_rejection`: their output has the target's law, but is another
    draw than plain decoding's with the same seed, and where budgets are in use it depends on the rows beside it.

    Near the end of the draft's context a row drafts nothing and decodes on.

    Args:
        target: the model.
        draft: its draft, of kind "dspark".
        name: how it is listed.
        ragged_verify: see `EngineConfig`. All but "static" need a draft with a confidence head.
        sps: what a verify costs on this machine; without it, or with one that says nothing, everything is verified.
        temperatures: f32[K] of sequential temperature scaling; None: ones.
        cache: where the draft's KV lies, see `draft_cache`.

    Raises:
        ValueError: a draft or options that do not fit; when it is started, a prefix cache beside `cache="window"`.

    Source: DSpark (arXiv 2607.05147); SGLang's DSPARK worker of Spec V2.
    """
    config, count = draft.config, draft.config.num_drafts
    _check_options(draft, ragged_verify, sps, temperatures)
    budgeted, where = ragged_verify != "static", draft_cache(cache, draft)
    scale = np.ones(count, np.float32) if temperatures is None else np.asarray(temperatures, np.float32)

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        begun = start(device, inputs, table_width=table_width, depth=depth, context_len=draft.facts.context_len)
        hidden, begun = block_rows(draft, where, params["draft"], begun, inputs.rows)
        block = propose(
            draft, params["draft"], begun, inputs.rows, hidden[:, config.num_rows - count :], budgeted=budgeted
        )
        ragged: dict[str, Any] = {}
        words = None
        if budgeted:
            chances = survival(block.confidence, scale)
            ragged["verify_lens"] = verify_lens(chances, inputs.batch_words[0], begun.num_drafts)
            words = lax.bitcast_convert_type(chances.astype(jnp.float32), jnp.int32)
        if ragged_verify == "compact":
            ragged["token_buckets"] = token_buckets(inputs.rows.shape[0], count + 1)
        layers = draft.facts.capture_layers
        drawn_from = functools.partial(widen, draft, params["draft"], block.probs)
        run = walk_chain(
            target, params["target"], begun, inputs.rows, block.candidates, drawn_from, layers=layers, **ragged
        )
        return publish_run(target, params["target"], run, inputs, output_stride=count + 1, words=words)

    return block_worker(
        target,
        draft,
        where,
        verify_phase,
        kind="dspark",
        name=name,
        verify_kind=VerifyKind.RAGGED if ragged_verify == "compact" else VerifyKind.CHAIN,
        host=budget_side(count, sps) if budgeted else None,
    )


def token_buckets(num_rows: int, width: int) -> tuple[int, ...]:
    """Numbers of packed tokens that a verify of `num_rows` rows may be run at: by halves down to a token a row."""
    sizes, size = [num_rows * width], num_rows * width
    while size > num_rows:
        size = max(size // 2, num_rows)
        sizes.append(size)
    return tuple(reversed(sizes))


def budget_side(num_drafts: int, sps: Sps | None) -> HostSide:
    """Keeps the survival of each row's newest settled drafts, and makes the budget of the next launch of them.

    A row of which nothing is known counts as sure, as in SGLang: a new request is verified whole.
    """

    def init(num_rows: int) -> Known:
        return Known(np.full(num_rows, -1, np.int64), np.ones((num_rows, num_drafts), np.float32))

    def inputs(known: Known, launch: HostLaunch):
        of_rows = np.zeros((len(launch.rows), 0), np.int32)
        if sps is None:
            return of_rows, np.array([ALL], np.int32)
        is_known = known.epochs[launch.rows] == launch.epochs
        chances = np.where(is_known[:, None], known.chances[launch.rows], np.float32(1))
        return of_rows, np.array([budget(chances, sps)], np.int32)

    def observe(known: Known, outcome: HostOutcome) -> Known:
        if not len(outcome.words):
            return known
        epochs, chances = known.epochs.copy(), known.chances.copy()
        epochs[outcome.rows], chances[outcome.rows] = outcome.epochs, outcome.words.view(np.float32)
        return Known(epochs, chances)

    return HostSide(row_words=0, batch_words=1, outcome_words=num_drafts, init=init, inputs=inputs, observe=observe)


def _check_options(
    draft: BlockDraftModel, ragged_verify: str, sps: Sps | None, temperatures: Sequence[float] | None
) -> None:
    count = draft.config.num_drafts
    if ragged_verify not in RAGGED_VERIFY:
        raise ValueError(f"ragged_verify={ragged_verify!r} must be one of {', '.join(RAGGED_VERIFY)}")
    if ragged_verify == "static" and (sps is not None or temperatures is not None):
        raise ValueError(
            "sps and temperatures mean nothing to ragged_verify='static', which verifies every draft: leave them out, or choose 'compact'"
        )
    if ragged_verify != "static" and not draft.config.confidence:
        raise ValueError(
            f"ragged_verify={ragged_verify!r} needs a draft with a confidence head, this one has none: use one that has, or 'static'"
        )
    if temperatures is not None and len(temperatures) != count:
        raise ValueError(
            f"temperatures has {len(temperatures)} values, but the draft proposes {count} tokens: one is needed for each"
        )


def propose(draft: BlockDraftModel, params, begun: Start, rows, hidden, *, budgeted: bool) -> Block:
    """Walks a block from front to back: each token is drawn from what its row says, and from what the token before it adds.

    Args:
        hidden: [B, K, H], the rows that propose.
        budgeted: whether budgets are in use, so that rows depend on each other.
    """
    sampling, (batch, count, _) = begun.device.sampling, hidden.shape
    samples = jnp.any((sampling.temperature[rows] > 0) & (rows > 0))
    logits = draft.logits(params, hidden)
    state = jnp.zeros((batch, draft.config.markov_rank), hidden.dtype)
    # What is verified depends on drafts, of older steps and of other rows. With the draws keyed by seed and position alone, a position drafted again would be
    # drafted by the same noise, and requests of one seed by each other's: the choice of what to test would know the draft that it tests.
    salts = begun.seq_lens * begun.device.page_table.shape[0] + rows if budgeted else begun.seq_lens
    tokens, probs, confidence = [begun.carry.bonus], [], []
    for k in range(count):
        previous = draft.previous(params, tokens[-1])
        bias, state = draft.markov(params, hidden[:, k], previous, state)
        row_logits = logits[:, k] + bias

        def draw(row_logits=row_logits, k=k):
            return draw_tokens(sampling, rows, row_logits, begun.seq_lens + 1 + k, salts)

        def best(row_logits=row_logits):
            return best_tokens(row_logits, 1, scored=False)[1][:, 0], jnp.zeros_like(row_logits)

        ids, drawn_from = lax.cond(samples, draw, best)
        if draft.config.confidence:
            confidence.append(draft.confidence(params, hidden[:, k], previous))
        tokens.append(draft.token_ids(params, ids))
        probs.append(drawn_from)
    sure = jnp.stack(confidence, axis=1) if confidence else jnp.zeros((batch, count), jnp.float32)
    return Block(jnp.stack(tokens, axis=1), jnp.stack(probs, axis=1), sure)
