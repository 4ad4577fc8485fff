"""States that are one to the search have the same future; states that differ where it matters are two."""

import dataclasses

import numpy as np
import pytest
from explore.kit import SMALL, config

from jspec.explore.expansion import Expander, shape_of
from jspec.explore.moves import Moves
from jspec.explore.path import Replay


def duplicates(small, most):
    """Pairs of different nodes with the same canonical form, and the expander that made them."""
    expander = Expander(Moves(small))
    root = expander.moves.root()
    known, todo, pairs = {expander.moves.key(root): root}, [root], []
    while todo and len(pairs) < most:
        _, children = expander.expand(todo.pop(0))
        for key, node in children.items():
            if key not in known:
                known[key] = node
                todo.append(node)
            elif concrete(node) != concrete(known[key]):
                pairs.append((known[key], node))
    return expander, pairs


def concrete(node):
    """What the canonical form leaves out, or renames."""
    requests, ledger = node.state.requests, node.state.ledger
    arrays = (
        requests.serial,
        requests.epoch,
        requests.last_launch,
        ledger.page_table,
        ledger.free_pages,
        node.state.prefix_cache.last_used,
    )
    return (int(node.state.forward_iter), *(array.tolist() for array in arrays))


SAMPLED = (
    "chunks",
    "prompts alike",
    "a prefix shared",
    "priorities",
    "pages run short",
    "three launches ahead",
    "longest prefix first",
)


@pytest.mark.parametrize("name", SAMPLED)
def test_equal_forms_have_equal_futures(name):
    """Of pairs that differ by counters, names of pages, and which of several equal requests is which: all that follows, in canonical form, and the shape."""
    expander, pairs = duplicates(SMALL[name], 150)
    assert len(pairs) >= 10
    for first, second in pairs:
        assert expander.moves.key(first) == expander.moves.key(second)
        assert shape_of(expander.moves, first) == shape_of(expander.moves, second)
        assert expander.expand(first)[0][:3] == expander.expand(second)[0][:3]  # what was met on the way may differ


def test_the_pairs_differ_in_everything_that_is_left_out():
    differ = np.zeros(7, bool)
    for name in SAMPLED:
        for first, second in duplicates(SMALL[name], 150)[1]:
            differ |= np.array([a != b for a, b in zip(concrete(first), concrete(second), strict=True)])
    assert differ.all(), differ


def busy():
    """Row 1 decodes behind a cached page, row 2 prefills in chunks, a request waits."""
    moves = Moves(config("5+2", "2+4", pages=14, max_prefill_tokens=2))
    run = Replay(moves)
    run.submit(1)
    for _ in range(2):
        run.iterate(lambda launch: [moves.outcomes.digits[kind][0] for _, kind in launch.rows])
    run.submit(0)
    run.iterate(lambda launch: [moves.outcomes.digits[kind][0] for _, kind in launch.rows])
    return moves, run.node


def edited(node, part, **changes):
    """Entries of arrays of `state.requests`, `state.ledger` or `state.prefix_cache`, written over."""
    table = getattr(node.state, part)
    arrays = {}
    for name, entries in changes.items():
        arrays[name] = np.array(getattr(table, name))
        for index, value in entries.items():
            arrays[name][index] = value
    return node._replace(state=dataclasses.replace(node.state, **{part: dataclasses.replace(table, **arrays)}))


CORRUPTIONS = {
    "a lock is lost": lambda node: edited(node, "ledger", page_locks={int(node.state.ledger.page_table[1, 0]): 0}),
    "a page is free and held": lambda node: edited(
        node, "ledger", free_pages={0: int(node.state.ledger.page_table[1, 1])}
    ),
    "a page is free twice": lambda node: edited(node, "ledger", free_pages={0: int(node.state.ledger.free_pages[1])}),
    "a page is gone": lambda node: edited(node, "ledger", num_free={(): int(node.state.ledger.num_free) - 1}),
    "two rows hold a page": lambda node: edited(
        node, "ledger", page_table={(2, 0): int(node.state.ledger.page_table[1, 1])}
    ),
    "a page is no longer cached": lambda node: edited(
        node, "prefix_cache", depth={int(node.state.ledger.page_table[1, 0]): 0}
    ),
    "a relay row is stale": lambda node: edited(node, "requests", last_launch={1: 1}),
    "an epoch moved on": lambda node: edited(node, "requests", epoch={1: 7}),
    "a token is gone": lambda node: edited(node, "requests", output_len={1: 0}),
    "an abort is forgotten": lambda node: edited(node, "requests", to_finish={1: True}),
    "the device knows other pages": lambda node: node._replace(tables=((), (9,), *node.tables[2:])),
    "a launch is forgotten": lambda node: node._replace(state=dataclasses.replace(node.state, launched=())),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_what_is_wrong_is_kept(name):
    """A form that left it out could hide a broken state behind a sound one that was seen before."""
    moves, node = busy()
    moves.check(node)
    assert moves.key(CORRUPTIONS[name](node)) != moves.key(node)
