"""Pages that outlive their request: found by prefix, kept once, given up from the end of what nobody has used for longest."""

import dataclasses

import numpy as np
import pytest
from oracles import Run, freeze

from jspec.scheduler import cache_prefix, evict, evictable, leave, match_prefix, touch
from jspec.state import FinishReason
from jspec.state.invariants import check

PAGE = 4


def a_run(**settings):
    """Pages of 4 tokens, 60 of them; each step is settled at once."""
    return Run(**{"page_size": PAGE, "num_pages": 60, "max_running": 4, "depth": 0, **settings})


def serve(run, serial, tokens):
    """A request of one token, from its beginning to its end: its pages are the cache's afterwards. The run's other requests move on by a token."""
    run.submit(serial, tokens, 1)
    batch = run.plan()
    assert batch.serials.tolist() == [serial]
    run.launch(batch, [[0]])
    run.settle()


def prefill(run, *requests):
    """Requests, each `(serial, tokens)`, that go into one batch and go on afterwards."""
    for serial, tokens in requests:
        run.submit(serial, tokens, 50)
    batch = run.plan()
    assert batch.serials.tolist() == [serial for serial, _ in requests]
    run.launch(batch, [[0]] * len(requests))
    run.settle()


def pages_of(run, tokens):
    """The cached pages of a sequence."""
    return [run.state.prefix_cache.pages[key] for key in run.keys(tokens)]


def with_cache(run, ledger, cache):
    """The run's state with these parts, checked and frozen."""
    run.state = dataclasses.replace(run.state, ledger=ledger, prefix_cache=cache)
    check(run.state, limits=run.limits)
    return freeze(run.state)


def free(run):
    ledger = run.state.ledger
    return sorted(ledger.free_pages[: ledger.num_free].tolist())


# --- found --------------------------------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_is_found():
    """As far as the tokens are equal, page by page, and no further than asked for."""
    run = a_run()
    serve(run, 1, range(20))
    serve(run, 2, [*range(12), *[90] * 8])
    trunk, branch = pages_of(run, range(20)), pages_of(run, [*range(12), *[90] * 8])
    assert len(trunk) == len(branch) == 5 and trunk[:3] == branch[:3] and not set(trunk[3:]) & set(branch[3:])
    cache = run.state.prefix_cache
    for tokens, found in (
        (range(20), trunk),
        (range(23), trunk),
        (range(13), trunk[:3]),
        ([*range(12), *[90] * 8, 1, 2, 3, 4], branch),
        ([*range(16), *[90] * 8], trunk[:4]),
        ([1, *range(1, 20)], []),
        (range(3), []),
        ([], []),
    ):
        keys = run.keys(tokens)
        for most in range(len(keys) + 2):
            assert match_prefix(cache, keys, most=most) == found[:most]


def test_a_prefix_ends_at_the_first_page_that_is_missing():
    """What is cached of it behind that page is of no use."""
    run = a_run()
    serve(run, 1, range(20))
    keys = run.keys(range(20))
    assert match_prefix(run.state.prefix_cache, (*keys[:2], b"?" * 16, *keys[3:]), most=9) == pages_of(run, range(8))
    assert match_prefix(run.state.prefix_cache, (b"?" * 16, *keys[1:]), most=9) == []


# --- used ----------------------------------------------------------------------------------------------------------------------


def test_a_touched_prefix_was_used_now():
    """All its pages, and no other; a page is used no later than the one before it."""
    run = a_run()
    serve(run, 1, range(20))
    serve(run, 2, [90] * 8)
    before = run.state.prefix_cache
    pages = pages_of(run, range(8))
    after = touch(before, np.array(pages))
    assert after.clock == before.clock + 1 == 3 and after.clock.dtype == np.int32
    used = before.last_used.copy()
    used[pages] = after.clock
    assert after.last_used.tolist() == used.tolist()
    assert after.pages is before.pages and after.keys is before.keys and after.depth is before.depth
    with_cache(run, run.state.ledger, after)


