"""What a request asks of its logits: every rule at every node of a draft, against plain Python that walks one path at a time."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jspec.future_map import init_future_map
from jspec.spec_workers.adjust import BANNED, adjust_logits, chain_path, tree_path
from jspec.spec_workers.base import DeviceState
from jspec.spec_workers.sampling import FIELDS, SamplingState, idle_rows, init_sampling, sample, sampling_bits
from jspec.spec_workers.tree import link

I32, F32 = np.int32, np.float32
ROWS, PAGES, PAGE = 6, 5, 4
"""Rows of the table, row 0 included; pages of a row; tokens of a page."""
LONGEST = PAGES * PAGE


# --- a device, and what is asked of it ----------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What the request of one row asks, and its prompt's length."""

    prompt_len: int = 1
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict = {}  # noqa: RUF012
    bad: tuple = ()  # sequences, first token first
    min_new: int = 0
    stops: tuple = ()


def columns(asked):
    """As `SamplingState` has it."""
    return {
        "prompt_len": asked.prompt_len,
        "stop_from": asked.prompt_len + asked.min_new,
        "stop_token_ids": asked.stops,
        "repetition_penalty": asked.repetition,
        "presence_penalty": asked.presence,
        "frequency_penalty": asked.frequency,
        "bias_ids": list(asked.bias),
        "bias": list(asked.bias.values()),
        "bad_words": [word[::-1] for word in asked.bad],
    }


def device_of(table, tokens, asked):
    """A device whose row `r` holds `tokens[r]`, page by page, and asks `asked[r]`; rows that nobody has are idle.

    Args:
        table: i32[ROWS, PAGES].
        tokens: i32[ROWS, LONGEST].
        asked: by row.
    """
    sampling = init_sampling(ROWS)
    filled = {name: np.array(getattr(sampling, name)) for name in FIELDS}
    for row, one in asked.items():
        for name, value in columns(one).items():
            if name == "bad_words":
                for i, word in enumerate(value):
                    filled[name][row, i, : len(word)] = word
            elif FIELDS[name].shape:
                filled[name][row, : len(value)] = value
            else:
                filled[name][row] = value
    pages = np.zeros((int(table.max()) + 1, PAGE), I32)
    pages[table[1:]] = tokens[1:].reshape(ROWS - 1, PAGES, PAGE)
    return DeviceState(
        kv_pages=(),
        page_table=jnp.asarray(table),
        future=init_future_map(ROWS, ()),
        sampling_rows=sampling_bits(SamplingState(**{name: jnp.asarray(values) for name, values in filled.items()})),
        token_pages=jnp.asarray(pages),
        page_size=PAGE,
    )


def some_table(rng):
    """Pages of all rows, in no order; row 0 has none."""
    table = rng.permutation(np.arange(1, (ROWS - 1) * PAGES + 1)).reshape(ROWS - 1, PAGES).astype(I32)
    return np.concatenate([np.zeros((1, PAGES), I32), table])


class Nodes(NamedTuple):
    """Of `B` rows."""

    start: np.ndarray  # i32[B]
    tokens: np.ndarray  # i32[B, W]
    parents: np.ndarray  # i32[B, W]  the root is its own

    def branch(self, i, node):
        """Nodes from the root to `node`."""
        found = [node]
        while found[0]:
            found.insert(0, int(self.parents[i, found[0]]))
        return found


def path_of(nodes, kind):
    """As the workers make it."""
    if kind == "chain":
        return chain_path(jnp.asarray(nodes.start), jnp.asarray(nodes.tokens))
    tree = link(jnp.asarray(nodes.tokens), jnp.asarray(nodes.parents))
    return tree_path(jnp.asarray(nodes.start), tree.tokens, tree.depths, tree.ancestors)


# --- the oracle -----------------------------------------------------------------------------------------------------------


