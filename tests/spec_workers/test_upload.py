"""What crosses to the device and back: packed here, unpacked there, padding harmless."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import Run

from jspec.future_map import init_future_map, publish, stash
from jspec.spec_workers.base import DeviceState
from jspec.spec_workers.chain import Carry
from jspec.spec_workers.forward import begin_extend
from jspec.spec_workers.sampling import FIELDS, SAMPLING_COLUMNS, idle_rows, row_sampling, sampling_of
from jspec.spec_workers.upload import (
    DECODE_COLUMNS,
    EXTEND_COLUMNS,
    OUTCOME_COLUMNS,
    ExtendSizes,
    apply_decode,
    apply_extend,
    pack_decode,
    pack_extend,
    pack_outcome,
    unpack_decode,
    unpack_extend,
    unpack_outcome,
)
from jspec.state import ForwardMode
from jspec.state.results import NEVER

R, P = 6, 8
unpack = jax.jit(unpack_extend, static_argnames="sizes")
SAMPLING = (
    {"prompt_len": 5, "stop_token_ids": range(-1, 7), "num_logprobs": 0, "repetition_penalty": 0.5},
    {
        "top_k": 7,
        "seed": 2**31,
        "temperature": 0.7,
        "top_p": 0.1,
        "min_p": 1,
        "prompt_len": 9,
        "stop_from": 12,
        "stop_token_ids": [3],
        "repetition_penalty": 3.4e38,
        "presence_penalty": -1.5,
        "frequency_penalty": -0.0,
        "bias_ids": [8, 0],
        "bias": [-100, 1e-45],
        "bad_words": [[1, 2], [2**31 - 1], [5, 4, 3, 2, 1, 0]],
        "num_logprobs": 20,
        "num_prompt_logprobs": 3,
    },
    {"top_k": 2**31 - 1, "seed": 2**32 - 1, "temperature": 1e-3, "top_p": 1e-6, "min_p": 0.05, "stop_from": 2**31 - 1},
)
"""Of three rows: one that gives all there is, and values at the ends of their types, which survive as bits."""


def sampling_of_rows(rows, num_rows=R):
    """`{name: array}`: the device's parameters when row `i` has what `SAMPLING[rows[i]]` gives, and the others nothing."""
    table = {name: np.full((num_rows, *field.shape), field.idle, field.dtype) for name, field in FIELDS.items()}
    for row, i in rows.items():
        for name, given in SAMPLING[i].items():
            if name == "bad_words":
                for j, word in enumerate(given):
                    table[name][row, j, : len(word)] = word
            elif FIELDS[name].shape:
                table[name][row, : len(given)] = given
            else:
                table[name][row] = given
    return table


def assert_sampling(found, rows, num_rows=R):
    """`found(name)` is, to the bit, what `rows` says; see `sampling_of_rows`."""
    for name, here in sampling_of_rows(rows, num_rows).items():
        there = np.asarray(found(name))
        assert (there.dtype, there.shape) == (here.dtype, here.shape), name
        assert there.tobytes() == here.tobytes(), name


def planned(mode):
    """An EXTEND batch of rows 1, 2, 3, the DECODE batch after it, or that of a prompt in row 4 with all of them as tails."""
    run = Run(max_running=R - 1, page_size=4, context_len=20, num_pages=60, mixed=True)
    for serial, prompt_len in enumerate((5, 9, 3), 1):
        run.submit(serial, prompt_len, 9)
    batch = run.plan()
    if mode != "extend":
        run.launch(batch, [[0]] * 3)
        if mode == "mixed":
            run.submit(4, 7, 9)
        batch = run.plan()
    assert batch.forward_mode.value == mode
    return run, batch