def test_who_starts_from_a_prefix_uses_it():
    """And who goes on beyond it, or ends, uses what it then has; those that nobody asks for grow old."""
    run = a_run()
    serve(run, 1, range(12))
    serve(run, 2, [90] * 12)
    trunk, other = pages_of(run, range(12)), pages_of(run, [90] * 12)
    assert run.state.prefix_cache.last_used[trunk].tolist() == [1, 1, 1]
    prefill(run, (3, [*range(8), *[70] * 5]))
    mine = pages_of(run, [*range(8), *[70] * 5])
    # It found two pages (3), and left three when its prefill was settled (4).
    assert run.state.prefix_cache.last_used[trunk].tolist() == [4, 4, 1] and mine[:2] == trunk[:2]
    assert run.state.prefix_cache.last_used[mine].tolist() == [4, 4, 4]
    assert run.state.prefix_cache.last_used[other].tolist() == [2, 2, 2]


# --- kept: a running row ---------------------------------------------------------------------------------------------------------


def test_a_running_row_hands_over_its_first_pages():
    """They stay where they are, in the row and now in the cache, locked by the row; nothing becomes free."""
    run = a_run()
    run.submit(1, range(14), 9)
    run.launch(run.plan(), [[0]])
    before, keys = run.state, run.keys(range(14))
    ledger, cache = cache_prefix(before.ledger, before.prefix_cache, 1, keys[:2], running=True)
    table = before.ledger.page_table[1]
    assert ledger.cache_protected_len.tolist() == [0, 8, 0, 0, 0] and before.ledger.cache_protected_len[1] == 0
    assert (ledger.page_table == before.ledger.page_table).all() and ledger.num_free == before.ledger.num_free
    assert dict(cache.pages) == {keys[0]: table[0], keys[1]: table[1]}
    assert dict(cache.keys) == {table[0]: keys[0], table[1]: keys[1]}
    assert cache.depth[table[:4]].tolist() == [1, 2, 0, 0] and cache.depth.sum() == 3
    assert ledger.page_locks[table[:4]].tolist() == [1, 1, 0, 0] and ledger.page_locks.sum() == 2
    assert all(isinstance(page, int) for page in cache.keys)
    # The rest later, as of a prompt in chunks.
    state = with_cache(run, ledger, cache)
    ledger, cache = cache_prefix(state.ledger, state.prefix_cache, 1, keys, running=True)
    assert ledger.cache_protected_len[1] == 12 and cache.depth[table[:4]].tolist() == [1, 2, 3, 0]
    assert ledger.page_locks[table[:4]].tolist() == [1, 1, 1, 0] and cache.clock == 2
    assert cache.last_used[table[:4]].tolist() == [2, 2, 2, 0]
    with_cache(run, ledger, cache)


def test_nothing_new_is_only_a_use():
    """Keys that the row has handed over already; no keys at all change nothing."""
    run = a_run()
    serve(run, 1, range(12))
    prefill(run, (2, range(13)))
    before = run.state
    assert before.ledger.cache_protected_len[1] == 12
    for running in (True, False):
        for count in (1, 2, 3):
            keys = run.keys(range(12))[:count]
            ledger, cache = cache_prefix(before.ledger, before.prefix_cache, 1, keys, running=running)
            assert ledger is before.ledger and cache.clock == before.prefix_cache.clock + 1
            used = before.prefix_cache.last_used.copy()
            used[pages_of(run, range(4 * count))] = cache.clock
            assert cache.last_used.tolist() == used.tolist() and cache.pages is before.prefix_cache.pages
        found = cache_prefix(before.ledger, before.prefix_cache, 1, (), running=running)
        assert found[0] is before.ledger and found[1] is before.prefix_cache


def twice(own=5):
    """Requests 1 and 2 have two pages in common, and computed them at the same time: request 1's are cached. Request 2 has two pages more."""
    run = a_run()
    prefill(run, (1, [*range(8), *[91] * own]), (2, [*range(8), *[92] * own]))
    return run


def test_a_running_row_keeps_its_double():
    """Its page table on the device is not told of the cache's page, so the page it has, and all behind it, stay its own."""
    run = twice()
    ledger, cache = run.state.ledger, run.state.prefix_cache
    assert ledger.cache_protected_len.tolist() == [0, 12, 0, 0, 0]
    assert set(cache.pages) == set(run.keys([*range(8), *[91] * 4])) and len(cache.pages) == 3
    assert pages_of(run, range(8)) == ledger.page_table[1, :2].tolist()
    assert not set(ledger.page_table[2, :4].tolist()) & set(cache.keys)
    assert ledger.page_locks.sum() == 3
    for _ in range(3):
        run.step([[0] * 4, [0] * 4])  # it finds its own KV on and on
    assert run.state.ledger.cache_protected_len.tolist() == [0, 12, 0, 0, 0]


