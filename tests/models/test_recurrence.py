"""The state of recurrent layers: the same by every way through a text, nobody else's, and after a verify that of the accepted path."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.paging import PAGE_SIZE, PagedRows, compiled

from jspec.models.recurrence import Accepted, Carried, RecurrentState, commit, parents, row_of_token
from jspec.models.tiny_hybrid import MIXERS, random_hybrid
from jspec.spec_workers.forward import packed_batch, prefill_batch, verify_batch
from jspec.spec_workers.tree import link

VOCAB = 64
KINDS = list(MIXERS)
ONE_FAST = ["mamba2", pytest.param("gated-delta", marks=pytest.mark.slow)]


@functools.cache
def target(kind: str):
    return random_hybrid(0, kind, num_layers=3, context_len=64)


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def close(ours, theirs):
    """Products of other shapes round differently, by a few units in the last place."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), ours, theirs)


def same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def rows_of(state: RecurrentState, *rows: int):
    return jax.tree.map(lambda x: np.asarray(x[:, list(rows)]), state.rows)


WAYS = {
    "whole": [(13, 10, 5, None)],
    "chunks that end with a page": [(8, 4, 4, None), (5, 6, 1, None)],
    "chunks that do not": [(7, 3, 1, None), (6, 7, 4, None)],
    "a token at a time": [(4, 1, 2, None), *[(1, 1, 1, 1)] * 3, (6, 6, 0, None)],
    "verifies": [(1, 2, 1, None), (3, 1, 3, 3), (3, 3, 1, 3), (3, 3, 0, 3), (3, 1, 0, 3)],
}
"""The same texts, put in by pieces: (tokens of each row, width of a verify or None for a prefill)."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_through_a_text_leaves_the_same_state(kind):
    """Of rows, and of the ends of pages: prefill, chunks, decode steps and verifies of ragged rows, and the logits after the last token."""
    texts, found = [text(13), text(10, 1), text(5, 2)], {}
    for name, pieces in WAYS.items():
        rows, at, logits = PagedRows(target(kind), 3), [0, 0, 0], [None] * 3
        for *lens, width in pieces:
            part = [t[start : start + n] for t, start, n in zip(texts, at, lens, strict=True)]
            got = rows.forward(part, width=width)[0]
            logits = [new[-1] if n else old for new, old, n in zip(got, logits, lens, strict=True)]
            at = [start + n for start, n in zip(at, lens, strict=True)]
        assert at == [13, 10, 5]
        full = [rows.page_table[b, : len(t) // PAGE_SIZE] for b, t in enumerate(texts)]
        pages = jax.tree.map(lambda x, full=full: np.asarray(x[:, np.concatenate(full)]), rows.recurrent.pages)
        found[name] = (rows_of(rows.recurrent, 0, 1, 2, 3), pages, logits)
    whole = found.pop("whole")
    assert not any(x.any() for x in jax.tree.leaves(jax.tree.map(lambda x: x[:, 0], whole[0]))), "row 0 is the sink"
    assert all(np.abs(x[:, 1:]).max() > 0.1 for x in jax.tree.leaves(whole[0]))
    for name, others in found.items():
        print(name)
        close(others, whole)


@pytest.mark.parametrize("kind", ONE_FAST)
def test_a_row_starts_anew_at_position_0_and_goes_on_from_another_rows_page(kind):
    """A row that is used again knows nothing of its last owner; one whose prefix lies in another row's pages starts from the end of the last of them."""
    rows, alone = PagedRows(target(kind), 2), PagedRows(target(kind), 2)
    rows.forward([text(9), text(7, 1)])
    rows.lens[:] = 0
    again = rows.forward([text(6, 2), text(11, 3)])[0]
    want = alone.forward([text(6, 2), text(11, 3)])[0]
    for a, b in zip(again, want, strict=True):
        np.testing.assert_array_equal(a, b)
    same(rows_of(rows.recurrent, 1, 2), rows_of(alone.recurrent, 1, 2))

    # Row 1 takes the first two pages of row 2.
    rows.page_table[0, :2] = rows.page_table[1, :2]
    rows.lens[:] = [8, 11]
    shared = rows.forward([text(11, 3)[8:], []])[0][0]
    np.testing.assert_allclose(shared, want[1][8:], atol=2e-5)
    close(rows_of(rows.recurrent, 1), rows_of(alone.recurrent, 2))


@dataclasses.dataclass
class Prefilled:
    """Rows 3 and 1 of a pool, between padding, with prompts in."""

    rows: np.ndarray
    lens: np.ndarray
    table: np.ndarray
    kv_pages: object
    recurrent: RecurrentState