def idle_device(carry=()):
    return DeviceState(
        kv_pages=(),
        page_table=jnp.zeros((R, P), jnp.int32),
        future=init_future_map(R, carry),
        sampling_rows=idle_rows(R),
        token_pages=jnp.zeros((61, 4), jnp.int32),
        page_size=4,
    )


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [3, 4, 8])
def test_decode_round_trip(bucket):
    _, batch = planned("decode")
    upload = pack_decode(batch, bucket=bucket)
    assert upload.dtype == np.int32 and upload.shape == (bucket, DECODE_COLUMNS + batch.new_pages.shape[1])
    inputs = jax.jit(unpack_decode)(upload)
    for name, there in inputs._asdict().items():
        assert there.dtype == jnp.int32
        if name == "forward_iter":
            assert there == batch.forward_iter == 2
            continue
        if name.endswith("words"):
            assert there.size == 0, "only a worker with a host side has them"
            continue
        here = getattr(batch, name)
        assert there[:3].tolist() == here.tolist(), name
        assert (np.asarray(there[3:]) == (-1 if name == "new_pages" else 0)).all(), name


def test_words_of_a_host_side_ride_along():
    """Behind the pages: those of each row, and those of the launch, which a padded row has too; everything else lies as without them."""
    _, batch = planned("decode")
    of_rows, of_batch = np.arange(6, dtype=np.int32).reshape(3, 2) + 10, np.array([-1, 7, 8], np.int32)
    upload = pack_decode(batch, bucket=4, words=(of_rows, of_batch))
    inputs = jax.jit(lambda u: unpack_decode(u, words=(2, 3)))(upload)
    assert inputs.row_words.tolist() == [*of_rows.tolist(), [0, 0]] and inputs.batch_words.tolist() == [-1, 7, 8]
    without = unpack_decode(jnp.asarray(pack_decode(batch, bucket=4)))
    for name in ("rows", "expected_iter", "forward_iter", "first_page", "new_pages"):
        assert np.array_equal(getattr(inputs, name), getattr(without, name)), name


def test_every_upload_is_made_anew():
    """The device may alias what it is handed, so no part of the plan, and no upload, is shared with another."""
    _, batch = planned("decode")
    first, second = pack_decode(batch, bucket=3), pack_decode(batch, bucket=3)
    assert not np.shares_memory(first, second)
    assert not any(np.shares_memory(first, leaf) for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray))


def test_the_page_table_follows_by_deltas():
    """After every launch the device's table is the host's, for all that was shipped are the new pages."""
    run, batch = planned("extend")
    device = jax.jit(apply_extend)(idle_device(), extend_inputs(batch))
    width, shipped = run.state.ledger.page_table.shape[1], []
    for accepts in ([1, 1, 1], [4, 1, 2], [3, 4, 1], [1, 1, 1]):
        run.launch(batch, [[0] * n for n in accepts])
        if len(run.results) > 1:
            run.settle()
        batch = run.plan()
        before = np.asarray(device.page_table)
        device = jax.jit(apply_decode)(device, jax.jit(unpack_decode)(pack_decode(batch, bucket=8)))
        table = np.asarray(device.page_table)
        live = np.nonzero(run.state.requests.serial)[0]
        assert (table[live, :width] == run.state.ledger.page_table[live]).all()
        assert not table[0].any() and not table[:, width:].any()
        shipped.append(int((batch.new_pages >= 0).sum()))
        assert (table != before).sum() == shipped[-1]
    assert 0 in shipped and sum(shipped) > 6


def test_padding_of_a_decode_launch_changes_nothing():
    _, batch = planned("decode")
    device = idle_device()
    upload = pack_decode(batch, bucket=8)
    upload[:3] = upload[3:6]
    after = jax.jit(apply_decode)(device, jax.jit(unpack_decode)(upload))
    assert not np.asarray(after.page_table).any()


# --- extend ----------------------------------------------------------------------------------------------------------


def sizes_of(batch, *, num_tokens=24, num_rows=4, num_tails=0, lookahead=1, width=7):
    """Sizes of a program that `batch` may run in."""
    new_pages = 2 if batch.tails is None else batch.tails.new_pages.shape[1]
    return ExtendSizes(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_tails=num_tails,
        lookahead=lookahead,
        table_width=width,
        max_new_pages=new_pages,
    )