def test_a_running_row_shares_what_is_before_a_double():
    """Rows 1 and 2 begin with two cached pages, and compute the third one twice: row 1 hands it over, row 2 reads the first two as before."""
    run = a_run()
    serve(run, 1, range(8))
    prefill(run, (2, [*range(12), 91]), (3, [*range(12), 92]))
    ledger, cache = run.state.ledger, run.state.prefix_cache
    assert ledger.cache_protected_len.tolist() == [0, 12, 8, 0, 0]
    assert pages_of(run, range(12)) == ledger.page_table[1, :3].tolist()
    assert (ledger.page_table[1, :2] == ledger.page_table[2, :2]).all() and ledger.page_table[2, 2] not in cache.keys
    assert ledger.page_locks[ledger.page_table[1, :3]].tolist() == [2, 2, 1]
    again, touched = cache_prefix(ledger, cache, 2, run.keys(range(12)), running=True)
    assert again is ledger and touched.clock == cache.clock + 1 and touched.pages is cache.pages
    used = cache.last_used.copy()
    used[pages_of(run, range(8))] = touched.clock
    assert touched.last_used.tolist() == used.tolist()


# --- kept: a row that ended ----------------------------------------------------------------------------------------------------------


def test_a_row_that_ended_gives_up_its_doubles():
    """Its first two pages are free again, each once; the two behind them are cached, as pages 3 and 4 of a prefix that begins with request 1's."""
    run = twice(own=9)
    before = run.state
    table = before.ledger.page_table[2].copy()
    trunk, tokens = before.ledger.page_table[1, :2].tolist(), [*range(8), *[92] * 9]
    keys = run.keys(tokens)
    assert len(keys) == 4
    ledger, cache = cache_prefix(before.ledger, before.prefix_cache, 2, keys, running=False)
    assert ledger.num_free == before.ledger.num_free + 2
    assert sorted(ledger.free_pages[before.ledger.num_free : ledger.num_free].tolist()) == sorted(table[:2].tolist())
    assert ledger.page_table[2, :5].tolist() == [*trunk, *table[2:5].tolist()]
    assert [cache.pages[key] for key in keys] == [*trunk, *table[2:4].tolist()]
    assert cache.depth[table[:5]].tolist() == [0, 0, 3, 4, 0] and cache.depth[trunk].tolist() == [1, 2]
    assert ledger.page_locks[trunk].tolist() == [2, 2] and ledger.page_locks[table[:5]].tolist() == [0, 0, 1, 1, 0]
    assert ledger.cache_protected_len[2] == 16 and (cache.last_used[ledger.page_table[2, :4]] == cache.clock).all()
    with_cache(run, ledger, cache)


def test_the_end_of_a_row_that_held_doubles():
    """Through a whole run: afterwards each page is cached once or free, and a third request finds the longer prefix."""
    run = twice(own=9)
    run.abort(2)
    run.step([[0], [0]])
    assert run.state.requests.serial.tolist() == [0, 1, 0, 0, 0]
    tokens = [*range(8), *[92] * 9]
    assert match_prefix(run.state.prefix_cache, run.keys(tokens), most=9) == pages_of(run, tokens)
    held = 60 - run.state.ledger.num_free - len(run.state.prefix_cache.pages)
    assert held == 1 + 1  # what request 1 has beside its cached pages: its prompt's last token, and its reserve
    prefill(run, (3, tokens))
    assert run.state.ledger.page_table[2, :4].tolist() == pages_of(run, tokens)


def test_a_double_of_which_the_cache_lost_its_page_is_new_again():
    """Request 1 ended and its pages were given up before request 2 ends: request 2's own are kept."""
    run = twice()
    run.abort(1)
    run.step([[0], [0]])
    ledger, cache = evict(run.state.ledger, run.state.prefix_cache, 99)
    assert not cache.pages
    with_cache(run, ledger, cache)
    own = run.state.ledger.page_table[2, :3].tolist()
    run.abort(2)
    run.step([[0]])
    assert pages_of(run, [*range(8), *[92] * 4]) == own


