"""One transition, four ways: on NumPy arrays in the engine; under `jit`, `vmap` and `lax.scan` on JAX arrays. Values, shapes and dtypes are equal.

The states come from random schedules, and all NumPy inputs are frozen: a transition that wrote into one would raise.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import NOT_FINITE, Run, freeze

from jspec.scheduler import evict, launchable, pages_short, prepare_extend, release, reserve, settle, share_prefix
from jspec.state import ForwardMode, GenerationBatchResult, KVLedger, Launched, RequestTable
from jspec.state.dense import replace
from jspec.state.requests import is_filling
from jspec.state.results import NEVER

R, STRIDE = 7, 4  # rows of the table, tokens of a run
I32 = np.int32


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def stack(a, b):
    return jax.tree.map(lambda x, y: np.stack([x, y]), a, b)


@dataclasses.dataclass
class Moment:
    """A state in the middle of a random schedule, and what a launch of it brings; launches are padded with row 0."""

    requests: object
    ledger: object
    launched: tuple
    result: GenerationBatchResult

    @classmethod
    def of(cls, seed):
        rng = np.random.default_rng(seed)
        run = Run(
            max_running=R - 1, page_size=4, num_pages=60, context_len=120, max_prefill_rows=2, max_prefill_tokens=12,
            depth=1, mixed=True,
        )  # fmt: skip
        serial, runs = 0, []

        def interesting(state):
            if len(state.launched) < 2 or not (state.requests.serial[1:] == 0).any():
                return False
            emits, commits = (
                np.concatenate([getattr(x, name) for x in state.launched]) for name in ("emits", "commits")
            )
            mixed = len(state.launched[0].rows) > 2 and commits.any() and not commits.all() and not emits.all()
            shared = (state.ledger.cache_protected_len > 4).any() and (state.ledger.page_locks > 1).any()
            return mixed and shared and (state.requests.to_finish.any() or run.results[0].status.any())

        while len(runs) < 25 or not interesting(run.state):
            if len(run.state.waiting) < 2 and rng.random() < 0.5:
                serial += 1
                prompt = [*range(int(rng.integers(0, 13))), *[serial] * int(rng.integers(1, 12))]
                run.submit(serial, prompt, int(rng.integers(1, 12)), ((), (3,), (3, 4))[serial % 3])
            if serial and rng.random() < 0.1:
                run.abort(int(rng.integers(1, serial + 1)))
            batch = run.plan() if len(run.results) <= 1 else None
            if batch is None:
                if run.results:
                    run.settle()
                continue
            decode, num_tails = (
                batch.forward_mode is ForwardMode.DECODE,
                0 if batch.tails is None else len(batch.tails.rows),
            )
            lens = [0 if goes_on else 1 for goes_on in batch.goes_on.tolist()] + [1] * num_tails
            runs.append([rng.integers(0, 6, rng.integers(1, STRIDE + 1) if decode else n).tolist() for n in lens])
            if decode and rng.random() < 0.1:
                runs[-1][0] = NOT_FINITE
            run.launch(batch, runs[-1])
        state, result = run.state, run.results[0]
        launched = tuple(
            dataclasses.replace(
                jax.tree.map(lambda x: pad(x) if np.ndim(x) else x, item), forward_mode=ForwardMode.DECODE
            )
            for item in state.launched
        )
        ledger, _ = evict(state.ledger, state.prefix_cache, R * 60)  # what no row reads
        return cls(freeze(state.requests), freeze(ledger), freeze(launched), freeze(jax.tree.map(pad, result)))

    def prepare(self):
        """Rows without an owner, one padding row between them, and prompt lengths."""
        free = np.nonzero(self.requests.serial == 0)[0][1:]
        rows = np.insert(np.resize(free if len(free) else [0], 2) * (np.arange(2) < len(free)), 1, 0).astype(I32)
        return self.ledger, rows, np.where(rows > 0, [8, 0, 3], 0).astype(I32)

    def prepare_more(self):
        """The first of these rows goes on from its page's end, the last one begins."""
        ledger, rows, end_lens = self.prepare()
        first = np.where(np.arange(3) == 0, rows, 0)
        ledger, _ = prepare_extend(ledger, first, np.where(first > 0, end_lens, 0))
        return ledger, rows, np.where(rows > 0, [14, 0, 3], 0).astype(I32)

    def share(self):
        """The same rows begin with what the cache holds of the row that has most of it: one with all, the other with a page."""
        ledger, rows, _ = self.prepare()
        row = int(np.argmax(ledger.cache_protected_len))
        pages = np.zeros((3, ledger.page_table.shape[1]), I32)
        for i, count in ((0, int(ledger.cache_protected_len[row]) // ledger.page_size), (2, 1)):
            pages[i, :count] = ledger.page_table[row, :count] * (rows[i] > 0)
        return ledger, rows, pages


def pad(array):
    return np.concatenate([array, np.zeros((R - array.shape[0], *array.shape[1:]), array.dtype)])


@functools.cache
def moments():
    return Moment.of(0), Moment.of(1)


def ended(moment):
    """Rows to release, padded: those that this launch ends, and the longest one."""
    rows = np.zeros(4, I32)
    rows[[1, 3]] = np.argsort(moment.ledger.kv_allocated_len)[-2:]
    return rows


CASES = {
    "reserve": (
        lambda ledger, active: reserve(ledger, active, alloc_len=20, depth=2),
        lambda m: (m.ledger, m.requests.serial > 0),
    ),
    "pages_short": (
        lambda ledger, active: pages_short(ledger, active, reserve_len=60),
        lambda m: (m.ledger, (m.requests.serial > 0) & (np.arange(R) % 3 > 0)),
    ),
    "share_prefix": (share_prefix, Moment.share),
    "prepare_extend": (prepare_extend, Moment.prepare),
    "prepare_extend, further": (prepare_extend, Moment.prepare_more),
    "settle": (settle, lambda m: (m.requests, m.ledger, m.launched[0], m.result)),
    "release": (release, lambda m: (m.requests, m.ledger, ended(m))),
    "launchable": (launchable, lambda m: (m.requests, m.ledger, m.launched)),
}
"""By name: a transition, and its arguments at a moment."""


def assert_same(actual, expected):
    """Values, shapes and dtypes."""
    chex.assert_trees_all_equal(actual, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)


@pytest.fixture(params=list(CASES))
def case(request):
    chex.clear_trace_counter()
    transition, arguments = CASES[request.param]
    first, second = moments()
    return transition, freeze(arguments(first)), freeze(arguments(second))


def test_jit_is_numpy_and_traces_once(case):
    transition, first, second = case
    jitted = jax.jit(chex.assert_max_traces(transition, n=1))
    for arguments in (first, second, first):
        assert_same(jitted(*arguments), transition(*arguments))
    assert_same(jitted(*on_device(first)), transition(*first))  # JAX arrays, where NumPy arrays went in before


def test_vmap_is_numpy(case):
    transition, first, second = case
    together = jax.jit(jax.vmap(transition))(*stack(first, second))
    assert_same(together, stack(transition(*first), transition(*second)))


def test_inputs_are_left_alone(case):
    transition, first, _ = case
    copy = jax.tree.map(np.array, first)
    transition(*first)
    chex.assert_trees_all_equal(first, copy)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("launchable", "pages_short")])