@functools.cache
def prefilled(kind: str, lens: tuple[int, int] = (6, 9)) -> Prefilled:
    model = target(kind)
    rows, lens = np.array([0, 3, 1, 0], np.int32), np.array([0, *lens, 0], np.int32)
    table = np.zeros((4, 6), np.int32)
    table[1:3] = np.random.default_rng(0).permutation(np.arange(1, 13)).reshape(2, 6)
    tokens = np.zeros(24, np.int32)
    tokens[: lens.sum()] = text(int(lens.sum()))
    # Rows of a prefill come first; padding follows.
    order = [1, 2, 0, 3]
    batch, _ = prefill_batch(tokens, rows[order], np.zeros(4, np.int32), lens[order], table[order], page_size=PAGE_SIZE)
    state = model.init_recurrent(5, 12, PAGE_SIZE)
    _, out = compiled(model.forward, model.logits)(model.params, batch, model.init_kv(12, PAGE_SIZE), (), state)
    return Prefilled(rows, lens, table, out.kv_pages, out.recurrent)


def verify(kind: str, start: Prefilled, tokens, **options):
    model = target(kind)
    batch = verify_batch(start.rows, start.lens, jnp.asarray(tokens), start.table, page_size=PAGE_SIZE, **options)
    logits, out = compiled(model.forward, model.logits)(model.params, batch, start.kv_pages, (), start.recurrent)
    return np.asarray(logits).reshape(*np.shape(tokens), -1), out


PARENTS = np.array([[0, 0, 1, 1, 0, 4, 3], [0, 0, 0, 2, 3, 3, 1], [0, 0, 1, 2, 3, 4, 5], [0] * 7], np.int32)


def path_to(parents, node: int) -> list[int]:
    return [0] if node == 0 else [*path_to(parents, int(parents[node])), node]


@pytest.mark.parametrize("kind", ONE_FAST)
def test_nodes_of_a_tree_go_on_from_their_parents(kind):
    """Each node's logits and what it leaves are those of its path verified alone, as a chain; the state of the rows stays what it was, bit for bit."""
    start, width = prefilled(kind), PARENTS.shape[1]
    tokens = np.random.default_rng(5).integers(0, VOCAB, PARENTS.shape).astype(np.int32)
    tree = link(jnp.asarray(tokens), jnp.asarray(PARENTS))
    np.testing.assert_array_equal(parents(tree.ancestors), PARENTS)
    logits, out = verify(kind, start, tokens, depths=tree.depths, ancestors=tree.ancestors)
    same(out.recurrent, start.recurrent)
    for node in range(width):
        paths = [path_to(PARENTS[b], node) for b in range(4)]
        chains = np.zeros_like(tokens)
        for b, path in enumerate(paths):
            chains[b, : len(path)] = tokens[b, path]
        alone, chain = verify(kind, start, chains)
        for b in (1, 2):
            last = len(paths[b]) - 1
            np.testing.assert_allclose(logits[b, node], alone[b, last], atol=3e-5)
            ours, theirs = (
                jax.tree.map(lambda x, i=i, b=b: x[i, b], o.intermediates) for o, i in ((out, node), (chain, last))
            )
            close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_leaves_the_state_after_the_accepted_path(kind):
    """Of every length, over a page's end and not: as if the accepted tokens had been prefilled. Other rows, and row 0, keep their bits."""
    start = prefilled(kind)
    model, tokens = target(kind), np.random.default_rng(6).integers(0, VOCAB, PARENTS.shape).astype(np.int32)
    tree = link(jnp.asarray(tokens), jnp.asarray(PARENTS))
    _, out = verify(kind, start, tokens, depths=tree.depths, ancestors=tree.ancestors)
    nodes = [(0, 6, 4, 0), (0, 3, 6, 0), (0, 5, 5, 0), (0, 0, 0, 0)]
    prompts = [text(int(start.lens.sum()))[: start.lens[1]], text(int(start.lens.sum()))[start.lens[1] :]]
    for last in nodes:
        paths = [path_to(PARENTS[b], last[b]) for b in range(4)]
        accept_lens = np.array([len(path) for path in paths], np.int32)
        padded = np.array([path + [99] * (8 - len(path)) for path in paths], np.int32)
        accepted = Accepted(start.rows, start.lens, accept_lens, padded, start.table)
        after = model.commit(out.recurrent, out.intermediates, accepted)
        want = PagedRows(model, 2)
        want.forward([[*prompts[b - 1], *tokens[b, paths[b]].tolist()] for b in (1, 2)])
        close(rows_of(after, 3, 1), rows_of(want.recurrent, 1, 2))
        same(rows_of(after, 0, 2, 4), rows_of(start.recurrent, 0, 2, 4))
        for b in (1, 2):
            full = int(start.lens[b] + accept_lens[b]) // PAGE_SIZE
            ours, theirs = start.table[b, :full], want.page_table[b - 1, :full]
            close(
                jax.tree.map(lambda x, p=ours: x[:, p], after.pages),
                jax.tree.map(lambda x, p=theirs: x[:, p], want.recurrent.pages),
            )
        untouched = [p for p in range(1, 13) if p not in start.table[1:3, :5]]
        assert not any(x[:, untouched].any() for x in jax.tree.leaves(after.pages))