def test_all_of_it_doubled():
    """A row of which every page is another's: all are free again, and the cache is as it was but for its use."""
    run = a_run()
    prefill(run, (1, range(13)), (2, range(13)))
    before = run.state
    keys = run.keys(range(13))
    ledger, cache = cache_prefix(before.ledger, before.prefix_cache, 2, keys, running=False)
    assert ledger.num_free == before.ledger.num_free + 3
    assert cache.pages == before.prefix_cache.pages and (cache.depth == before.prefix_cache.depth).all()
    assert ledger.page_table[2, :3].tolist() == before.ledger.page_table[1, :3].tolist()
    assert ledger.page_locks[ledger.page_table[1, :3]].tolist() == [2, 2, 2]
    with_cache(run, ledger, cache)


# --- given up ---------------------------------------------------------------------------------------------------------------------


def test_what_can_be_given_up():
    """Cached pages that no row reads: not those of a request that runs, not free ones, not a request's own."""
    run = a_run()
    serve(run, 1, range(12))
    prefill(run, (2, [*range(8), *[70] * 5]))
    ledger, cache = run.state.ledger, run.state.prefix_cache
    found = evictable(ledger, cache)
    assert found.dtype == bool and found.shape == (61,)
    assert np.nonzero(found)[0].tolist() == pages_of(run, range(12))[2:]
    state, _ = leave(run.state, 1, FinishReason.NONE)
    assert set(np.nonzero(evictable(state.ledger, state.prefix_cache))[0]) == set(cache.keys)


def order_of(run):
    """Pages in the order in which they are given up, one at a time, each time from a sound state."""
    gone = []
    while evictable(run.state.ledger, run.state.prefix_cache).any():
        before = run.state
        ledger, cache = evict(before.ledger, before.prefix_cache, 1)
        with_cache(run, ledger, cache)
        (page,) = set(before.prefix_cache.keys) - set(cache.keys)
        assert ledger.num_free == before.ledger.num_free + 1 and ledger.free_pages[before.ledger.num_free] == page
        gone.append(page)
    return gone


def test_a_prefix_goes_from_its_end():
    run = a_run()
    serve(run, 1, range(20))
    pages = pages_of(run, range(20))
    assert order_of(run) == pages[::-1]
    assert free(run) == list(range(1, 61)) and not run.state.prefix_cache.pages


def test_the_least_recently_used_goes_first():
    """Three prompts, the first of which was used again: the second goes whole, then the third, then the first, each from its end."""
    run = a_run()
    prompts = [[70 + i] * 12 for i in range(3)]
    for serial, prompt in enumerate(prompts, 1):
        serve(run, serial, prompt)
    serve(run, 4, [*prompts[0], 5])
    first, second, third = (pages_of(run, prompt) for prompt in prompts)
    assert order_of(run) == [*second[::-1], *third[::-1], *first[::-1]]


def test_what_others_begin_with_goes_last():
    """A trunk of two pages and two branches: each branch goes before it, the older one first."""
    run = a_run()
    older, newer = ([*range(8), *[70 + i] * 8] for i in range(2))
    serve(run, 1, older)
    serve(run, 2, newer)
    a, b = pages_of(run, older), pages_of(run, newer)
    assert a[:2] == b[:2] and order_of(run) == [a[3], a[2], b[3], b[2], b[1], b[0]]


def test_locked_pages_never_go():
    """However many are asked for: the pages that a running request begins with stay, and those behind them that nobody reads go."""
    run = a_run()
    serve(run, 1, range(20))
    prefill(run, (2, [*range(8), *[70] * 5]))
    locked = pages_of(run, [*range(8), *[70] * 5])
    gone = pages_of(run, range(20))[2:]
    before = run.state.ledger.num_free
    ledger, cache = evict(run.state.ledger, run.state.prefix_cache, 99)
    with_cache(run, ledger, cache)
    assert set(cache.keys) == set(locked) and ledger.num_free == before + 3
    assert ledger.free_pages[before : ledger.num_free].tolist() == gone[::-1]
    again = evict(ledger, cache, 99)  # the very values: there is nothing to give
    assert again[0] is ledger and again[1] is cache


@pytest.mark.parametrize("count", [0, -1, -99])
def test_no_pages_are_given_up_where_none_are_asked_for(count):
    run = a_run()
    serve(run, 1, range(20))
    ledger, cache = evict(run.state.ledger, run.state.prefix_cache, count)
    assert ledger is run.state.ledger and cache is run.state.prefix_cache


def test_nothing_is_given_up_of_nothing():
    run = a_run()
    ledger, cache = evict(run.state.ledger, run.state.prefix_cache, 3)
    assert ledger is run.state.ledger and cache is run.state.prefix_cache