def slow_rules(logits, sequence, asked):
    """The rules in their order, of one node: `sequence` is all that precedes the token to come."""
    prompt, output = sequence[: asked.prompt_len], sequence[asked.prompt_len :]
    logits = [F32(x) for x in logits]
    if asked.repetition != 1:
        for token in set(prompt) | set(output):
            penalty = F32(asked.repetition)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= F32(asked.frequency) * F32(output.count(token))
        logits[token] -= F32(asked.presence)
    for token, bias in asked.bias.items():
        logits[token] += F32(bias)
    for *others, last in asked.bad:
        if len(output) >= len(others) and output[len(output) - len(others) :] == others:
            logits[last] = F32(BANNED)
    if len(output) < asked.min_new:
        for token in asked.stops:
            logits[token] = F32(BANNED)
    return np.array(logits, F32)


def slow_adjust(tokens, asked, rows, logits, nodes):
    """`adjust_logits`, a row and a node at a time."""
    found = np.array(logits)
    for i, row in enumerate(rows.tolist()):
        for node in range(logits.shape[1]) if row else ():
            branch = [int(nodes.tokens[i, j]) for j in nodes.branch(i, node)]
            sequence = tokens[row, : nodes.start[i]].tolist() + branch
            found[i, node] = slow_rules(logits[i, node], sequence, asked[row])
    return found


# --- random cases ----------------------------------------------------------------------------------------------------------

VOCAB = 11


def numbers(rng, exact):
    """Penalties and biases; `exact`: such that no sum or product of the rules rounds, so that an order of them is seen in the last bit."""
    if exact:
        return {
            "repetition": float(rng.choice([0.5, 1.0, 2.0, 4.0])),
            "presence": float(rng.choice([-1.5, 0.0, 0.5, 2.0])),
            "frequency": float(rng.choice([-0.25, 0.0, 0.75, 1.0])),
        }
    return {
        "repetition": float(rng.uniform(0.5, 2)),
        "presence": float(rng.uniform(-2, 2)),
        "frequency": float(rng.uniform(-2, 2)),
    }