def extend_upload(batch, sizes, next_ids=None):
    rows = batch.rows.shape[0]
    tokens = np.arange(100, 100 + batch.extend_lens.sum(), dtype=np.int32)
    if next_ids is None:
        next_ids = np.full((rows, sizes.lookahead), -1, np.int32)
    return pack_extend(batch, tokens, next_ids, row_sampling(SAMPLING[:rows]), sizes)


def extend_inputs(batch, next_ids=None, **given):
    sizes = sizes_of(batch, **given)
    return unpack(extend_upload(batch, sizes, next_ids), sizes=sizes)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "width", "lookahead", "num_tails"),
    [(17, 3, 3, 1, 0), (24, 4, 3, 2, 0), (64, 8, 7, 1, 5), (17, 3, 7, 3, 1)],
)
def test_extend_round_trip(num_tokens, num_rows, width, lookahead, num_tails):
    """An EXTEND batch, in programs with room for tails too."""
    _, batch = planned("extend")
    sizes = sizes_of(
        batch, num_tokens=num_tokens, num_rows=num_rows, width=width, lookahead=lookahead, num_tails=num_tails
    )
    upload = extend_upload(batch, sizes)
    words = num_tokens + num_rows * (EXTEND_COLUMNS + lookahead + width) + num_tails * (DECODE_COLUMNS + 2)
    assert upload.dtype == np.int32 and upload.shape == (words,) == (sizes.upload_len,)
    inputs = unpack(upload, sizes=sizes)
    assert inputs.input_ids.tolist() == list(range(100, 117)) + [0] * (num_tokens - 17)
    assert inputs.forward_iter == batch.forward_iter == 1
    for name in ("rows", "prefix_lens", "extend_lens"):
        assert getattr(inputs, name).tolist() == getattr(batch, name).tolist() + [0] * (num_rows - 3), name
    assert inputs.sampling.shape == (num_rows, SAMPLING_COLUMNS) and EXTEND_COLUMNS == 4 + SAMPLING_COLUMNS
    assert_sampling(lambda name: sampling_of(inputs.sampling[:3])[name], {0: 0, 1: 1, 2: 2}, 3)
    assert not np.asarray(inputs.sampling)[3:].any()
    assert inputs.next_ids.tolist() == [[-1] * lookahead] * 3 + [[0] * lookahead] * (num_rows - 3)
    pages = np.maximum(batch.new_pages[:, :width], 0)
    assert inputs.page_table.shape == (num_rows, width)
    assert np.asarray(inputs.page_table)[:3, : pages.shape[1]].tolist() == pages.tolist()
    assert not np.asarray(inputs.page_table)[3:].any()
    nobody = inputs.tails
    assert nobody.rows.tolist() == nobody.expected_iter.tolist() == nobody.first_page.tolist() == [0] * num_tails
    assert nobody.new_pages.tolist() == [[-1, -1]] * num_tails
    assert all(leaf.dtype == jnp.int32 for leaf in nobody)


def test_a_new_row_gets_its_pages_and_parameters():
    run, batch = planned("extend")
    device = jax.jit(apply_extend)(idle_device(), extend_inputs(batch))
    width = run.state.ledger.page_table.shape[1]
    assert (np.asarray(device.page_table)[:, :width] == run.state.ledger.page_table).all()
    # Padding of the upload, whose words are all 0, leaves row 0 idle all the same.
    assert_sampling(lambda name: getattr(device.sampling, name), {1: 0, 2: 1, 3: 2})


def test_a_new_owner_sees_nothing_of_the_last_one():
    """Row 2 held nine tokens and a reserve, and asked for all there is; its next owner has a prompt of two, and asks for little: the whole row is set."""
    run, batch = planned("extend")
    device = jax.jit(apply_extend)(idle_device(), extend_inputs(batch))
    full = jnp.where(device.page_table == 0, 9, device.page_table).at[0].set(0)
    device = dataclasses.replace(device, page_table=full)
    run.launch(batch, [[0]] * 3)
    run.abort(2)
    run.settle()
    run.submit(4, 2, 9)
    batch = run.plan()
    assert batch.rows.tolist() == [2]
    after = jax.jit(apply_extend)(device, extend_inputs(batch, width=3))
    page = run.state.ledger.page_table[2, 0]
    assert np.asarray(after.page_table)[2].tolist() == [page] + [0] * (P - 1)
    others = [0, 1, 3, 4, 5]
    assert (np.asarray(after.page_table)[others] == np.asarray(device.page_table)[others]).all()
    assert_sampling(lambda name: getattr(device.sampling, name), {1: 0, 2: 1, 3: 2})
    assert_sampling(lambda name: getattr(after.sampling, name), {1: 0, 2: 0, 3: 2})