def test_a_commit_takes_each_rows_own_place():
    """By numbers: intermediate `100 layer + 10 place + b` of batch place `b` goes to its row."""
    after = [100.0 * layer + 10.0 * np.arange(4)[:, None] + np.arange(3) for layer in range(2)]
    state = RecurrentState(
        rows=Carried(-jnp.ones((2, 6, 1)), -jnp.ones((2, 6, 1, 1))),
        pages=Carried(-jnp.ones((2, 9, 1)), -jnp.ones((2, 9, 1, 1))),
        page_size=2,
    )
    accepted = Accepted(
        rows=jnp.array([5, 2, 0]),
        seq_lens=jnp.array([3, 4, 0]),
        accept_lens=jnp.array([3, 1, 1]),
        path=jnp.array([[0, 2, 3, 1], [0, 1, 2, 3], [0, 1, 2, 3]]),
        page_table=jnp.array([[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]]),
    )
    left = tuple(Carried(jnp.asarray(x)[..., None], jnp.asarray(x)[..., None, None]) for x in after)
    found = commit(state, left, accepted)
    for layer in range(2):
        rows = [0, -1, 100 * layer + 1, -1, -1, 100 * layer + 30]
        # Row 5 goes from 3 to 6: positions 3 and 5 end its pages 2 and 3, by places 0 and 3 of its path. Row 2 goes from 4 to 5.
        pages = [-1, -1, 100 * layer, 100 * layer + 30, -1, -1, -1, -1, -1]
        for part, want in ((found.rows, rows), (found.pages, pages)):
            for leaf in part:
                np.testing.assert_array_equal(np.asarray(leaf[layer]).reshape(-1), want)


@pytest.mark.parametrize("kind", ONE_FAST)
def test_packed_chains_are_the_chains(kind):
    """A verify of rows of different lengths, packed, leaves what one of whole rows leaves, as far as it goes."""
    start, model = prefilled(kind), target(kind)
    tokens = np.random.default_rng(7).integers(0, VOCAB, (4, 4)).astype(np.int32)
    lens = np.array([0, 2, 4, 0], np.int32)
    batch = packed_batch(
        start.rows, start.lens, jnp.asarray(tokens), jnp.asarray(lens), start.table, page_size=PAGE_SIZE, num_tokens=9
    )
    logits, out = compiled(model.forward, model.logits)(model.params, batch, start.kv_pages, (), start.recurrent)
    want, whole = verify(kind, start, tokens)
    np.testing.assert_allclose(logits[:6], np.concatenate([want[1, :2], want[2]]), atol=3e-5)
    for b, n in ((1, 2), (2, 4)):
        close(*(jax.tree.map(lambda x, b=b, n=n: x[:n, b], o.intermediates) for o in (out, whole)))
    same(out.recurrent, start.recurrent)


def test_tokens_of_tails_are_the_last_ones():
    rows, lens = np.array([4, 0, 7, 2, 0], np.int32), np.array([3, 0, 2, 1, 0], np.int32)
    # Two tails; the prompts have three rows, one of them padding.
    order = np.array([0, 2, 1, 3, 4])
    batch, _ = prefill_batch(
        np.zeros(9, np.int32), rows[order], np.zeros(5, np.int32), lens[order], np.zeros((5, 4), np.int32),
        page_size=4, num_tails=2,
    )  # fmt: skip
    np.testing.assert_array_equal(row_of_token(batch), [0, 0, 0, 1, 1, 5, 5, 3, 5])


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_prefix_cache_there_are_no_pages(kind):
    model = target(kind)
    state = model.init_recurrent(5, 0, PAGE_SIZE)
    assert state.pages == () and len(jax.tree.leaves(state)) == 2
    of_rows = sum(x[:, 0].nbytes for x in jax.tree.leaves(state.rows))
    assert of_rows == model.facts.recurrent_bytes
    one = np.ones(1, np.int32)
    batch = verify_batch(one, one, jnp.ones((1, 1), jnp.int32), np.ones((1, 1), np.int32), page_size=4)
    with pytest.raises(ValueError, match=r"recurrent=\(\) must be the state of the rows: give what `init_recurrent`"):
        model.forward(model.params, batch, model.init_kv(2, 4))


@pytest.mark.parametrize("kind", ONE_FAST)
def test_in_bfloat16_states_stay_in_float32(kind):
    """And what is remembered is near what f32 remembers."""
    rows, wide = PagedRows(random_hybrid(0, kind, context_len=64, dtype=jnp.bfloat16), 1), PagedRows(target(kind), 1)
    assert [x.dtype for x in rows.recurrent.rows] == [jnp.bfloat16, jnp.float32]
    for pieces, width in ((text(9), None), (text(3, 1), 3)):
        for each in (rows, wide):
            each.forward([pieces], width=width)
    ours, theirs = (np.asarray(x.recurrent.rows.state[0, 1]) for x in (rows, wide))
    assert np.abs(ours - theirs).max() < 0.1 * np.abs(theirs).max()
