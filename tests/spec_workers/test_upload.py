"""What crosses to the device and back: packed here, unpacked there, padding harmless."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import Run

from jspec.future_map import init_future_map
from jspec.spec_workers.base import DeviceState
from jspec.spec_workers.sampling import init_sampling
from jspec.spec_workers.upload import (
    DECODE_COLUMNS,
    EXTEND_COLUMNS,
    OUTCOME_COLUMNS,
    RowSampling,
    apply_decode,
    apply_extend,
    pack_decode,
    pack_extend,
    pack_outcome,
    unpack_decode,
    unpack_extend,
    unpack_outcome,
)

R, P = 6, 8
unpack = jax.jit(unpack_extend, static_argnames=("num_tokens", "num_rows"))
SAMPLING = RowSampling(
    top_k=np.array([0, 7, 2**31 - 1], np.int32),
    seed=np.array([0, 2**31, 2**32 - 1], np.uint32),
    temperature=np.array([0, 0.7, 1e-3], np.float32),
    top_p=np.array([1, 0.1, 1e-6], np.float32),
    min_p=np.array([0, 1, 0.05], np.float32),
    stop_from=np.array([0, 3, 2**31 - 1], np.int32),
    stop_token_ids=np.arange(24, dtype=np.int32).reshape(3, 8) - 1,
)
"""Of three rows; values at the ends of their types survive as bits."""


def planned(decode):
    """An EXTEND batch of rows 1, 2, 3, or the DECODE batch after it."""
    run = Run(max_running=R - 1, page_size=4, context_len=20, num_pages=60)
    for serial, prompt_len in enumerate((5, 9, 3), 1):
        run.submit(serial, prompt_len, 9)
    batch = run.plan()
    if decode:
        run.launch(batch, [[0]] * 3)
        batch = run.plan()
    return run, batch


def idle_device():
    return DeviceState(
        kv_pages=(),
        page_table=jnp.zeros((R, P), jnp.int32),
        future=init_future_map(R, ()),
        sampling=init_sampling(R),
        page_size=4,
    )


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [3, 4, 8])
def test_decode_round_trip(bucket):
    _, batch = planned(decode=True)
    upload = pack_decode(batch, bucket=bucket)
    assert upload.dtype == np.int32 and upload.shape == (bucket, DECODE_COLUMNS + batch.new_pages.shape[1])
    inputs = jax.jit(unpack_decode)(upload)
    for name, there in inputs._asdict().items():
        assert there.dtype == jnp.int32
        if name == "forward_iter":
            assert there == batch.forward_iter == 2
            continue
        here = getattr(batch, name)
        assert there[:3].tolist() == here.tolist(), name
        assert (np.asarray(there[3:]) == (-1 if name == "new_pages" else 0)).all(), name


def test_every_upload_is_made_anew():
    """The device may alias what it is handed, so no part of the plan, and no upload, is shared with another."""
    _, batch = planned(decode=True)
    first, second = pack_decode(batch, bucket=3), pack_decode(batch, bucket=3)
    assert not np.shares_memory(first, second)
    assert not any(np.shares_memory(first, leaf) for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray))


def test_the_page_table_follows_by_deltas():
    """After every launch the device's table is the host's, for all that was shipped are the new pages."""
    run, batch = planned(decode=False)
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
    _, batch = planned(decode=True)
    device = idle_device()
    upload = pack_decode(batch, bucket=8)
    upload[:3] = upload[3:6]
    after = jax.jit(apply_decode)(device, jax.jit(unpack_decode)(upload))
    assert not np.asarray(after.page_table).any()


# --- extend ----------------------------------------------------------------------------------------------------------


def extend_upload(batch, *, num_tokens=24, num_rows=4, width=3):
    tokens = np.arange(100, 100 + batch.extend_lens.sum(), dtype=np.int32)
    return pack_extend(batch, tokens, SAMPLING, num_tokens=num_tokens, num_rows=num_rows, table_width=width)


def extend_inputs(batch, *, num_tokens=24, num_rows=4, width=3):
    upload = extend_upload(batch, num_tokens=num_tokens, num_rows=num_rows, width=width)
    return unpack(upload, num_tokens=num_tokens, num_rows=num_rows)


@pytest.mark.parametrize(("num_tokens", "num_rows", "width"), [(17, 3, 3), (24, 4, 3), (64, 8, 7)])
def test_extend_round_trip(num_tokens, num_rows, width):
    _, batch = planned(decode=False)
    sizes = dict(num_tokens=num_tokens, num_rows=num_rows, width=width)
    upload = extend_upload(batch, **sizes)
    assert upload.dtype == np.int32 and upload.shape == (num_tokens + num_rows * (EXTEND_COLUMNS + width),)
    inputs = extend_inputs(batch, **sizes)
    assert inputs.input_ids.tolist() == list(range(100, 117)) + [0] * (num_tokens - 17)
    assert inputs.forward_iter == batch.forward_iter
    for name in ("rows", "prefix_lens", "extend_lens"):
        assert getattr(inputs, name).tolist() == getattr(batch, name).tolist() + [0] * (num_rows - 3), name
    for name, here in SAMPLING._asdict().items():
        there = np.asarray(getattr(inputs, name))
        assert there.dtype == here.dtype and there[:3].tobytes() == here.tobytes(), name
        assert not there[3:].any()
    pages = np.maximum(batch.new_pages[:, :width], 0)
    assert np.asarray(inputs.page_table)[:3, : pages.shape[1]].tolist() == pages.tolist()
    assert not np.asarray(inputs.page_table)[3:].any()


def test_a_new_row_gets_its_pages_and_parameters():
    run, batch = planned(decode=False)
    device = jax.jit(apply_extend)(idle_device(), extend_inputs(batch))
    width = run.state.ledger.page_table.shape[1]
    assert (np.asarray(device.page_table)[:, :width] == run.state.ledger.page_table).all()
    sampling = device.sampling
    assert sampling.temperature.tolist() == pytest.approx([0, 0, 0.7, 1e-3, 0, 0])
    assert sampling.top_k.tolist() == [0, 0, 7, 2**31 - 1, 0, 0]
    assert sampling.seed.tolist() == [0, 0, 2**31, 2**32 - 1, 0, 0]
    assert sampling.top_p.tolist() == pytest.approx([1, 1, 0.1, 1e-6, 1, 1])
    assert sampling.min_p.tolist() == pytest.approx([0, 0, 1, 0.05, 0, 0])


def test_a_new_owner_sees_nothing_of_the_last_one():
    """Row 2 held nine tokens and a reserve; its next owner has a prompt of two: the whole row of the table is set."""
    run, batch = planned(decode=False)
    device = jax.jit(apply_extend)(idle_device(), extend_inputs(batch))
    full = jnp.where(device.page_table == 0, 9, device.page_table).at[0].set(0)
    device = dataclasses.replace(device, page_table=full)
    run.launch(batch, [[0]] * 3)
    run.abort(2)
    run.settle()
    run.submit(4, 2)
    batch = run.plan()
    assert batch.rows.tolist() == [2]
    one = RowSampling(*(column[:1] for column in SAMPLING))
    upload = pack_extend(batch, np.array([5, 6], np.int32), one, num_tokens=24, num_rows=4, table_width=3)
    after = jax.jit(apply_extend)(device, unpack(upload, num_tokens=24, num_rows=4))
    page = run.state.ledger.page_table[2, 0]
    assert np.asarray(after.page_table)[2].tolist() == [page] + [0] * (P - 1)
    others = [0, 1, 3, 4, 5]
    assert (np.asarray(after.page_table)[others] == np.asarray(device.page_table)[others]).all()


# --- outcome -------------------------------------------------------------------------------------------------------------


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
