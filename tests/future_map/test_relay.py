"""The relay: two writes and a read, row by row, with the generation that tells whose value it is."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.future_map import FutureMap, init_future_map, publish, resolve, stash

publish_now, stash_now, resolve_now = jax.jit(publish), jax.jit(stash), jax.jit(resolve)
"""Compiled, for speed; `test_jit_is_eager_and_traces_once` holds the two equal."""

R = 6
CARRY = {
    "bonus": jax.ShapeDtypeStruct((), jnp.int32),
    "hidden": jax.ShapeDtypeStruct((3,), jnp.float32),
    "ids": (jax.ShapeDtypeStruct((2, 2), jnp.int32),),
}


def empty():
    return init_future_map(R, CARRY)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def payload(*values):
    """A payload whose row `b` is recognised by `values[b]`."""
    v = np.asarray(values, np.int32)
    host = {
        "bonus": v,
        "hidden": (v[:, None] + np.array([0.25, 0.5, 0.75])).astype(np.float32),
        "ids": (v[:, None, None] * np.ones((1, 2, 2), np.int32),),
    }
    return jax.tree.map(jnp.asarray, host)


@jax.jit
def both(future, rows, lens, values, forward_iter):
    future = publish(future, rows, lens, forward_iter=forward_iter)
    return stash(future, rows, values, forward_iter=forward_iter)


def launch(future, rows, lens, values, forward_iter):
    """Both writes of one launch."""
    return both(future, rows, lens, payload(*values), forward_iter)


def each_row(tree, index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


def test_an_empty_relay():
    future = empty()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(future))
    assert future.carry["hidden"].shape == (R, 3) and future.carry["hidden"].dtype == jnp.float32
    assert future.carry["ids"][0].shape == (R, 2, 2) and future.new_seq_lens.dtype == jnp.int32
    assert init_future_map(R, ()).carry == ()


def test_what_is_written_is_read():
    future = launch(empty(), ints(4, 2), ints(21, 12), [7, 8], 1)
    got = resolve_now(future, ints(2, 4, 0), expected_iter=ints(1, 1, 0))
    assert got.seq_lens.tolist() == [12, 21, 0] and got.fresh.tolist() == [True, True, True]
    chex.assert_trees_all_equal(each_row(got.carry, [0, 1]), each_row(payload(8, 7), [0, 1]))
    assert got.carry["bonus"][2] == 0 and not got.carry["hidden"][2].any()
    untouched = [0, 1, 3, 5]
    chex.assert_trees_all_equal(each_row(future, untouched), each_row(empty(), untouched))


def test_a_prefill_publishes_its_prompt_and_a_verify_goes_on_from_there():
    future = launch(empty(), ints(3), ints(20), [1], 1)
    for forward_iter, accepted, frontier in ((2, 4, 24), (3, 1, 25), (4, 3, 28)):
        got = resolve_now(future, ints(3), expected_iter=ints(forward_iter - 1))
        assert got.fresh.tolist() == [True]
        future = launch(future, ints(3), got.seq_lens + accepted, [forward_iter], forward_iter)
        assert future.new_seq_lens.tolist() == [0, 0, 0, frontier, 0, 0]


@pytest.mark.parametrize("write", ["publish", "stash"])
def test_the_two_writes_do_not_mix(write):
    before = launch(empty(), ints(1, 2), ints(5, 6), [1, 2], 1)
    if write == "publish":
        after = publish_now(before, ints(2), ints(9), forward_iter=2)
        chex.assert_trees_all_equal((after.carry, after.stashed_iter), (before.carry, before.stashed_iter))
        assert after.new_seq_lens.tolist() == [0, 5, 9, 0, 0, 0] and after.published_iter.tolist() == [0, 1, 2, 0, 0, 0]
    else:
        after = stash_now(before, ints(2), payload(9), forward_iter=2)
        assert after.new_seq_lens.tolist() == [0, 5, 6, 0, 0, 0] and after.published_iter.tolist() == [0, 1, 1, 0, 0, 0]
        assert after.carry["bonus"].tolist() == [0, 1, 9, 0, 0, 0] and after.stashed_iter.tolist() == [0, 1, 2, 0, 0, 0]
    assert before.new_seq_lens.tolist() == [0, 5, 6, 0, 0, 0] and before.carry["bonus"].tolist() == [0, 1, 2, 0, 0, 0]
    # half a launch is not fresh: its second program has not run, or its first
    assert resolve_now(after, ints(1, 2), expected_iter=ints(1, 2)).fresh.tolist() == [True, False]
    assert resolve_now(after, ints(2), expected_iter=ints(1)).fresh.tolist() == [False]


# --- rows, padding, emptiness --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(0,), (0, 0, 0), (0, 3, 0), (3, 0, 5)])
def test_row_0_stays_zero(rows):
    future = launch(empty(), ints(*rows), ints(*[9] * len(rows)), [8] * len(rows), 7)
    chex.assert_trees_all_equal(each_row(future, 0), each_row(empty(), 0))
    wrote = [row for row in range(R) if np.asarray(future.published_iter)[row]]
    assert wrote == [row for row in rows if row]
    assert resolve_now(future, ints(*rows), expected_iter=ints(*[7 if row else 0 for row in rows])).fresh.all()


def test_no_rows_no_change():
    future = launch(empty(), ints(1, 2), ints(5, 6), [1, 2], 1)
    none = jnp.zeros(0, jnp.int32)
    after = publish_now(future, none, none, forward_iter=2)
    after = stash_now(after, none, payload(*np.zeros(0)), forward_iter=2)
    chex.assert_trees_all_equal(after, future)
    got = resolve_now(future, none, expected_iter=none)
    assert got.seq_lens.shape == got.fresh.shape == (0,) and got.carry["ids"][0].shape == (0, 2, 2)


@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_depend_on_their_place(seed):
    rng = np.random.default_rng(seed)
    future = launch(empty(), ints(1, 2, 3, 4), ints(5, 6, 7, 8), [1, 2, 3, 4], 1)
    rows, lens, values = np.array([2, 0, 5, 3]), np.array([20, 0, 50, 30]), np.array([12, 0, 15, 13])
    order = rng.permutation(4)
    one = launch(future, ints(*rows), ints(*lens), values, 2)
    other = launch(future, ints(*rows[order]), ints(*lens[order]), values[order], 2)
    chex.assert_trees_all_equal(one, other)
    straight = resolve_now(one, ints(*rows), expected_iter=ints(2, 0, 2, 2))
    mixed = resolve_now(one, ints(*rows[order]), expected_iter=ints(*np.array([2, 0, 2, 2])[order]))
    chex.assert_trees_all_equal(each_row(straight, order), each_row(mixed, np.arange(4)))
    fewer = launch(future, ints(2), ints(20), [12], 2)  # a neighbour does not matter
    chex.assert_trees_all_equal(each_row(fewer, 2), each_row(one, 2))


# --- generations ---------------------------------------------------------------------------------------------------


def test_what_nobody_published_is_not_fresh():
    future = launch(empty(), ints(1), ints(5), [1], 1)
    got = resolve_now(future, ints(1, 2, 0), expected_iter=ints(1, 1, 0))
    assert got.fresh.tolist() == [True, False, True]


def test_a_stale_generation_is_not_fresh():
    """The launch this row waits for was lost: what is there belongs to the launch before."""
    future = launch(launch(empty(), ints(1, 2), ints(5, 6), [1, 2], 1), ints(1), ints(9), [3], 2)
    assert resolve_now(future, ints(1, 2), expected_iter=ints(2, 2)).fresh.tolist() == [True, False]
    assert resolve_now(future, ints(1, 2), expected_iter=ints(1, 1)).fresh.tolist() == [False, True]


def test_a_row_is_reused():
    """The dead owner's launch, under way when the row was freed, writes before the new owner's prefill: the new owner reads its own."""
    future = launch(empty(), ints(3), ints(20), [1], 1)
    future = launch(future, ints(3), ints(24), [2], 2)  # the dead owner's last launch
    assert not resolve_now(future, ints(3), expected_iter=ints(3)).fresh[0]
    future = launch(future, ints(3), ints(7), [4], 3)  # the new owner's prefill
    got = resolve_now(future, ints(3), expected_iter=ints(3))
    assert got.fresh.tolist() == [True] and got.seq_lens.tolist() == [7] and got.carry["bonus"].tolist() == [4]


def test_a_late_write_to_a_reused_row_is_found_out():
    """Were the dead owner's launch to write last, the new owner would notice."""
    future = launch(empty(), ints(3), ints(7), [4], 3)
    future = launch(future, ints(3), ints(24), [2], 2)
    assert resolve_now(future, ints(3), expected_iter=ints(3)).fresh.tolist() == [False]