def test_state_is_a_fixed_point(name):
    """What a transition returns in place of a state has the state's structure, shapes and dtypes, whatever it runs on."""
    transition, arguments = CASES[name]
    arguments = freeze(arguments(moments()[0]))
    states = tuple(x for x in arguments if isinstance(x, (RequestTable, KVLedger)))
    for after in (transition(*arguments), jax.eval_shape(transition, *arguments)):
        after = after if isinstance(after, tuple) else (after,)
        chex.assert_trees_all_equal_shapes_and_dtypes(after[: len(states)], states)


def test_the_moments_have_something_of_everything():
    """Else the comparisons above would compare nothing."""
    for moment in moments():
        _, _, settled = settle(moment.requests, moment.ledger, moment.launched[0], moment.result)
        assert settled.live.sum() > 1 and (settled.finish_reason > 0).any()
        ledger, rows, _ = moment.prepare()
        assert rows.any()
        assert ledger.num_free < pages_short(ledger, moment.requests.serial > 0, reserve_len=60)
        assert (share_prefix(*moment.share()).page_locks > ledger.page_locks).any() and ledger.page_locks.max() > 1
        assert prepare_extend(*moment.prepare_more())[0].num_free < prepare_extend(*moment.prepare())[0].num_free
        assert ledger.cache_protected_len[ended(moment)].any()  # a release unlocks something
        each = [
            np.concatenate([getattr(x, name)[x.rows > 0] for x in moment.launched]) for name in ("emits", "commits")
        ]
        assert all(flags.any() and not flags.all() for flags in each)
        granted = reserve(ledger, moment.requests.serial > 0, alloc_len=20, depth=2)[1].granted
        assert 0 < granted.sum() < (moment.requests.serial > 0).sum()
        assert moment.requests.to_finish.any() or moment.result.status.any()
        assert is_filling(moment.requests, ledger.kv_committed_len).any()