# --- chunks ----------------------------------------------------------------------------------------------------------


def in_chunks(**settings):
    """A prompt of 12 in chunks of 4 tokens or 8."""
    run = Run(max_running=R - 1, page_size=4, context_len=20, num_pages=60, max_prefill_tokens=8, **settings)
    run.submit(1, range(12), 8)
    return run


@pytest.mark.parametrize("lookahead", [1, 3])
def test_what_follows_a_chunk_round_trip(lookahead):
    """The prompt's next tokens, as many as the draft looks ahead to; -1 where a prompt ends; 0 in padding rows, which stand for nobody."""
    run = in_chunks()
    run.submit(2, 3, 8)
    run.launch(run.plan(), [[]])
    batch = run.plan()
    assert batch.goes_on.tolist() == [False, False] and batch.prefix_lens.tolist() == [8, 0]
    next_ids = np.full((2, lookahead), -1, np.int32)
    next_ids[1] = [0, 2**31 - 1, 5][:lookahead]
    inputs = extend_inputs(batch, next_ids, lookahead=lookahead)
    assert inputs.next_ids.shape == (4, lookahead) and inputs.next_ids.dtype == jnp.int32
    assert inputs.next_ids.tolist() == [*next_ids.tolist(), [0] * lookahead, [0] * lookahead]


def test_a_chunk_brings_all_pages_of_its_row():
    """Those of the chunks before, and those it shares, are shipped again: the whole row of the table is set each time."""
    run = in_chunks()
    device = idle_device()
    for runs, held in (([[]], 2), ([[0]], 3)):
        batch = run.plan()
        device = jax.jit(apply_extend)(device, extend_inputs(batch))
        table = run.state.ledger.page_table[1]
        assert np.asarray(device.page_table)[1].tolist() == table.tolist() + [0] * (P - len(table))
        assert (table > 0).sum() == held
        run.launch(batch, runs)
    run.settle()
    run.settle()
    run.submit(2, range(10), 8)
    batch = run.plan()
    assert batch.prefix_lens.tolist() == [8]
    device = jax.jit(apply_extend)(device, extend_inputs(batch))
    rows = np.asarray(device.page_table)
    assert (rows[1, :2] == rows[2, :2]).all() and rows[2, 2] not in rows[1] and (rows[2, :3] > 0).all()
    run.launch(batch, [[0]])


# --- mixed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tails", [3, 4, 9])
def test_tails_round_trip(num_tails):
    """They arrive as a DECODE batch of the same launch would, padded with row 0."""
    _, batch = planned("mixed")
    assert batch.tails.rows.tolist() == [1, 2, 3] and batch.rows.tolist() == [4]
    inputs = extend_inputs(batch, num_tails=num_tails)
    expected = jax.jit(unpack_decode)(pack_decode(batch.tails, bucket=num_tails))
    for name, there in inputs.tails._asdict().items():
        assert there.dtype == jnp.int32 and there.tolist() == getattr(expected, name).tolist(), name
    assert inputs.tails.forward_iter == inputs.forward_iter == batch.tails.forward_iter == 2
    assert inputs.tails.rows.tolist() == [1, 2, 3] + [0] * (num_tails - 3)
    assert inputs.tails.expected_iter.tolist() == [1, 1, 1] + [0] * (num_tails - 3)
    assert inputs.rows.tolist() == [4, 0, 0, 0] and inputs.extend_lens.tolist() == [7, 0, 0, 0]
    assert inputs.input_ids.tolist() == list(range(100, 107)) + [0] * 17


