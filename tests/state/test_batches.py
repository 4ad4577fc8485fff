"""Modes, and what is remembered of a launch."""

import dataclasses

import jax
import pytest
from oracles import Run

from jspec.state import ForwardMode, Waiting, init_requests, record


def test_what_a_batch_may_carry():
    """TARGET_VERIFY writes several tokens a row and is no prefill; the modes inside a worker never reach the scheduler."""
    planned = {mode for mode in ForwardMode if mode.is_planned}
    assert planned == {ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE}
    assert {mode for mode in ForwardMode if mode.is_prefill} == {ForwardMode.EXTEND, ForwardMode.MIXED}


def test_a_launch_is_remembered_by_its_epochs():
    run = Run(max_running=2)
    for serial in (1, 2):
        run.submit(serial, 5)
    batch = run.plan()
    launched = record(batch)
    assert launched.rows is batch.rows and launched.epochs is batch.epochs
    assert (launched.forward_iter, launched.forward_mode) == (1, ForwardMode.EXTEND)
    assert jax.tree.structure(launched) == jax.tree.structure(run.state.launched[0])


def test_values_are_frozen():
    run = Run()
    run.submit(1, 5)
    for value in (run.state, run.state.ledger, run.state.requests, run.plan(), run.limits, run.state.launched[0]):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_a_state_is_a_pytree():
    """Everything but the queue is data; two states with equal queues have one structure, whatever their arrays hold."""
    run = Run()
    run.submit(1, 5)
    before = run.state
    again = jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(before))
    assert again.waiting == before.waiting and again.waiting[0] == Waiting(1, 5, 100, ())
    run.plan()
    assert jax.tree.structure(run.state) != jax.tree.structure(before)


def test_an_empty_request_table():
    table = init_requests(3)
    assert table.serial.tolist() == [0] * 4 and (table.stop_token_ids == -1).all() and not table.to_finish.any()