def some_request(rng, *, exact):
    """Each rule with an even chance; a quarter of the requests ask for nothing."""
    asked = Asked(prompt_len=int(rng.integers(1, LONGEST // 2)))
    if rng.random() < 0.25:
        return asked
    given = {name: value for name, value in numbers(rng, exact).items() if rng.random() < 0.5}
    if rng.random() < 0.5:
        ids = rng.choice(VOCAB, int(rng.integers(1, 5)), replace=False).tolist()
        given["bias"] = {token: float(rng.integers(-8, 9) * (0.5 if exact else rng.uniform(0.1, 1))) for token in ids}
    if rng.random() < 0.5:
        # Few tokens, so that words are met; one of a single token, and one of the longest kind, are among them at times.
        lengths = rng.choice([1, 2, 2, 3, 3, MAX_BAD_WORD_LEN], int(rng.integers(1, 8)))
        given["bad"] = tuple(tuple(rng.integers(0, 3, length).tolist()) for length in lengths)
    if rng.random() < 0.5:
        given["min_new"] = int(rng.integers(1, 12))
        given["stops"] = tuple(rng.choice(VOCAB, int(rng.integers(0, 4)), replace=False).tolist())
    return asked._replace(**given)


def some_nodes(rng, batch, width, kind, requests):
    """A root anywhere from the prompt's last token on, at times in its middle; drafts that often say what was said before."""
    start = np.zeros(batch, I32)
    for i, asked in enumerate(requests):
        low = asked.prompt_len - 1 if rng.random() < 0.8 else 0
        start[i] = rng.integers(low, LONGEST - width + 1)
    if kind == "chain":
        parents = np.broadcast_to(np.maximum(np.arange(width) - 1, 0), (batch, width))
    else:
        parents = np.array([[rng.integers(0, max(i, 1)) for i in range(width)] for _ in range(batch)])
    return Nodes(start, few(rng, (batch, width)), parents.astype(I32))


def few(rng, shape):
    """Tokens, of which three are much more frequent than the others."""
    return np.where(rng.random(shape) < 0.7, rng.integers(0, 3, shape), rng.integers(0, VOCAB, shape)).astype(I32)


class Case(NamedTuple):
    device: DeviceState
    rows: np.ndarray  # i32[B]
    logits: np.ndarray  # f32[B, W, V]
    nodes: Nodes
    asked: dict
    expected: np.ndarray


BATCH = 4


def some_case(rng, width, kind, *, exact=True):
    """Four rows of five in any order, one or two of them padding; what lies in the pages behind the root is somebody's past."""
    table, tokens = some_table(rng), few(rng, (ROWS, LONGEST))
    asked = {row: some_request(rng, exact=exact) for row in range(1, ROWS)}
    rows = rng.permutation(np.arange(1, ROWS))[:BATCH].astype(I32)
    rows[rng.integers(0, BATCH)] = 0
    rows[rng.integers(0, BATCH)] *= rng.random() < 0.5
    nodes = some_nodes(rng, BATCH, width, kind, [asked.get(row, Asked()) for row in rows.tolist()])
    nodes.start[rows == 0] = 0
    logits = rng.normal(0, 3, (BATCH, width, VOCAB)).astype(F32)
    if exact:
        logits = np.round(logits * 8) / 8
        logits[rng.random(logits.shape) < 0.1] = -0.0
    expected = slow_adjust(tokens, asked, rows, logits, nodes)
    return Case(device_of(table, tokens, asked), rows, logits, nodes, asked, expected)


adjust = jax.jit(adjust_logits, static_argnames="table_width")


def run(case, kind, table_width=PAGES):
    """The case on the device."""
    found = adjust(case.device, case.rows, case.logits, path_of(case.nodes, kind), table_width=table_width)
    assert found.dtype == jnp.float32 and found.shape == case.logits.shape
    return np.asarray(found)


def asks_nothing(asked):
    return asked._replace(prompt_len=1, stops=()) == Asked()


KINDS = [("chain", width) for width in range(1, 9)] + [("tree", width) for width in range(2, 9)]


@pytest.mark.parametrize(("kind", "width"), KINDS)
def test_every_node_of_a_draft_follows_the_rules(kind, width):
    """Several rows at once, each with other wishes, over numbers that no rule rounds: to the bit what the rules give, in their order, along the node's own
    path. Rows that ask for nothing, and padding, keep the very bits they had, whatever the others ask."""
    rng = np.random.default_rng([width, len(kind)])
    changed = untouched = 0
    for _ in range(30):
        case = some_case(rng, width, kind)
        found = run(case, kind)
        np.testing.assert_array_equal(found, case.expected)
        for i, row in enumerate(case.rows.tolist()):
            if not row or asks_nothing(case.asked[row]):
                assert found[i].tobytes() == case.logits[i].tobytes()
                untouched += 1
            else:
                changed += (found[i] != case.logits[i]).any()
    assert changed > 30 and untouched > 40


@pytest.mark.parametrize(("kind", "width"), [("chain", 5), ("tree", 8)])
def test_with_any_numbers(kind, width):
    """Penalties and biases that round: the same but for the last bits."""
    rng = np.random.default_rng(width)
    for _ in range(30):
        case = some_case(rng, width, kind, exact=False)
        np.testing.assert_allclose(run(case, kind), case.expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_table_is_only_as_wide_as_it_must_be(kind):
    """Wide enough for what precedes the root: pages behind it say nothing that counts."""
    rng = np.random.default_rng(3)
    for _ in range(10):
        case = some_case(rng, 4, kind)
        needed = -(-int(case.nodes.start.max()) // PAGE)
        for table_width in range(max(needed, 1), PAGES + 1):
            np.testing.assert_array_equal(run(case, kind, table_width), case.expected)


def test_all_values_are_one_program():
    """Which rows ask, for what, and where their drafts begin is data: nothing is traced again."""
    traced = []

    @functools.partial(jax.jit, static_argnames="table_width")
    def counted(device, rows, logits, path, *, table_width):
        traced.append(1)
        return adjust_logits(device, rows, logits, path, table_width=table_width)

    rng = np.random.default_rng(4)
    for _ in range(10):
        case = some_case(rng, 3, "tree")
        counted(case.device, case.rows, case.logits, path_of(case.nodes, "tree"), table_width=PAGES)
    nobody = dataclasses.replace(case.device, sampling_rows=idle_rows(ROWS))
    counted(nobody, case.rows, case.logits, path_of(case.nodes, "tree"), table_width=PAGES)
    assert len(traced) == 1


# --- one rule at a time --------------------------------------------------------------------------------------------------------


def one_row(asked, known, drafts, logits, *, parents=None, others=None):
    """Adjusted logits `[W][V]` of row 2, whose pages hold `known`, all but the last one, which is the root of its draft.

    Args:
        asked: what row 2 asks.
        known: its tokens, the root included.
        drafts: tokens of the nodes behind the root.
        logits: one list for all nodes, or one a node.
        parents: of all nodes; None: a chain.
        others: what other rows of the table ask, which are not in the batch.
    """
    width = 1 + len(drafts)
    tokens = np.full((ROWS, LONGEST), 9, I32)  # in pages that nobody has filled yet: somebody's past
    tokens[2, : len(known) - 1] = known[:-1]
    chain = list(np.maximum(np.arange(width) - 1, 0))
    nodes = Nodes(
        np.array([len(known) - 1], I32),
        np.array([[known[-1], *drafts]], I32),
        np.array([parents or chain], I32),
    )
    logits = np.broadcast_to(np.array(logits, F32), (1, width, VOCAB))
    device = device_of(some_table(np.random.default_rng(0)), tokens, {2: asked, **(others or {})})
    path = path_of(nodes, "tree" if parents else "chain")
    return np.asarray(adjust(device, np.array([2], I32), logits, path, table_width=PAGES))[0].tolist()


FLAT = [1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0, 5.0, -5.0, 6.0]
B = float(F32(BANNED))


def changes(before, after):
    """`{token: new logit}` where there is one."""
    return {i: x for i, (old, x) in enumerate(zip(before, after, strict=True)) if x != old}


def test_the_repetition_penalty_is_for_prompt_and_output():
    """Once each, however often a token came; positive logits shrink, negative ones fall."""
    asked = Asked(prompt_len=3, repetition=2.0)
    root, draft = one_row(asked, [0, 0, 1, 4], [7], FLAT)
    assert changes(FLAT, root) == {0: 0.5, 1: -2.0, 4: 1.5}
    assert changes(FLAT, draft) == {0: 0.5, 1: -2.0, 4: 1.5, 7: -8.0}


def test_presence_and_frequency_are_for_the_output():
    """Presence once, frequency as often as the token came; the prompt's tokens count for neither."""
    asked = Asked(prompt_len=3, presence=0.5, frequency=0.25)
    root, draft = one_row(asked, [0, 0, 4, 4, 1, 1], [1], FLAT)
    assert changes(FLAT, root) == {4: 2.25, 1: -2.0}
    assert changes(FLAT, draft) == {4: 2.25, 1: -2.25}


def test_the_last_token_of_a_prompt_is_no_output():
    """After a prefill the root is the prompt's last token: it is repeated, but not emitted."""
    (root,) = one_row(Asked(prompt_len=3, repetition=2.0, presence=0.5), [0, 0, 4], [], FLAT)
    assert changes(FLAT, root) == {0: 0.5, 4: 1.5}


def test_the_order_of_the_rules():
    """Token 4, of logit 3, was emitted twice: halved by the repetition penalty, 2 x 0.25 and 1 off, which makes it 0; then the bias. A penalty that looked at
    what the others left, or at a biased logit, would give something else. A bias saves no banned token."""
    asked = Asked(prompt_len=1, repetition=2.0, presence=1.0, frequency=0.25, bias={4: -1.0, 1: 2.0})
    (root,) = one_row(asked, [0, 4, 4], [], FLAT)
    assert changes(FLAT, root) == {0: 0.5, 4: -1.0, 1: 1.0}
    asked = asked._replace(bias={4: 99.0, 1: 99.0}, bad=((4, 4),), min_new=3, stops=(1,))
    (root,) = one_row(asked, [0, 4, 4], [], FLAT)
    assert changes(FLAT, root) == {0: 0.5, 4: B, 1: B}


def test_as_many_biases_as_may_be():
    """Every entry counts, token 0 as any other, the last one as the first; tokens of no entry keep their bits."""
    rng = np.random.default_rng(5)
    ids = rng.permutation(VOCAB).tolist()
    values = [float(i) for i in range(1, VOCAB + 1)]
    (root,) = one_row(Asked(bias=dict(zip(ids, values, strict=True))), [3], [], FLAT)
    assert root == [x + values[ids.index(i)] for i, x in enumerate(FLAT)]
    many = np.zeros((1, 1, MAX_LOGIT_BIAS + 2), F32)
    device = device_of(
        some_table(rng), few(rng, (ROWS, LONGEST)), {1: Asked(bias={i + 1: 1.0 + i for i in range(MAX_LOGIT_BIAS)})}
    )
    path = chain_path(jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    found = np.asarray(adjust(device, np.array([1], I32), many, path, table_width=PAGES))[0, 0]
    assert found.tolist() == [0.0, *np.arange(1.0, 1 + MAX_LOGIT_BIAS), 0.0]


# --- trees ------------------------------------------------------------------------------------------------------------------------

# 0 -> 1 -> 3
#   -> 2 -> 4
FORK = [0, 0, 0, 1, 2]


def test_a_token_of_another_branch_does_not_count():
    """Token 4 is drafted on one branch and 1 on the other: each weighs on the nodes behind it alone, and a token that is on both counts on each once."""
    asked = Asked(prompt_len=1, repetition=2.0, presence=0.5, frequency=0.25)
    found = one_row(asked, [0, 6], [4, 1, 8, 8], FLAT, parents=FORK)
    seen = {0: 0.5, 6: 1.25}
    four, one, eight = {4: 0.75}, {1: -2.75}, {8: 1.75}
    wanted = [seen, seen | four, seen | one, seen | four | eight, seen | one | eight]
    assert [changes(FLAT, logits) for logits in found] == wanted


def test_a_word_is_completed_along_its_own_branch():
    """The word 4 8 5: after the branch 4 8 its last token is banned, after 1 8 it is not; nor where 4 and 8 are siblings."""
    asked = Asked(prompt_len=1, bad=((4, 8, 5),))
    found = one_row(asked, [0, 6], [4, 1, 8, 8], FLAT, parents=FORK)
    assert [changes(FLAT, logits) for logits in found] == [{}, {}, {}, {5: B}, {}]
    found = one_row(asked, [0, 6], [4, 8, 1, 1], FLAT, parents=FORK)
    assert [changes(FLAT, logits) for logits in found] == [{}] * 5


# --- bad words ----------------------------------------------------------------------------------------------------------------------


def banned(asked, known, drafts=()):
    """Tokens banned after the root and after each draft."""
    return [[i for i, x in enumerate(logits) if x == B] for logits in one_row(asked, known, list(drafts), FLAT)]


def test_a_word_ends_where_its_others_have_come():
    """The word 1 2 3, the beginning of which is known, or drafted, or both; a part of it, or another order, bans nothing."""
    asked = Asked(prompt_len=1, bad=((1, 2, 3),))
    assert banned(asked, [0, 1], [2, 3]) == [[], [3], []]
    assert banned(asked, [0, 1, 2], [1, 2]) == [[3], [], [3]]
    assert banned(asked, [0, 2, 1], [1, 2, 2]) == [[], [], [3], []]
    assert banned(asked, [0, 5, 1, 2]) == [[3]] and banned(asked, [0, 1, 2, 5]) == [[]]
    assert banned(asked, [0, 2]) == [[]]


def test_a_word_that_begins_in_the_prompt_is_none():
    """1 2 3, of which 1, or 1 and 2, are the prompt's; the same tokens once more, emitted, count."""
    asked = Asked(bad=((1, 2, 3),))
    for prompt_len in (2, 3):
        assert banned(asked._replace(prompt_len=prompt_len), [0, 1, 2], [1, 2]) == [[], [], [3]]
    assert banned(asked._replace(prompt_len=1), [0, 1, 2]) == [[3]]


def test_a_word_of_one_token_is_never_said():
    """Whatever came before, right after the prompt too, and token 0 as any other."""
    for token in (0, 7):
        assert banned(Asked(prompt_len=2, bad=((token,),)), [5, 6], [token, 1]) == [[token]] * 3


@pytest.mark.parametrize("split", range(1, MAX_BAD_WORD_LEN))
def test_the_longest_word_across_pages_and_drafts(split):
    """Of six tokens the first `split` are known, those after them drafted, at every place of a page."""
    word = (1, 2, 1, 1, 3, 4)
    assert len(word) == MAX_BAD_WORD_LEN
    for before in range(1, 9):
        known = [0] * before + list(word[:split])
        assert banned(Asked(prompt_len=before, bad=(word,)), known, word[split:5])[-1] == [4]
        assert banned(Asked(prompt_len=before + 1, bad=(word,)), known, word[split:5])[-1] == []


def test_as_many_words_as_may_be():
    """Words with one ending, words one of which is another's end, and the same word twice: each counts, the last of the list as the first."""
    asked = Asked(prompt_len=1, bad=((1, 5), (2, 5), (2, 6), (1, 2, 7), (2, 6)))
    assert banned(asked, [0, 1], [2, 2]) == [[5], [5, 6, 7], [5, 6]]
    words = tuple((i % 8, 8 + i // 8) for i in range(MAX_BAD_WORDS))
    for i, (first, last) in enumerate(words):
        (found,) = banned(Asked(prompt_len=1, bad=words), [0, first])
        assert last in found and found == [8, 9], i
    assert banned(Asked(prompt_len=1, bad=words[:-1]), [0, words[-1][0]]) == [[8]]


def test_minus_one_is_no_token():
    """Tokens that the prompt hides, or that lie before its beginning, complete nothing, and a padded word bans nothing."""
    for prompt_len in (1, 2):
        assert banned(Asked(prompt_len=prompt_len, bad=((0, 0, 3),)), [0, 0]) == [[]]
    root, *_ = one_row(Asked(prompt_len=1, bad=((1, 2),)), [0, 5], [], FLAT)
    assert root == FLAT  # VOCAB - 1, which -1 would index, as little as the others


# --- stop tokens that would come too early ----------------------------------------------------------------------------------------------


def test_stops_are_banned_until_so_many_tokens_are_there():
    """A prompt of 3 and at least 2 tokens: after its last token, and after one more, no stop; then any."""
    stops = tuple(range(MAX_STOP_TOKEN_IDS))
    asked = Asked(prompt_len=3, min_new=2, stops=stops)
    assert banned(asked, [9, 9, 9], [8, 8]) == [list(stops), list(stops), []]
    assert banned(asked, [9, 9, 9, 8], [8, 8]) == [list(stops), [], []]
    assert banned(asked, [9, 9, 9, 8, 8]) == [[]]
    assert banned(asked._replace(min_new=0), [9, 9, 9], [8]) == [[], []]


def test_a_trees_nodes_are_as_long_as_their_branches():
    """Not as their place in the tree says."""
    asked = Asked(prompt_len=1, min_new=2, stops=(0, 5))
    found = one_row(asked, [9, 8], [7, 7, 7, 7], FLAT, parents=FORK)
    assert [changes(FLAT, logits) for logits in found] == [{0: B, 5: B}, {}, {}, {}, {}]
    found = one_row(asked._replace(min_new=3), [9, 8], [7, 7, 7, 7], FLAT, parents=FORK)
    assert [bool(changes(FLAT, logits)) for logits in found] == [True, True, True, False, False]


# --- who asks ------------------------------------------------------------------------------------------------------------------------------

WISHES = {
    "repetition": Asked(repetition=2.0),
    "presence": Asked(presence=0.5),
    "frequency": Asked(frequency=0.5),
    "bias": Asked(bias={0: 1.0}),
    "bad words": Asked(bad=((0,),)),
    "early stops": Asked(min_new=9, stops=(0,)),
}


@pytest.mark.parametrize("name", WISHES)
def test_each_wish_alone_is_granted(name):
    """No other wish is needed for it to be looked at."""
    (root,) = one_row(WISHES[name], [5, 0], [], FLAT)
    assert root != FLAT and changes(FLAT, root).keys() <= {0, 5}
    assert 0 in changes(FLAT, root)


@pytest.mark.parametrize("name", WISHES)
def test_who_is_not_in_the_batch_asks_nothing(name):
    """Nor does a row whose neighbours ask, beside it in the batch."""
    assert one_row(Asked(), [5, 0], [1], FLAT, others={1: WISHES[name], 3: WISHES[name]}) == [FLAT, FLAT]
    tokens = np.zeros((ROWS, LONGEST), I32)
    device = device_of(some_table(np.random.default_rng(0)), tokens, {1: WISHES[name], 2: Asked()})
    for rows in itertools.permutations([1, 2, 0]):
        path = chain_path(jnp.ones(3, jnp.int32), jnp.zeros((3, 1), jnp.int32))
        logits = np.broadcast_to(np.array(FLAT, F32), (3, 1, VOCAB))
        found = np.asarray(adjust(device, np.array(rows, I32), logits, path, table_width=1))
        assert [(found[i] != logits[i]).any() for i in range(3)] == [row == 1 for row in rows]


def test_what_is_not_finite_stays_so():
    """A fault of the model is not hidden by a row that asks for nothing, nor by the neighbours' wishes."""
    logits = np.array(FLAT, F32)
    logits[[2, 3, 4]] = np.nan, np.inf, -np.inf
    tokens = np.zeros((ROWS, LONGEST), I32)
    device = device_of(some_table(np.random.default_rng(0)), tokens, {1: WISHES["repetition"], 2: Asked()})
    path = chain_path(jnp.ones(2, jnp.int32), jnp.zeros((2, 1), jnp.int32))
    both = np.broadcast_to(logits, (2, 1, VOCAB))
    found = np.asarray(adjust(device, np.array([1, 2], I32), both, path, table_width=1))
    assert found[1].tobytes() == both[1].tobytes() and not np.isfinite(found[0, 0, 2:5]).any()


# --- grammars ------------------------------------------------------------------------------------------------------------------------------


class Masks:
    """Stands in for the host's grammars: after a path whose tokens sum up to `n`, the tokens of one residue class may come. Remembers what it was asked."""

    def __init__(self):
        self.calls = []

    @staticmethod
    def allows(serial, path, token):
        return (token + sum(path)) % 3 == serial % 3

    def __call__(self, serials, prompt_lens, starts, before, tokens, depths, above):
        self.calls.append([np.asarray(x).tolist() for x in (serials, prompt_lens, starts)])
        masks = np.zeros((*tokens.shape, 2), np.uint32)
        for i, node in np.ndindex(*tokens.shape):
            known = np.asarray(before)[i, : starts[i]].tolist()
            branch = [int(tokens[i, j]) for j in np.argsort(depths[i], kind="stable") if above[i, node, j]]
            for token in range(64):
                allowed = not serials[i] or self.allows(int(serials[i]), known + branch, token)
                masks[i, node, token // 32] |= np.uint32(allowed) << np.uint32(token % 32)
        return masks


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_what_a_grammar_does_not_allow_is_banned(kind):
    """Of every node by its own path, last of all rules, in a vocabulary of more than a word; rows without a grammar keep their bits, whoever has one. The host
    is asked once, with what the rows are."""
    rng, width, wide, masks = np.random.default_rng(6), 6, 40, Masks()
    for _ in range(10):
        case = some_case(rng, width, kind)
        device = dataclasses.replace(case.device, masks=masks)
        grammar = np.array([0, *rng.permutation([0, 0, 3, 7, 8])], I32)
        logits = np.concatenate([case.logits, np.zeros((BATCH, width, wide - VOCAB), F32)], axis=2)
        args = (case.rows, logits, path_of(case.nodes, kind))

        def run_with(grammar, device=device, args=args):
            sampling = dataclasses.replace(device.sampling, grammar=jnp.asarray(grammar))
            device = dataclasses.replace(device, sampling_rows=sampling_bits(sampling))
            return np.asarray(adjust(device, *args, table_width=PAGES))

        before = run_with(np.zeros(ROWS, I32))
        assert (before[:, :, :VOCAB] == case.expected).all()
        masks.calls.clear()
        found, wanted = run_with(grammar), before.copy()
        tokens = np.asarray(device.token_pages)[np.asarray(device.page_table)].reshape(ROWS, LONGEST)
        for i, row in enumerate(case.rows.tolist()):
            for node in range(width) if grammar[row] else ():
                branch = [int(case.nodes.tokens[i, j]) for j in case.nodes.branch(i, node)]
                path = tokens[row, : case.nodes.start[i]].tolist() + branch
                banned = [token for token in range(wide) if not masks.allows(int(grammar[row]), path, token)]
                wanted[i, node, banned] = F32(BANNED)
        assert (found == wanted).all()
        if grammar[case.rows].any():
            prompts = [case.asked[row].prompt_len if row else 0 for row in case.rows.tolist()]
            assert masks.calls == [[grammar[case.rows].tolist(), prompts, case.nodes.start.tolist()]]
        masks.calls.clear()


def test_the_host_is_not_asked_where_no_row_has_a_grammar():
    """Another row of the table may have one: what counts is who is in the batch."""
    case, masks = some_case(np.random.default_rng(7), 3, "chain"), Masks()
    grammar = np.ones(ROWS, I32)
    grammar[case.rows] = 0
    assert grammar.any()
    sampling = dataclasses.replace(case.device.sampling, grammar=jnp.asarray(grammar))
    device = dataclasses.replace(case.device, masks=masks, sampling_rows=sampling_bits(sampling))
    logits = np.concatenate([case.logits, np.zeros((BATCH, 3, 40 - VOCAB), F32)], axis=2)
    found = adjust(device, case.rows, logits, path_of(case.nodes, "chain"), table_width=PAGES)
    assert (np.asarray(found)[:, :, :VOCAB] == case.expected).all() and not masks.calls


def test_what_nobody_asks_for_is_not_computed():
    """Counts as large as the logits, above all: in the compiled program they are made behind the choice, not before it."""
    case = some_case(np.random.default_rng(8), 3, "chain")
    args = (case.device, case.rows, case.logits, path_of(case.nodes, "chain"))
    program = adjust.lower(*args, table_width=PAGES).compile().as_text()
    before, entry = program.split("\nENTRY ")
    assert "scatter" in before and "scatter" not in entry.split("\n}")[0]


# --- what the sampler makes of it ------------------------------------------------------------------------------------------------------------


def test_no_banned_token_is_drawn():
    """Row 1 bans stops before position 12 and row 3 a word's end, row 2 nothing; greedy rows and sampled ones draw no banned token, and a ban is no fault of
    the model."""
    asked = {
        1: Asked(prompt_len=8, min_new=4, stops=(0, 5)),
        2: Asked(prompt_len=8, stops=(0, 5)),
        3: Asked(prompt_len=8, bad=((5,), (7, 0))),
    }
    device = device_of(some_table(np.random.default_rng(1)), np.full((ROWS, LONGEST), 7, I32), asked)
    rows, start = np.array([1, 2, 3, 0], I32), np.array([9, 9, 9, 0], I32)
    nodes = np.broadcast_to(np.array([7, 1, 1], I32), (4, 3))
    logits = np.random.default_rng(0).standard_normal((4, 3, VOCAB)).astype(F32)
    logits[:, :, 5] = 9.0
    path = chain_path(jnp.asarray(start), jnp.asarray(nodes))
    out = adjust(device, rows, logits, path, table_width=PAGES)
    changed = np.argwhere(np.asarray(out != logits)).tolist()
    early = [[0, place, token] for place in (0, 1) for token in (0, 5)]
    assert changed == [*early, [2, 0, 0], [2, 0, 5], [2, 1, 5], [2, 2, 5]]
    draw = jax.jit(sample)
    positions = start[:, None] + 1 + np.arange(3, dtype=I32)
    tokens, finite = draw(device.sampling, rows, out, positions)
    assert finite.all() and tokens[0, 2] == 5 and (tokens[1] == 5).all()
    assert not np.isin(tokens[0, :2], [0, 5]).any() and not (tokens[2] == 5).any() and tokens[2, 0] != 0
    hot = dataclasses.replace(device.sampling, temperature=jnp.full(ROWS, 5.0), top_k=jnp.full(ROWS, VOCAB))
    drawn = np.stack([np.asarray(draw(hot, rows, out, positions + 100 * i)[0]) for i in range(60)])
    assert (
        not np.isin(drawn[:, 0, :2], [0, 5]).any() and not (drawn[:, 2] == 5).any() and not (drawn[:, 2, 0] == 0).any()
    )
    assert len(set(drawn[:, 0, :2].reshape(-1).tolist())) > 5 and (drawn[:, 1] == 5).any()