def test_tails_do_not_disturb_the_prompts():
    """The prompts of a MIXED upload are those of the EXTEND upload of the same batch, bit for bit."""
    _, batch = planned("mixed")
    alone = dataclasses.replace(batch, tails=None, forward_mode=ForwardMode.EXTEND)
    here, there = (extend_inputs(each, num_tails=num_tails) for each, num_tails in ((batch, 5), (alone, 0)))
    here, there = (one._replace(tails=None) for one in (here, there))
    assert jax.tree.structure(here) == jax.tree.structure(there) and here.sampling.any()
    for path, ours in jax.tree_util.tree_leaves_with_path(here):
        theirs = dict(jax.tree_util.tree_leaves_with_path(there))[path]
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), path
    for one in (pack_decode(batch.tails, bucket=5), extend_upload(batch, sizes_of(batch, num_tails=5))):
        assert not any(np.shares_memory(one, leaf) for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray))


def test_a_mixed_upload_sets_new_rows_and_moves_running_ones():
    """The new row's whole table and parameters, and of the tails the new pages: afterwards the device's table is the host's."""
    run, batch = planned("extend")
    device = jax.jit(apply_extend)(idle_device(), extend_inputs(batch))
    run.launch(batch, [[0]] * 3)
    before = device
    run.submit(4, 7, 9)
    batch = run.plan()
    assert batch.forward_mode is ForwardMode.MIXED and (batch.tails.new_pages >= 0).any(axis=1).tolist() == [True] * 3
    device = jax.jit(apply_extend)(device, extend_inputs(batch, num_tails=5))
    table, width = np.asarray(device.page_table), run.state.ledger.page_table.shape[1]
    assert (table[:, :width] == run.state.ledger.page_table).all() and not table[:, width:].any()
    assert (table != np.asarray(before.page_table)).sum() == (batch.tails.new_pages >= 0).sum() + 2
    assert_sampling(lambda name: getattr(device.sampling, name), {1: 0, 2: 1, 3: 2, 4: 0})


def put_relay(device, rows, lens, bonus, *, forward_iter):
    future = publish(device.future, np.array(rows, np.int32), np.array(lens, np.int32), forward_iter=forward_iter)
    future = stash(future, np.array(rows, np.int32), Carry(np.array(bonus, np.int32)), forward_iter=forward_iter)
    return dataclasses.replace(device, future=future)


begin = jax.jit(begin_extend)


def begun():
    """A MIXED launch of row 4 with tails 1 to 3, of whose frontiers only the device knows: 6, 12, and 3, where a launch is missing."""
    run, batch = planned("extend")
    device = jax.jit(apply_extend)(idle_device(Carry(jax.ShapeDtypeStruct((), jnp.int32))), extend_inputs(batch))
    run.launch(batch, [[0]] * 3)
    device = put_relay(device, [1, 2, 3], [6, 12, 3], [31, 32, 33], forward_iter=1)
    device = put_relay(device, [3], [3], [33], forward_iter=0)
    run.submit(4, 7, 9)
    batch = run.plan()
    return (run, batch, *begin(device, extend_inputs(batch, num_tails=4)))