# --- the fold, in one program ----------------------------------------------------------------------------------------


def iteration(carry, step):
    """An overlapped iteration: reserve and launch, settle the launch before, release, admit, or prefill what is left of a prompt."""
    requests, ledger, pending = carry
    result, prompt_lens, max_new_tokens = step
    active = launchable(requests, ledger, (pending,))
    ledger, reserved = reserve(ledger, active, alloc_len=STRIDE, depth=1)
    index = jnp.arange(R, dtype=jnp.int32) if isinstance(requests.serial, jax.Array) else np.arange(R, dtype=I32)
    rows = index * reserved.granted
    launched = replace(pending, forward_iter=pending.forward_iter + I32(1), rows=rows, epochs=requests.epoch)
    requests, ledger, settled = settle(requests, ledger, pending, result)
    requests, ledger = release(requests, ledger, pending.rows * (settled.finish_reason > 0))
    taken = (requests.serial == 0) & (index > 0)
    rows = index * (taken | is_filling(requests, ledger.kv_committed_len))
    ledger, _ = prepare_extend(ledger, rows, (prompt_lens * taken + requests.fill_len) * (rows > 0))
    requests = dataclasses.replace(
        requests,
        serial=requests.serial + taken * (launched.forward_iter * R + index),
        prompt_len=requests.prompt_len + prompt_lens * taken,
        fill_len=requests.fill_len + prompt_lens * taken,
        max_new_tokens=requests.max_new_tokens + max_new_tokens * taken,
    )
    return (requests, ledger, launched), (settled, reserved, ledger.num_free)


def test_scan_of_two_schedulers_is_a_numpy_loop_of_each():
    """60 iterations of both moments in one program, rows released and taken again all the time."""
    rng = np.random.default_rng(5)
    steps, starts, folds, says = 60, [], [], []
    zeros, ones = np.zeros(R, I32), np.ones(R, bool)
    idle = Launched(
        forward_iter=I32(0), rows=zeros, epochs=zeros, emits=ones, commits=ones, end_lens=zeros,
        forward_mode=ForwardMode.DECODE,
    )  # fmt: skip
    results = GenerationBatchResult(
        next_token_ids=rng.integers(0, 12, (steps, R, STRIDE)).astype(I32),
        accept_lens=rng.integers(1, STRIDE + 1, (steps, R)).astype(I32),
        new_seq_lens=np.zeros((steps, R), I32),
        status=(rng.random((steps, R)) < 0.02).astype(I32) * 2,
        stop_at=np.where(rng.random((steps, R)) < 0.1, rng.integers(1, STRIDE + 1, (steps, R)), NEVER).astype(I32),
    )
    xs = (results, rng.integers(1, 10, (steps, R)).astype(I32), rng.integers(2, 9, (steps, R)).astype(I32))
    for moment in moments():
        carry, said = (moment.requests, moment.ledger, idle), []
        starts.append(carry)
        for i in range(steps):
            carry, info = iteration(freeze(carry), freeze(jax.tree.map(lambda x, i=i: x[i], xs)))
            said.append(info)
            assert info[2] >= 0
        folds.append(carry)
        says.append(jax.tree.map(lambda *x: np.stack(x), *said))
        assert carry[0].epoch[1:].min() > 3  # rows did turn over

    chex.clear_trace_counter()
    fold = jax.jit(chex.assert_max_traces(lambda carry: jax.lax.scan(iteration, carry, on_device(xs)), n=1))
    device, told = jax.vmap(fold)(stack(*starts))
    assert_same(device, stack(*folds))
    chex.assert_trees_all_equal(told, stack(*says))
