"""Modes, and what is remembered of a launch."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from oracles import Run

from jspec.state import ForwardMode, Waiting, init_requests, record
from jspec.state.requests import has_started, is_filling


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
    assert launched.rows.tolist() == batch.rows.tolist() == [1, 2]
    assert launched.epochs.tolist() == batch.epochs.tolist() == [0, 0]
    assert (launched.forward_iter, launched.forward_mode) == (1, ForwardMode.EXTEND)
    assert (launched.emits.tolist(), launched.commits.tolist()) == ([True, True], [False, False])
    assert launched.end_lens.tolist() == [5, 5]
    chex.assert_trees_all_equal(launched, run.state.launched[0])
    assert jax.tree.structure(launched) == jax.tree.structure(run.state.launched[0])
    run.launch(batch, [[0], [0]])
    batch = run.plan()
    launched = record(batch)
    assert launched.rows is batch.rows and launched.epochs is batch.epochs
    assert (launched.forward_iter, launched.forward_mode) == (2, ForwardMode.DECODE)
    assert launched.emits.all() and launched.commits.all() and launched.end_lens.tolist() == [0, 0]
    chex.assert_trees_all_equal(launched, run.state.launched[1])


def test_a_mixed_launch_is_remembered_as_its_prompts_then_its_tails():
    """A chunk emits nothing, a prompt's KV is committed already, that of a tail is as it settles."""
    run = Run(max_running=4, page_size=4, mixed=True, max_prefill_tokens=12)
    run.submit(1, 5, 1)
    run.submit(2, 5)
    run.step([[0], [0]])
    run.settle()  # row 1 is free, and its epoch 1
    run.submit(3, 3)
    run.submit(4, 20)
    batch = run.plan()
    launched = record(batch)
    assert launched.forward_mode is ForwardMode.MIXED and launched.forward_iter == 2
    assert (launched.rows.tolist(), launched.epochs.tolist()) == ([1, 3, 2], [1, 0, 0])
    assert launched.emits.tolist() == [True, False, True] and launched.commits.tolist() == [False, False, True]
    assert launched.end_lens.tolist() == [3, 8, 0]
    chex.assert_trees_all_equal(launched, run.state.launched[0])
    run.launch(batch, [[0], [], [0]])
    assert record(run.plan()).end_lens.tolist() == [20, 0, 0]


@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_remembered_has_one_type(mixed):
    """Whatever the mode: settle is traced with it."""
    run = Run(max_running=3, page_size=4, mixed=mixed, max_prefill_tokens=8)
    run.submit(1, 5)
    run.submit(2, 12)
    for runs in ([[0]], [[], [0]] if mixed else [[]], [[0], [0]] if mixed else [[0]], [[0], [0]]):
        batch = run.plan()
        launched = record(batch)
        rows = len(runs)
        for name, dtype in dict(rows=np.int32, epochs=np.int32, emits=bool, commits=bool, end_lens=np.int32).items():
            assert getattr(launched, name).dtype == dtype and getattr(launched, name).shape == (rows,), name
        for part in (batch, batch.tails) if batch.tails is not None else (batch,):
            assert part.goes_on.dtype == bool and part.goes_on.shape == part.rows.shape
        run.launch(batch, runs)
        if len(run.results) > 1:
            run.settle()


def test_values_are_frozen():
    run = Run()
    run.submit(1, 5)
    for value in (run.state, run.state.ledger, run.state.requests, run.plan(), run.limits, run.state.launched[0]):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_a_state_is_a_pytree():
    """Everything but the queue, who was admitted, and the names of cached pages is data: two states that agree in these have one structure, whatever their
    arrays hold."""
    run = Run()
    run.submit(1, 5)
    before = run.state
    again = jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(before))
    assert again.waiting == before.waiting and again.waiting[0] == Waiting(1, 5, 100, ())
    assert again.admitted == before.admitted and again.prefix_cache.pages == before.prefix_cache.pages
    run.plan()
    assert jax.tree.structure(run.state) != jax.tree.structure(before)


def test_a_state_with_other_names_in_its_cache_has_another_structure():
    run = Run(page_size=4)
    run.submit(1, range(5))
    run.step([[0]])
    before = run.state
    run.settle()
    cache = run.state.prefix_cache
    assert tuple(cache.pages) == run.keys(range(5))
    assert jax.tree.structure(cache) != jax.tree.structure(before.prefix_cache)
    assert jax.tree.structure(run.state.ledger) == jax.tree.structure(before.ledger)


def test_an_empty_request_table():
    table = init_requests(3)
    assert table.serial.tolist() == [0] * 4 and (table.stop_token_ids == -1).all() and not table.to_finish.any()
    others = (table.epoch, table.prompt_len, table.output_len, table.fill_len, table.priority, table.max_new_tokens)
    assert all(column.tolist() == [0] * 4 for column in (*others, table.last_launch))
    assert len({id(leaf) for leaf in jax.tree.leaves(table)}) == len(dataclasses.fields(table))  # no column is another


def test_stages_of_a_request():
    """A prompt goes in chunks, then its prefill is under way, then its first token is known: each row is in one stage."""
    run = Run(max_running=2, page_size=4, max_prefill_tokens=8, depth=0)
    run.submit(1, 12)
    stages = []
    for runs in ([[]], [[0]], [[0]]):
        run.launch(run.plan(), runs)
        table, committed = run.state.requests, run.state.ledger.kv_committed_len
        stages.append((is_filling(table, committed).tolist(), has_started(table).tolist()))
        run.settle()
    no, yes = [False] * 3, [False, True, False]
    assert stages == [(yes, no), (no, no), (no, yes)]


def test_a_waiting_request():
    """Retracted, it comes back with its output: its prefill covers that as well."""
    assert Waiting(1, 5, 9, ()).fill_len == 5 and Waiting(1, 5, 9, (), output_len=3).fill_len == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        Waiting(1, 5, 9, ()).output_len = 3