def test_a_page_given_up_is_nobodys_prefix():
    """A prompt that would have begun with it computes it again, and it can be cached again."""
    run = a_run()
    serve(run, 1, range(12))
    ledger, cache = evict(run.state.ledger, run.state.prefix_cache, 1)
    with_cache(run, ledger, cache)
    assert match_prefix(cache, run.keys(range(12)), most=9) == pages_of(run, range(8))
    run.submit(2, range(13), 1)
    batch = run.plan()
    assert batch.prefix_lens.tolist() == [8]
    run.launch(batch, [[0]])
    run.settle()
    assert len(pages_of(run, range(12))) == 3


# --- any history -----------------------------------------------------------------------------------------------------------------


class SlowCache:
    """A tree of prefixes, each with its last use; leaves go first, the least recently used before others, as in SGLang."""

    def __init__(self, run):
        cache, locks = run.state.prefix_cache, run.state.ledger.page_locks
        self.last_used = {name: int(cache.last_used[page]) for name, page in names_of(run).items()}
        self.locked = {name for name, page in names_of(run).items() if locks[page]}

    def evict(self, count):
        gone = []
        while len(gone) < count:
            inner = {name[:-PAGE] for name in self.last_used}
            leaves = [name for name in self.last_used if name not in inner and name not in self.locked]
            if not leaves:
                break
            oldest = min(leaves, key=self.last_used.get)
            assert [self.last_used[name] for name in leaves].count(self.last_used[oldest]) == 1
            del self.last_used[oldest]
            gone.append(oldest)
        return gone


def names_of(run):
    """`{tokens up to its end: page}` of all cached pages."""
    found = {}
    for tokens in run.content.values():
        for i, key in enumerate(run.keys(tokens), 1):
            if key in run.state.prefix_cache.pages:
                found[tuple(tokens[: i * PAGE])] = run.state.prefix_cache.pages[key]
    assert len(found) == len(run.state.prefix_cache.pages)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_any_history(seed):
    """Requests with beginnings in common come, run and end, in chunks or whole; pages are given up now and then. All the time the pages of a prefix are used
    in falling order, what goes is what the tree says, and the invariants hold; in the end nothing is lost."""
    rng = np.random.default_rng(seed)
    run = a_run(max_running=3, max_prefill_tokens=int(rng.choice([8, 256])), num_pages=50, mixed=bool(seed % 2))
    evicted = doubles = 0
    serial, stems = 0, [[]]
    while serial < 30 or run.state.requests.serial.any() or run.state.waiting:
        if serial < 30 and rng.random() < 0.6 and len(run.state.waiting) < 3:
            serial += 1
            stem = stems[rng.integers(0, len(stems))]
            prompt = [*stem[: rng.integers(0, len(stem) + 1)], *rng.integers(0, 2, rng.integers(1, 14)).tolist()][:40]
            stems.append(prompt)
            run.submit(serial, prompt, int(rng.integers(1, 12)), priority=0)
        batch = run.plan()
        if batch is not None:
            size = len(batch.rows) if not batch.forward_mode.is_prefill else 0
            runs = [rng.integers(0, 2, rng.integers(1, 5)).tolist() for _ in range(size)]
            if batch.forward_mode.is_prefill:
                runs = [[] if goes_on else [int(rng.integers(0, 2))] for goes_on in batch.goes_on.tolist()]
                runs += [[int(rng.integers(0, 2))] for _ in range(0 if batch.tails is None else len(batch.tails.rows))]
            run.launch(batch, runs)
            before = len(run.state.prefix_cache.pages), int(run.state.ledger.num_free)
            run.settle()
            doubles += int(run.state.ledger.num_free) - before[1] > 0
        names, cache = names_of(run), run.state.prefix_cache
        for name, page in names.items():
            assert len(name) == PAGE or cache.last_used[names[name[:-PAGE]]] >= cache.last_used[page]
            assert cache.depth[page] == len(name) // PAGE
        if rng.random() < 0.3:
            count = int(rng.integers(0, 6))
            gone, before = SlowCache(run).evict(count), run.state.ledger.num_free
            ledger, cache = evict(run.state.ledger, cache, count)
            assert ledger.free_pages[before : ledger.num_free].tolist() == [names[name] for name in gone]
            with_cache(run, ledger, cache)
            evicted += len(gone)
    assert evicted > 5 and doubles > 5
    assert run.state.ledger.num_free + len(run.state.prefix_cache.pages) == 50 and not run.state.ledger.page_locks.any()
