"""Random ways through the states, beside a device that keeps the content of every page: what the search takes for granted of KV holds there."""

import numpy as np
import pytest
from explore.kit import SMALL, config
from oracles import Run

from jspec.explore import Abort, Submit
from jspec.explore.moves import Moves
from jspec.explore.path import Replay


def random_way(small, rng, length=60):
    """A replay of random actions, until nobody is left or for so long."""
    moves = Moves(small)
    run = Replay(moves)
    for _ in range(length):
        arrivals = moves.arrivals(run.node)
        if arrivals and rng.random() < 0.5:
            run.submit(int(rng.choice(arrivals)))
        elif run.node.live and small.aborts and rng.random() < 0.05:
            run.abort(int(rng.choice([serial for serial, _ in run.node.live])))
        else:
            run.iterate(lambda launch: [int(rng.choice(moves.outcomes.digits[kind])) for _, kind in launch.rows])
        assert run.frames[-1].violation is None
        if not (run.node.live or arrivals or run.node.launches):
            break
    return run.frames


def follow(small, frames):
    """The same inputs, by `oracles.Run`: its device finds in each page what the row wrote there, or one of equal content, or it fails."""
    limits = small.limits
    run = Run(
        page_size=small.page_size,
        num_pages=small.pages,
        max_running=small.rows,
        context_len=limits.context_len,
        alloc_len=limits.alloc_len,
        depth=small.depth,
        max_accept=small.verify_width,
        max_prefill_tokens=limits.max_prefill_tokens,
        max_prefill_rows=limits.max_prefill_rows,
        mixed=small.mixed,
        lookahead=small.lookahead,
        policy=small.policy,
        new_token_ratio=small.new_token_ratio,
    )
    for frame in frames:
        given = frame.input
        if isinstance(given, Submit):
            run.submit(given.serial, given.prompt, given.max_new_tokens, given.stop_token_ids, priority=given.priority)
        elif isinstance(given, Abort):
            run.abort(given.serial)
        else:
            batch = run.plan()
            assert (batch is None) == (given.result is None)
            if batch is not None:
                lens, ids = given.result.accept_lens.tolist(), given.result.next_token_ids.tolist()
                run.launch(batch, [row[:length] for row, length in zip(ids, lens, strict=True)])
                rows = [row for row, _ in given.rows]
                assert run.device.frontier[rows].tolist() == given.result.new_seq_lens.tolist()
            if given.settles:
                run.settle()
        same_state(run.state, frame.node.state)
        held = np.nonzero(run.state.requests.serial)[0]
        assert run.device.frontier[held].tolist() == [frame.frontiers[row] for row in held]


def same_state(one, other):
    for part in ("requests", "ledger", "prefix_cache"):
        for name, value in getattr(one, part).__dict__.items():
            assert np.array_equal(value, getattr(getattr(other, part), name)), (part, name)
    assert list(one.waiting) == list(other.waiting) and one.forward_iter == other.forward_iter


NO_DEVICE_FOR = ("stop strings", "logits that are not finite")
"""A result of `oracles.SlowDevice` has neither."""

CONFIGS = {name: small for name, small in SMALL.items() if name not in NO_DEVICE_FOR} | {
    "everything at once": config(
        "5+4,shared=5",
        "5+3,shared=3",
        "2+4,priority=1",
        "3+3,shared=3",
        pages=10,
        max_prefill_tokens=3,
        lookahead=1,
        verify_width=3,
    )
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kv_is_where_the_search_takes_it_to_be(name):
    longest = 0
    for seed in range(12):
        frames = random_way(CONFIGS[name], np.random.default_rng(seed))
        follow(CONFIGS[name], frames)
        longest = max(longest, len(frames))
    assert longest > 5
