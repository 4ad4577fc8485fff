"""A worker whose device step does almost nothing: what is left of an iteration is the engine itself."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.future_map import publish, resolve, stash
from jspec.models.target import TargetFacts, TargetModel
from jspec.spec_workers.base import DeviceSizes, DeviceState, PhaseOutput, SpecWorker, VerifyKind, init_device
from jspec.spec_workers.chain import Carry
from jspec.spec_workers.forward import begin_extend
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs, apply_decode, pack_outcome

VOCAB_SIZE = 1000


def stub_target(context_len: int) -> TargetModel:
    """Facts without a model: nothing of it is ever run."""
    facts = TargetFacts(
        vocab_size=VOCAB_SIZE,
        context_len=context_len,
        hidden_size=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        kv_layers=(0,),
        eos_token_ids=(),
        kv_bytes_per_token=8,
    )

    def nothing(*_, **__):
        raise AssertionError("the stub worker runs no model")

    return TargetModel(
        facts=facts,
        params=(),
        init_kv=nothing,
        forward=nothing,
        logits=nothing,
        move_kv=nothing,
        embedding=nothing,
        head=nothing,
    )


def stub_worker(*, verify_width: int = 4, accept_len: int = 3) -> SpecWorker:
    """Emits `accept_len` fixed tokens a verify, through the real relay, page-table delta and outcome.

    resolve -> PUBLISH -> (second program) stash
    """

    def init(sizes: DeviceSizes) -> DeviceState:
        return init_device(sizes, kv_pages=(), carry=Carry(bonus=jax.ShapeDtypeStruct((), jnp.int32)))

    def leave(device, rows, forward_iter, accept_lens, new_seq_lens, *, columns: int) -> PhaseOutput:
        future = publish(device.future, rows, new_seq_lens, forward_iter=forward_iter)
        tokens = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), (rows.shape[0], columns))
        status = jnp.zeros_like(new_seq_lens)
        return PhaseOutput(
            dataclasses.replace(device, future=future),
            pack_outcome(tokens, accept_lens, new_seq_lens, status),
            (rows, new_seq_lens),
        )

    def extend_phase(params, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        del params, table_width
        device, prompts = begin_extend(device, inputs)
        accept_lens = jnp.where(prompts.goes_on, 0, 1)
        return leave(device, prompts.batch.rows, inputs.forward_iter, accept_lens, prompts.new_seq_lens, columns=1)

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        del params, table_width
        device = apply_decode(device, inputs)
        seq_lens, _, fresh = resolve(device.future, inputs.rows, expected_iter=inputs.expected_iter)
        accept_lens = jnp.full_like(inputs.rows, accept_len)
        new_seq_lens = seq_lens + accept_lens
        output = leave(device, inputs.rows, inputs.forward_iter, accept_lens, new_seq_lens, columns=verify_width)
        return output._replace(outcome=output.outcome.at[:, 2].set(jnp.where(fresh | (inputs.rows == 0), 0, 1)))

    def commit(params, device: DeviceState, inputs, handoff, *, table_width: int) -> DeviceState:
        del params, table_width
        rows, new_seq_lens = handoff
        future = stash(device.future, rows, Carry(bonus=new_seq_lens), forward_iter=inputs.forward_iter)
        return dataclasses.replace(device, future=future)

    return SpecWorker(
        name="stub",
        verify_width=verify_width,
        output_stride=verify_width,
        alloc_len=verify_width,
        num_non_draft_tokens=1,
        fixed_accept=None,
        verify_kind=VerifyKind.CHAIN,
        capture_layers=(),
        params=(),
        init=init,
        extend_phase=extend_phase,
        extend_commit=commit,
        verify_phase=verify_phase,
        commit_phase=commit,
    )
