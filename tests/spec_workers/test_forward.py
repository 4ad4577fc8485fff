"""Device views for the target's forwards, and the tokens that the pages know: position by position, in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.future_map import init_future_map
from jspec.spec_workers.base import DeviceState
from jspec.spec_workers.forward import history, next_tokens, prefill_batch, verify_batch, write_tokens
from jspec.spec_workers.sampling import idle_rows
from jspec.state import ForwardMode

I32 = np.int32
PAGES = 3  # pages of a row


def table_of(rng, rows, page_size):
    """Pages of some rows, no two alike; zero for padding."""
    pages = rng.permutation(np.arange(1, len(rows) * PAGES + 1)).reshape(len(rows), PAGES).astype(I32)
    return pages * (np.array(rows) > 0)[:, None]


def slot(table, i, position, page_size):
    return int(table[i, position // page_size]) * page_size + position % page_size


# --- views -----------------------------------------------------------------------------------------------------------

prefill = jax.jit(prefill_batch, static_argnames=("page_size", "num_tails"))


@pytest.mark.parametrize("num_tails", [0, 1, 4])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_ragged_batch_token_by_token(page_size, num_tails):
    """Prompts one after another, behind what is ready of them, then padding; the tails own the last slots, filled or not."""
    rng = np.random.default_rng([page_size, num_tails])
    longest = PAGES * page_size
    for _ in range(8):
        prompts = int(rng.integers(0, 4))
        prefix = [int(rng.integers(0, longest)) for _ in range(prompts)]
        lens = [int(rng.integers(1, longest - start + 1)) for start in prefix]
        tails = [int(rng.integers(0, longest)) for _ in range(int(rng.integers(0, num_tails + 1)))]
        packed = max(sum(lens) + int(rng.integers(0, 3)), 1)
        rows = [*range(1, prompts + 1), *[0] * (4 - prompts)]
        rows += [*range(5, 5 + len(tails)), *[0] * (num_tails - len(tails))]
        starts = [*prefix, *[0] * (4 - prompts), *tails, *[0] * (num_tails - len(tails))]
        extend = [*lens, *[0] * (4 - prompts), *[1] * len(tails), *[0] * (num_tails - len(tails))]
        table = table_of(rng, rows, page_size)
        ids = np.arange(packed + num_tails, dtype=I32)
        arrays = (np.array(x, I32) for x in (rows, starts, extend))
        batch, last = prefill(ids, *arrays, table, page_size=page_size, num_tails=num_tails)

        positions, slots, ends = [], [], [0] * len(rows)
        for i in range(prompts):
            for position in range(prefix[i], prefix[i] + lens[i]):
                ends[i] = len(positions)
                positions.append(position)
                slots.append(slot(table, i, position, page_size))
        positions += [0] * (packed - len(positions))
        slots += [0] * (packed - len(slots))
        for i, start in enumerate([*tails, *[None] * (num_tails - len(tails))], 4):
            ends[i] = len(positions)
            positions.append(start or 0)
            slots.append(0 if start is None else slot(table, i, start, page_size))
        assert batch.positions.tolist() == positions and batch.slots.tolist() == slots
        real = [i for i, length in enumerate(extend) if length]
        assert np.asarray(last)[real].tolist() == [ends[i] for i in real]
        assert all(0 <= place < len(ids) for place in last.tolist())
        assert batch.input_ids.tolist() == ids.tolist() and batch.query_len is None and batch.num_tails == num_tails
        assert batch.forward_mode is (ForwardMode.MIXED if num_tails else ForwardMode.EXTEND)


def test_a_verify_goes_on_from_the_frontier():
    table = np.array([[3, 1, 0], [0, 0, 0], [2, 5, 4]], I32)
    rows, lens = np.array([1, 0, 2], I32), np.array([3, 0, 6], I32)
    batch = verify_batch(rows, lens, np.arange(9, dtype=I32).reshape(3, 3), jnp.asarray(table), page_size=4)
    assert batch.positions.tolist() == [3, 4, 5, 0, 1, 2, 6, 7, 8]
    assert batch.slots.tolist() == [15, 4, 5, 0, 0, 0, 22, 23, 16]
    assert batch.extend_lens.tolist() == [3, 0, 3] and batch.forward_mode is ForwardMode.TARGET_VERIFY


@pytest.mark.parametrize("num_tails", [0, 2])
def test_the_token_after_each_one(num_tails):
    """Within a row the next one of the batch; after its last one what is given for the row. Padding rows name no place."""
    lens = [3, 1, 0, *[1, 0][:num_tails]]
    rows = np.array([1, 2, 0, *[3, 0][:num_tails]], I32)
    ids = np.array([10, 11, 12, 20, 0, *[30, 0][:num_tails]], I32)
    starts, table = np.zeros(len(rows), I32), np.arange(len(rows) * PAGES, dtype=I32).reshape(-1, PAGES)
    batch, last = prefill(ids, rows, starts, np.array(lens, I32), table, page_size=4, num_tails=num_tails)
    tokens = np.arange(91, 91 + len(rows), dtype=I32)
    after = next_tokens(jnp.asarray(ids), batch, last, tokens).tolist()
    assert after[:4] == [11, 12, 91, 92]
    assert num_tails == 0 or after[5] == 94


# --- the tokens of a page --------------------------------------------------------------------------------------------


def device_with(table, page_size):
    return DeviceState(
        kv_pages=(),
        page_table=jnp.asarray(table),
        future=init_future_map(len(table), ()),
        sampling_rows=idle_rows(len(table)),
        token_pages=jnp.zeros((len(table) * PAGES + 1, page_size), jnp.int32),
        page_size=page_size,
    )


write = jax.jit(write_tokens)
read = jax.jit(history, static_argnames="table_width")


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_written_is_the_history(page_size):
    """Runs of any length from any frontier on, against a list a row; what lies past the pages of a row is dropped, page 0 stays zero."""
    rng = np.random.default_rng(page_size)
    longest, num_rows = PAGES * page_size, 5
    table = table_of(rng, range(num_rows), page_size)
    device = device_with(table, page_size)
    known = [[0] * longest for _ in range(num_rows)]
    for _ in range(12):
        rows = rng.permutation(np.arange(1, num_rows))[:3]
        rows[1] *= rng.random() < 0.5
        starts, count = rng.integers(0, longest + 1, 3), rng.integers(0, 4, 3)
        tokens = rng.integers(1, 99, (3, 3))
        device = write(device, *(x.astype(I32) for x in (rows, starts, tokens, count)))
        for i, row in enumerate(rows.tolist()):
            for j in range(count[i]):
                if row and starts[i] + j < longest:
                    known[row][starts[i] + j] = int(tokens[i, j])
        for width in (1, PAGES):
            got = read(device, np.arange(num_rows, dtype=I32), table_width=width)
            assert got.tolist() == [line[: width * page_size] for line in known]
        assert not np.asarray(device.token_pages)[0].any()


def test_a_shared_page_is_everybodys_history():
    table = np.array([[0, 0, 0], [4, 2, 0], [4, 7, 0]], I32)
    device = device_with(table, 4)
    one = functools.partial(np.array, dtype=I32)
    device = write(device, one([1]), one([0]), one([[1, 2, 3, 4, 5, 6]]), one([6]))
    device = write(device, one([2]), one([4]), one([[7, 0, 0, 0, 0, 0]]), one([1]))
    assert read(device, one([1, 2, 0]), table_width=2).tolist() == [
        [1, 2, 3, 4, 5, 6, 0, 0],
        [1, 2, 3, 4, 7, 0, 0, 0],
        [0] * 8,
    ]


def test_a_row_without_a_page_writes_nowhere():
    """A pending token may belong to a page that the row has not got yet: the step that follows writes it again."""
    device = device_with(np.array([[0, 0, 0], [4, 0, 0]], I32), 4)
    one = functools.partial(np.array, dtype=I32)
    after = write(device, one([1]), one([3]), one([[8, 9]]), one([2]))
    assert np.argwhere(np.asarray(after.token_pages)).tolist() == [[4, 3]]
    later = dataclasses.replace(after, page_table=jnp.asarray([[0, 0, 0], [4, 6, 0]], jnp.int32))
    later = write(later, one([1]), one([4]), one([[9, 0]]), one([1]))
    assert read(later, one([1]), table_width=2).tolist() == [[0, 0, 0, 8, 9, 0, 0, 0]]
