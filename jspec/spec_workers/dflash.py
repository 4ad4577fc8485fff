"""DFLASH: a draft that fills in a whole block at once, over the target's hidden states as its context."""

import functools

import jax
import jax.numpy as jnp

from jspec.models.block_draft import BlockDraftModel
from jspec.models.target import TargetModel
from jspec.spec_workers.base import DeviceState, PhaseOutput, SpecWorker
from jspec.spec_workers.block import block_rows, block_worker
from jspec.spec_workers.draft_cache import draft_cache
from jspec.spec_workers.draft_sampling import best_tokens, draw_tokens
from jspec.spec_workers.featured import check_acceptance, start, verify_chain, widen
from jspec.spec_workers.upload import DecodeInputs


def dflash(
    target: TargetModel,
    draft: BlockDraftModel,
    *,
    name: str = "dflash",
    cache: str = "paged",
    rejection_sampling: bool = False,
    lossy_threshold: float = 1.0,
) -> SpecWorker:
    """A worker whose draft runs once before each verify, over a block of the pending token and masks.

        resolve -> draft block -> verify -> accept -> PUBLISH -> inject, stash

    Rows of the block see each other and all of the context. What injection writes are keys and values made of the target's hidden states of the accepted
    tokens, in the place of the block's own; those of tokens that were not accepted stay behind as garbage past the frontier, never read and overwritten by
    the next block. There is no draft extend.

    Near the end of the draft's context a row drafts nothing and decodes on.

    Args:
        target: the model.
        draft: its draft, of kind "dflash".
        name: how it is listed.
        cache: where the draft's KV lies, see `draft_cache`.
        rejection_sampling: rows that sample draw each draft from its row of the block, and accept by `accept_rejection`.
        lossy_threshold: as of `eagle`.

    Raises:
        ValueError: a draft that does not fit; when it is started, a prefix cache beside `cache="window"`.

    Source: DFlash (arXiv 2602.06036); SGLang's DFLASH worker of Spec V2.
    """
    check_acceptance(rejection_sampling=rejection_sampling, lossy_threshold=lossy_threshold)
    where = draft_cache(cache, draft)

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        begun = start(device, inputs, table_width=table_width, depth=depth, context_len=draft.facts.context_len)
        hidden, begun = block_rows(draft, where, params["draft"], begun, inputs.rows)
        logits = draft.logits(params["draft"], hidden[:, 1:])
        probs = None
        if rejection_sampling:
            positions = begun.seq_lens[:, None] + 1 + jnp.arange(depth, dtype=jnp.int32)
            drawn = jax.vmap(draw_tokens, in_axes=(None, None, 1, 1), out_axes=1)
            ids, probs = drawn(begun.device.sampling, inputs.rows, logits, positions)
            probs = functools.partial(widen, draft, params["draft"], probs)
        else:
            ids = best_tokens(logits, 1, scored=False)[1][..., 0]
        drafts = draft.token_ids(params["draft"], ids)
        return verify_chain(
            target,
            params["target"],
            begun,
            inputs,
            jnp.concatenate([begun.carry.bonus[:, None], drafts], axis=1),
            probs,
            layers=draft.facts.capture_layers,
            output_stride=depth + 1,
            lossy_threshold=lossy_threshold,
        )

    return block_worker(target, draft, where, verify_phase, kind="dflash", name=name, lossy=lossy_threshold < 1)
