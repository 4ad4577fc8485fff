"""Workers that propose a chain of tokens without a model of their own: all they differ in is how they propose."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.future_map import publish, resolve, stash
from jspec.models.target import TargetModel
from jspec.spec_workers.accept import accept_chain
from jspec.spec_workers.adjust import adjust_logits, chain_path
from jspec.spec_workers.base import (
    DeviceSizes,
    DeviceState,
    PhaseOutput,
    SpecWorker,
    VerifyKind,
    init_device,
    target_state,
)
from jspec.spec_workers.forward import begin_extend, chain_run, history, pad_axis, verify_batch, write_tokens
from jspec.spec_workers.logprobs import token_logprobs
from jspec.spec_workers.prompt import sample_prompts
from jspec.spec_workers.run_if import run_if
from jspec.spec_workers.sampling import sample
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs, apply_decode, pack_outcome
from jspec.state.results import RowStatus


class Carry(NamedTuple):
    """What crosses an iteration."""

    bonus: Any  # i32[B]  the pending token: emitted, its KV not written


class Proposal(NamedTuple):
    """Drafts for the positions after the pending token. `D` is `verify_width - 1`."""

    tokens: Any  # i32[B, D]
    num_drafts: Any  # i32[B]  how many of them count, from the front; 0 is allowed


Propose = Callable[[Any, Any], Proposal]
"""`propose(history: i32[B, L], lens: i32[B]) -> Proposal`. `history[b, :lens[b]]` is prompt and output of row `b`, the pending token last."""


def propose_nothing(history, lens) -> Proposal:
    """No drafts: plain decoding."""
    del history
    return Proposal(jnp.zeros((lens.shape[0], 0), jnp.int32), jnp.zeros_like(lens))


def chain(
    name: str,
    target: TargetModel,
    propose: Propose = propose_nothing,
    *,
    verify_width: int = 1,
    widths: tuple[int, ...] | None = None,
) -> SpecWorker:
    """A worker that verifies a proposed chain.

        resolve -> propose -> verify -> accept -> PUBLISH, stash

    Nothing is left to do after publish, so a step is one program.

    Args:
        name: how it is listed.
        target: the model.
        propose: the proposal; it sees settled and unsettled tokens alike, since it runs on the device.
        verify_width: `W`, the pending token and up to `W - 1` drafts.
        widths: widths the target may be run at, ascending, ending with `W`. Each step takes the narrowest that holds its longest proposal, on the device:
            a step that proposes nothing costs a plain step.

    Returns:
        A `SpecWorker`; with the default proposal and width 1 it is plain decoding.
    """
    widths = widths or (verify_width,)
    if verify_width < 1 or list(widths) != sorted(set(widths)) or widths[0] < 1 or widths[-1] != verify_width:
        raise ValueError(f"widths={widths} must ascend from at least 1 to verify_width={verify_width}")

    def init(sizes: DeviceSizes) -> DeviceState:
        return init_device(
            sizes,
            **target_state(target, sizes),
            carry=Carry(bonus=jax.ShapeDtypeStruct((), jnp.int32)),
        )

    def finish(device: DeviceState, rows, forward_iter, tokens, accept_lens, new_seq_lens, status) -> PhaseOutput:
        """Publishes and stashes: the tail that prefill and verify share."""
        future = publish(device.future, rows, new_seq_lens, forward_iter=forward_iter)
        bonus = jnp.take_along_axis(tokens, jnp.maximum(accept_lens[:, None] - 1, 0), axis=1)[:, 0]
        future = stash(future, rows, Carry(bonus=bonus), forward_iter=forward_iter)
        status = jnp.where(rows > 0, status, RowStatus.OK)
        device = dataclasses.replace(device, future=future)
        return PhaseOutput(device, pack_outcome(tokens, accept_lens, new_seq_lens, status), ())

    def extend_phase(params, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        del table_width  # the upload brings the pages this program reads
        device, prompts = begin_extend(device, inputs)
        rows = prompts.batch.rows
        out = target.forward(params, prompts.batch, device.kv_pages, recurrent=device.recurrent)
        device = dataclasses.replace(device, kv_pages=out.kv_pages, recurrent=out.recurrent)
        sampled = sample_prompts(target, params, device, prompts, out.hidden)
        accept_lens = jnp.where(prompts.goes_on, 0, 1)
        output = finish(
            device, rows, inputs.forward_iter, sampled.tokens, accept_lens, prompts.new_seq_lens, sampled.status
        )
        return output._replace(logprobs=sampled.logprobs)

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        del depth  # it drafts what it finds
        device = apply_decode(device, inputs)
        real = inputs.rows > 0
        seq_lens, carry, fresh = resolve(device.future, inputs.rows, expected_iter=inputs.expected_iter)
        page_table = device.page_table[inputs.rows, :table_width]
        pending = carry.bonus[:, None]
        device = write_tokens(device, inputs.rows, seq_lens, pending, real.astype(jnp.int32))
        known = history(device, inputs.rows, table_width=table_width)
        proposal = propose(known, jnp.where(real, seq_lens + 1, 0))
        num_drafts = jnp.where(real, proposal.num_drafts, 0)
        candidates = jnp.concatenate([pending, proposal.tokens], axis=1)

        def forward_at(width: int):
            def forward(carried):
                kv_pages, *_ = carried
                batch = verify_batch(
                    inputs.rows, seq_lens, candidates[:, :width], page_table, page_size=device.page_size
                )
                out = target.forward(params, batch, kv_pages, recurrent=device.recurrent)
                found = (target.logits(params, out.hidden), out.hidden)
                padded = (pad_axis(x.reshape(real.shape[0], width, -1), 1, verify_width) for x in found)
                remembered = jax.tree.map(lambda x: pad_axis(x, 0, verify_width), out.intermediates)
                return out.kv_pages, *padded, remembered

            return forward

        longest = target.agreed(1 + jnp.max(num_drafts))
        chosen = jnp.sum(longest > jnp.asarray(widths, jnp.int32), dtype=jnp.int32)
        shapes = jax.eval_shape(forward_at(verify_width), (device.kv_pages,))[1:]
        carried = (device.kv_pages, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
        for i, width in enumerate(widths):
            carried = run_if(chosen == i, forward_at(width), carried) if len(widths) > 1 else forward_at(width)(carried)
        kv_pages, logits, hidden, remembered = carried
        place = jnp.arange(verify_width, dtype=jnp.int32)
        reachable = place <= num_drafts[:, None]
        positions = seq_lens[:, None] + 1 + place
        path = chain_path(seq_lens, candidates)
        logits = adjust_logits(device, inputs.rows, logits, path, table_width=table_width)
        tokens, finite = sample(device.sampling, inputs.rows, logits, positions, reachable)
        accept_lens = accept_chain(candidates, tokens, num_drafts)
        finite = jnp.all(finite | (place >= accept_lens[:, None]), axis=1)
        status = jnp.where(fresh, jnp.where(finite, RowStatus.OK, RowStatus.NOT_FINITE), RowStatus.STALE_RELAY)
        accepted = chain_run(inputs.rows, seq_lens, accept_lens, page_table, width=verify_width)
        recurrent = target.commit(device.recurrent, remembered, accepted)
        device = dataclasses.replace(device, kv_pages=kv_pages, recurrent=recurrent)
        device = write_tokens(device, inputs.rows, seq_lens + 1, tokens, accept_lens)
        output = finish(device, inputs.rows, inputs.forward_iter, tokens, accept_lens, seq_lens + accept_lens, status)
        asked = jnp.any(device.sampling.num_logprobs[inputs.rows] >= 0)
        logprobs = token_logprobs(target, params, asked, hidden.reshape(tokens.size, -1), tokens.reshape(-1))
        return output._replace(logprobs=(logprobs.reshape(*tokens.shape, -1),))

    return SpecWorker(
        name=name,
        verify_width=verify_width,
        output_stride=verify_width,
        alloc_len=verify_width,
        num_non_draft_tokens=1,
        fixed_accept=1 if verify_width == 1 else None,
        verify_kind=VerifyKind.CHAIN,
        capture_layers=(),
        params=target.params,
        init=init,
        extend_phase=extend_phase,
        extend_commit=None,
        verify_phase=verify_phase,
        commit_phase=None,
    )