def test_a_tail_starts_where_the_relay_says():
    """And there it computes its pending token, last in the packed batch, each in a slot of its own."""
    run, batch, device, prompts = begun()
    packed = prompts.batch
    assert packed.forward_mode is ForwardMode.MIXED and packed.num_tails == 4 and packed.query_len is None
    assert packed.rows.tolist() == [4, 0, 0, 0, 1, 2, 3, 0]
    assert packed.prefix_lens.tolist() == [0, 0, 0, 0, 6, 12, 3, 0]
    assert packed.extend_lens.tolist() == [7, 0, 0, 0, 1, 1, 1, 0]
    assert packed.input_ids.tolist() == list(range(100, 107)) + [0] * 17 + [31, 32, 33, 0]
    assert packed.positions.tolist() == list(range(7)) + [0] * 17 + [6, 12, 3, 0]
    table = np.asarray(device.page_table)

    def slot(row, position):
        return int(table[row, position // 4]) * 4 + position % 4

    own = [slot(4, position) for position in range(7)]
    tails = [slot(1, 6), slot(2, 12), slot(3, 3)]
    assert packed.slots.tolist() == own + [0] * 17 + [*tails, 0] and 0 not in own + tails
    assert (np.asarray(packed.page_table) == table[[4, 0, 0, 0, 1, 2, 3, 0]]).all()
    assert prompts.last.tolist()[:1] == [6] and prompts.last.tolist()[4:] == [24, 25, 26, 27]
    assert prompts.new_seq_lens.tolist() == [7, 0, 0, 0, 7, 13, 4, 0] and prompts.forward_iter == 2
    assert prompts.next_ids.tolist() == [[-1]] * 8 and not prompts.goes_on.any()
    assert prompts.fresh.tolist() == [True, True, True, True, True, True, False, True]  # row 3 waited for a launch
    tokens = np.asarray(device.token_pages).reshape(-1)
    assert tokens[own].tolist() == list(range(100, 107)) and tokens[tails].tolist() == [31, 32, 33]
    assert np.count_nonzero(tokens) == 10
    run.launch(batch, [[0]] * 4)


def test_a_prompt_that_goes_on_says_what_follows():
    """In padding rows, as in rows whose prompt ends, the next token is to be sampled: nobody goes on by a token 0 that is only padding."""
    run = in_chunks()
    device = idle_device(Carry(jax.ShapeDtypeStruct((), jnp.int32)))
    batch = run.plan()
    assert batch.goes_on.tolist() == [True]
    device, prompts = begin(device, extend_inputs(batch, np.array([[0]], np.int32)))
    assert prompts.next_ids.tolist() == [[0], [-1], [-1], [-1]] and prompts.goes_on.tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert prompts.new_seq_lens.tolist() == [8, 0, 0, 0] and prompts.batch.forward_mode is ForwardMode.EXTEND
    run.launch(batch, [[]])
    batch = run.plan()
    _, prompts = begin(device, extend_inputs(batch))
    assert prompts.batch.positions.tolist()[:4] == [8, 9, 10, 11] and prompts.new_seq_lens.tolist() == [12, 0, 0, 0]
    assert not prompts.goes_on.any() and prompts.last.tolist()[:1] == [3]
    run.launch(batch, [[0]])


# --- outcome -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "num_tails"), [(1, 2), (2, 1), (2, 3), (0, 1), (1, 0)])
def test_outcome_of_prompts_and_tails(num_rows, num_tails):
    """Rows of the program: three for prompts, then four for tails; of each the first so many are real."""
    packed = np.arange(7 * 7, dtype=np.int32).reshape(7, 7)
    result = unpack_outcome(packed, num_rows, num_tails=num_tails, tails_at=3)
    rows = packed[[*range(num_rows), *range(3, 3 + num_tails)]]
    assert result.next_token_ids.tolist() == rows[:, OUTCOME_COLUMNS:].tolist()
    for i, name in enumerate(("accept_lens", "new_seq_lens", "status")):
        assert getattr(result, name).tolist() == rows[:, i].tolist(), name
    assert result.stop_at.tolist() == [NEVER] * (num_rows + num_tails)


@pytest.mark.parametrize("num_rows", [0, 2, 3])
def test_outcome_round_trip(num_rows):
    tokens = np.arange(12).reshape(3, 4)
    columns = np.array([[1, 4, 2], [21, 34, 52], [0, 2, 1]])
    packed = jax.jit(pack_outcome)(tokens, *columns)
    assert packed.dtype == jnp.int32 and packed.shape == (3, OUTCOME_COLUMNS + 4)
    result = unpack_outcome(np.asarray(packed), num_rows)
    assert result.next_token_ids.tolist() == tokens[:num_rows].tolist()
    assert result.accept_lens.tolist() == columns[0, :num_rows].tolist()
    assert result.new_seq_lens.tolist() == columns[1, :num_rows].tolist()
    assert result.status.tolist() == columns[2, :num_rows].tolist()