# --- types ---------------------------------------------------------------------------------------------------------


WRONG = {
    "a leaf less": lambda p: {"bonus": p["bonus"], "hidden": p["hidden"]},
    "a leaf more": lambda p: {**p, "extra": p["bonus"]},
    "another container": lambda p: {**p, "ids": [p["ids"][0]]},
    "nothing": lambda p: (),
    "another row shape": lambda p: {**p, "hidden": p["hidden"][:, :2]},
    "another rank": lambda p: {**p, "bonus": p["bonus"][:, None]},
    "another dtype": lambda p: {**p, "hidden": p["hidden"].astype(jnp.bfloat16)},
    "floats for ints": lambda p: {**p, "bonus": p["bonus"].astype(jnp.float32)},
    "one row for all": lambda p: jax.tree.map(lambda leaf: leaf[:1], p),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_a_payload_of_another_type_is_refused(name, traced):
    write = functools.partial(jax.jit(stash) if traced else stash, forward_iter=1)
    with pytest.raises(ValueError, match="payload"):
        write(empty(), ints(1, 2, 3), WRONG[name](payload(1, 2, 3)))


@pytest.mark.parametrize("count", [2, 4])
def test_a_payload_of_other_rows_is_refused(count):
    with pytest.raises(ValueError):
        stash(empty(), ints(1, 2, 3), payload(*range(count)), forward_iter=1)


# --- purity --------------------------------------------------------------------------------------------------------


def program(future, rows, lens, values, forward_iter, expected_iter):
    got = resolve(future, rows, expected_iter=expected_iter)
    future = publish(future, rows, got.seq_lens + lens, forward_iter=forward_iter)
    return stash(future, rows, values, forward_iter=forward_iter), got


def test_jit_is_eager_and_traces_once():
    chex.clear_trace_counter()
    jitted = jax.jit(chex.assert_max_traces(program, n=1))
    eager = compiled = launch(empty(), ints(1, 2, 3), ints(5, 6, 7), [1, 2, 3], 1)
    for forward_iter, rows in enumerate(([1, 3, 0], [2, 3, 1], [0, 0, 0], [1, 0, 0]), 2):
        before = jax.tree.map(np.array, compiled)
        expected = compiled.published_iter[ints(*rows)]
        arguments = (ints(*rows), ints(1, 2, 3), payload(4, 5, 6), jnp.int32(forward_iter), expected)
        old = compiled
        compiled, told = jitted(compiled, *arguments)
        eager, said = program(eager, *arguments)
        chex.assert_trees_all_equal((compiled, told), (eager, said))
        chex.assert_trees_all_equal_shapes_and_dtypes(compiled, empty())  # a fixed point
        chex.assert_trees_all_equal(jax.tree.map(np.array, old), before)  # and the input is what it was
        assert isinstance(compiled, FutureMap) and told.fresh.all()


def test_numpy_rows_will_do():
    rows = np.array([2, 0], np.int32)
    rows.setflags(write=False)
    one = publish(empty(), rows, rows + 5, forward_iter=np.int32(3))
    chex.assert_trees_all_equal(one, publish(empty(), ints(2, 0), ints(7, 5), forward_iter=3))


def test_scan_carries_the_relay():
    """Eight launches in one program leave what eight calls leave."""
    rows = np.array([1, 4, 0], np.int32)
    start = launch(empty(), ints(1, 4, 0), ints(5, 6, 0), [1, 2, 0], 1)

    def step(future, forward_iter):
        expected = jnp.where(rows > 0, forward_iter - 1, 0)
        future, got = program(future, rows, ints(2, 1, 3), payload(7, 8, 9), forward_iter, expected)
        return future, got.fresh

    together, fresh = jax.jit(lambda f: jax.lax.scan(step, f, jnp.arange(2, 10, dtype=jnp.int32)))(start)
    one = start
    for forward_iter in range(2, 10):
        one, _ = step(one, jnp.int32(forward_iter))
    chex.assert_trees_all_equal(together, one)
    assert fresh.all() and together.new_seq_lens.tolist() == [0, 21, 0, 0, 14, 0]
