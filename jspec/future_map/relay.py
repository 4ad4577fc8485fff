"""The relay between iterations: what one launch leaves on the device for the next, one row each."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureMap:
    """Facts of the future: decided on the device, not seen by the host yet. Row 0 is a sink that always reads zero.

    Two writes feed a row. `publish` is what the scheduler's next step depends on, as soon as acceptance is decided; `stash` is what only the next
    forward needs, and may come from a later program. Each write leaves the number of its launch, so that a read finds out whether the value it gets
    is the one it waits for.
    """

    new_seq_lens: Any  # i32[R]  KV-ready frontier after the newest launch            writer: publish
    published_iter: Any  # i32[R]  forward_iter of that launch                          writer: publish
    carry: Any  # pytree of [R, ...]  the worker's payload, its type fixed at init      writer: stash
    stashed_iter: Any  # i32[R]  forward_iter of the payload                            writer: stash


class Resolved(NamedTuple):
    """What a launch reads at its start, per batch row."""

    seq_lens: Any  # i32[B]  frontier to start from
    carry: Any  # pytree of [B, ...]
    fresh: Any  # bool[B]  both parts were written by the launch this one follows; True for padding


def init_future_map(num_rows: int, carry: Any) -> FutureMap:
    """An empty relay.

    Args:
        num_rows: `R`, rows of the pool, row 0 included.
        carry: pytree of `jax.ShapeDtypeStruct` of one row's payload, without the row axis; `()` if the worker carries nothing.
    """
    return FutureMap(
        new_seq_lens=jnp.zeros(num_rows, jnp.int32),
        published_iter=jnp.zeros(num_rows, jnp.int32),
        carry=jax.tree.map(lambda leaf: jnp.zeros((num_rows, *leaf.shape), leaf.dtype), carry),
        stashed_iter=jnp.zeros(num_rows, jnp.int32),
    )


def _real(rows, values):
    """`values` with zeros in padding rows, so that writes to row 0 leave it zero."""
    return jnp.where((rows > 0).reshape(-1, *[1] * (values.ndim - 1)), values, jnp.zeros((), values.dtype))


def publish(future: FutureMap, rows, new_seq_lens, *, forward_iter) -> FutureMap:
    """Writes the frontier that the launch `forward_iter` reached: known, although the launch may have work left.

    Args:
        future: the relay.
        rows: i32[B], distinct rows; 0 is padding.
        new_seq_lens: i32[B], KV-ready tokens. Prefill publishes the prompt length, without +1; a verify its start plus `accept_lens`.
        forward_iter: i32[], the launch.

    Raises:
        ValueError: not one frontier a row (at trace time).
    Ensures: row 0 stays zero; no rows, no change.
    Clock: `new_seq_lens`; nobody else writes it.
    Source: SGLang Spec V2 `FutureMap.publish`.
    """
    if new_seq_lens.shape != rows.shape:
        raise ValueError(f"{new_seq_lens.shape=} must equal {rows.shape=}: one frontier a row")
    iters = jnp.broadcast_to(jnp.asarray(forward_iter, jnp.int32), rows.shape)
    return dataclasses.replace(
        future,
        new_seq_lens=future.new_seq_lens.at[rows].set(_real(rows, new_seq_lens)),
        published_iter=future.published_iter.at[rows].set(_real(rows, iters)),
    )


def stash(future: FutureMap, rows, payload, *, forward_iter) -> FutureMap:
    """Writes the payload that the next forward of these rows needs.

    Args:
        future: the relay.
        rows: i32[B], distinct rows; 0 is padding.
        payload: pytree of [B, ...] of the type given at init.
        forward_iter: i32[], the launch.

    Raises:
        ValueError: the payload's structure, shapes or dtypes are not those of init (at trace time).
    Clock: `carry`.
    Source: SGLang Spec V2 `FutureMap.stash`, with the payload's type fixed at init instead of by the first payload.
    """
    if (got := jax.tree.structure(payload)) != (want := jax.tree.structure(future.carry)):
        raise ValueError(
            f"payload has structure {got}, the relay was made for {want}: a worker's carry may not change its type"
        )

    def write(buffer, values):
        if values.shape != (*rows.shape, *buffer.shape[1:]) or values.dtype != buffer.dtype:
            raise ValueError(
                f"payload leaf {values.dtype}{values.shape} must be {buffer.dtype} of {rows.shape[0]} rows of shape {buffer.shape[1:]}, as given at init"
            )
        return buffer.at[rows].set(_real(rows, values))

    iters = jnp.broadcast_to(jnp.asarray(forward_iter, jnp.int32), rows.shape)
    return dataclasses.replace(
        future,
        carry=jax.tree.map(write, future.carry, payload),
        stashed_iter=future.stashed_iter.at[rows].set(_real(rows, iters)),
    )


def resolve(future: FutureMap, rows, *, expected_iter) -> Resolved:
    """Reads the frontier and the payload of the rows: inside the launch, never on the host.

    Args:
        future: the relay.
        rows: i32[B]; 0 is padding.
        expected_iter: i32[B], the newest launch of each row, known to the host without waiting; 0 for padding.

    Returns:
        A `Resolved`; a row that is not `fresh` holds somebody else's past, and its launch must be reported.

    Source: SGLang Spec V2 `resolve_seq_lens` and `resolve_forward_inputs`; the generation check is its debug-mode `_publish_fresh`.
    """
    fresh = (future.published_iter[rows] == expected_iter) & (future.stashed_iter[rows] == expected_iter)
    return Resolved(future.new_seq_lens[rows], jax.tree.map(lambda buffer: buffer[rows], future.carry), fresh)
