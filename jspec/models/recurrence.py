"""The state of recurrent layers: one entry a row, walked by a prefill, left alone by a verify, committed where a run was accepted."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jspec.state.batches import ForwardBatch


class Carried(NamedTuple):
    """What a recurrent layer remembers of a sequence: everything, for it reads no token twice."""

    window: Any  # [K - 1, C]  the last inputs of its convolution, oldest first, in the model's dtype; zeros where the sequence has not that many
    state: Any  # f32[...]  what the mixer made of all of them


class Mixer(Protocol):
    """A kind of recurrent layer: its sizes, and one token of it. Sizes are static; `weights` are the layer's vectors, by name."""

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of the vectors of one layer, all f32."""

    @property
    def in_size(self) -> int:
        """Outputs of the projection that it reads."""

    @property
    def out_size(self) -> int:
        """Inputs of the projection that reads it."""

    @property
    def window_shape(self) -> tuple[int, int]:
        """Of `Carried.window`."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of `Carried.state`."""

    def step(self, weights, carried: Carried, projected) -> tuple[Carried, Any]:
        """One token of one sequence: `projected: f32[in_size]` -> what is remembered after it, and its output `f32[out_size]`."""

    def finish(self, weights, out, projected, eps: float):
        """Gates and norms of outputs, `f32[T, out_size]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """Of all recurrent layers, `Lr`, and all rows. Row 0 is padding and stays zero."""

    rows: Carried  # [Lr, R, ...]  after the tokens before the row's frontier: the pending one is not among them
    pages: (
        Carried | tuple[()]
    )  # [Lr, N + 1, ...]  as it was at the end of each page of KV, written when a row gets there; (): nobody starts from a page
    page_size: int = dataclasses.field(metadata={"static": True})


class Accepted(NamedTuple):
    """The runs that a verify accepted."""

    rows: Any  # i32[B]  0 is padding
    seq_lens: Any  # i32[B]  frontier before the verify
    accept_lens: Any  # i32[B]  as far as the frontier moves; where it stays, so does the state
    path: Any  # i32[B, O]  the verified places that the frontier moves over, root first; past `accept_lens` meaningless
    page_table: Any  # i32[B, P]


def init_recurrent(
    mixer: Mixer, num_layers: int, num_rows: int, num_pages: int, page_size: int, dtype
) -> RecurrentState:
    """Zeros. `num_pages`: pages whose end a row may start from; 0 for none."""

    def zeros(count: int) -> Carried:
        window = jnp.zeros((num_layers, count, *mixer.window_shape), dtype)
        return Carried(window, jnp.zeros((num_layers, count, *mixer.state_shape), jnp.float32))

    return RecurrentState(rows=zeros(num_rows), pages=zeros(num_pages + 1) if num_pages else (), page_size=page_size)


def bytes_per_entry(mixer: Mixer, num_layers: int, dtype) -> int:
    """Of one row, of one page, or of one verified token."""
    (taps, channels), cells = mixer.window_shape, 1
    for size in mixer.state_shape:
        cells *= size
    return num_layers * (taps * channels * jnp.dtype(dtype).itemsize + 4 * cells)


Step = Callable[[Carried, Any], tuple[Carried, Any]]


def walk(
    step: Step, recurrent: RecurrentState, batch: ForwardBatch, projected, *, layer: int
) -> tuple[Any, RecurrentState, Carried | tuple[()]]:
    """One recurrent layer over a batch, token by token: the same arithmetic for a token, whatever it is packed with.

    Args:
      step: of one token, see `Mixer.step`.
      recurrent: the state of all layers.
      batch: `T` packed tokens.
      projected: f32[T, in_size].
      layer: among the recurrent ones, static.
    Returns:
      outputs f32[T, out_size]; the state: moved on by a prefill, untouched by a verify or a decode step; and what those remember after each place of each
      row, [W, B, ...], for `commit`.
    """
    if batch.query_len is None:
        out, recurrent = _walk_rows(step, recurrent, batch, projected, layer=layer)
        return out, recurrent, ()
    b, width = batch.rows.shape[0], batch.query_len
    start = jax.tree.map(lambda x: x[layer, batch.rows], recurrent.rows)
    if batch.packed is not None:
        spread = jnp.zeros((b * width, *projected.shape[1:]), projected.dtype)
        places = spread.at[batch.packed].set(projected, mode="drop")
    else:
        places = projected
    by_place = jnp.swapaxes(places.reshape(b, width, -1), 0, 1)
    if batch.ancestors is None:
        out, after = _walk_chain(step, start, by_place)
    else:
        out, after = _walk_tree(step, start, by_place, parents(batch.ancestors))
    out = jnp.swapaxes(out, 0, 1).reshape(b * width, -1)
    if batch.packed is not None:
        out = out.at[batch.packed].get(mode="fill", fill_value=0)
    return out, recurrent, after


def _walk_rows(step: Step, recurrent: RecurrentState, batch: ForwardBatch, projected, *, layer: int):
    """A prefill: rows one after another, then the tails."""
    num_rows = batch.rows.shape[0]
    index = row_of_token(batch)
    page, offset = batch.slots // recurrent.page_size, batch.slots % recurrent.page_size
    full = jnp.where(offset == recurrent.page_size - 1, page, 0)  # the sink takes what no page ends with

    def one(carried, token):
        rows, pages = carried
        b, page, projected = token
        after, out = step(jax.tree.map(lambda x: x[b], rows), projected)
        rows = jax.tree.map(lambda x, new: x.at[b].set(new), rows, after)
        if pages:
            pages = jax.tree.map(lambda x, new: x.at[layer, page].set(new), pages, after)
        return (rows, pages), out

    # One entry more: that of padding tokens.
    start = jax.tree.map(lambda x: jnp.pad(x, [(0, 1), *[(0, 0)] * (x.ndim - 1)]), _starts(recurrent, batch, layer))
    (after, pages), out = lax.scan(one, (start, recurrent.pages), (index, full, projected))
    rows = jax.tree.map(
        lambda x, new: x.at[layer, batch.rows].set(_where(batch.rows > 0, new[:num_rows], 0)), recurrent.rows, after
    )
    return out, dataclasses.replace(recurrent, rows=rows, pages=pages)


def _starts(recurrent: RecurrentState, batch: ForwardBatch, layer: int) -> Carried:
    """What each row starts from: nothing at the beginning of its prompt, the page before it at a page's end, else what it has.

    At the end of a page of its own, a row's page and the row hold the same. So nobody needs to know whether the prefix was found or computed.
    """
    own = jax.tree.map(lambda x: _where(batch.prefix_lens > 0, x[layer, batch.rows], 0), recurrent.rows)
    if not recurrent.pages:
        return own
    last = jnp.maximum(batch.prefix_lens // recurrent.page_size - 1, 0)
    page = jnp.take_along_axis(batch.page_table, last[:, None], axis=1)[:, 0]
    at_end = (batch.prefix_lens > 0) & (batch.prefix_lens % recurrent.page_size == 0)
    return jax.tree.map(lambda x, y: _where(at_end, x[layer, page], y), recurrent.pages, own)


def _walk_chain(step: Step, start: Carried, by_place):
    """`by_place: [W, B, in_size]`; each place goes on from the one before."""

    def one(carried, projected):
        after, out = jax.vmap(step)(carried, projected)
        return after, (out, after)

    if by_place.shape[0] == 1:
        after, out = jax.vmap(step)(start, by_place[0])
        return out[None], jax.tree.map(lambda x: x[None], after)
    _, (out, after) = lax.scan(one, start, by_place)
    return out, after


def _walk_tree(step: Step, start: Carried, by_place, parents):
    """Each place goes on from its parent, `parents: i32[B, W]`."""
    width, b = by_place.shape[:2]
    everyone = jnp.arange(b)
    # The root's parent is the row itself, at the end of the table.
    parents = parents.T.at[0].set(width)
    table = jax.tree.map(lambda x: jnp.zeros((width + 1, *x.shape), x.dtype).at[width].set(x), start)

    def one(table, item):
        place, parent, projected = item
        after, out = jax.vmap(step)(jax.tree.map(lambda x: x[parent, everyone], table), projected)
        return jax.tree.map(lambda x, new: x.at[place].set(new), table, after), out

    table, out = lax.scan(one, table, (jnp.arange(width), parents, by_place))
    return out, jax.tree.map(lambda x: x[:width], table)


def commit(recurrent: RecurrentState, intermediates: tuple[Carried, ...], accepted: Accepted) -> RecurrentState:
    """Moves each row on to what it remembers after the last accepted place, and leaves that at the ends of the pages that its run filled.

    The state is then that after the tokens before the new frontier, the new pending token not among them: the convention of KV.

    Args:
      recurrent: as the verify found it.
      intermediates: of each recurrent layer, from the verify.
      accepted: its runs.

    Source: the commit of SGLang's Mamba states after a verify; its snapshots at multiples of an interval, which is a page here.
    """
    real, b = (accepted.rows > 0) & (accepted.accept_lens > 0), jnp.arange(accepted.rows.shape[0])
    to = jnp.where(real, accepted.rows, 0)
    last = jnp.take_along_axis(accepted.path, jnp.maximum(accepted.accept_lens[:, None] - 1, 0), axis=1)[:, 0]
    rows, pages = recurrent.rows, recurrent.pages
    filled = _filled_pages(accepted, recurrent.page_size) if pages else []
    for layer, after in enumerate(intermediates):
        rows = jax.tree.map(lambda x, new, i=layer: x.at[i, to].set(_where(real, new[last, b], 0)), rows, after)
        for place, page in filled:
            pages = jax.tree.map(
                lambda x, new, i=layer, w=place, p=page: x.at[i, p].set(new[w, b], mode="drop"), pages, after
            )
    return dataclasses.replace(recurrent, rows=rows, pages=pages)


def _filled_pages(accepted: Accepted, page_size: int) -> list[tuple[Any, Any]]:
    """(place that fills a page, the page), each i32[B], of the first, second, ... page that a run can fill; the page is out of bounds where it does not."""
    found = []
    for k in range((accepted.path.shape[1] - 1) // page_size + 1):
        column = accepted.seq_lens // page_size + k
        step = (column + 1) * page_size - 1 - accepted.seq_lens
        fills = (accepted.rows > 0) & (step < accepted.accept_lens)
        place, page = (
            jnp.take_along_axis(x, jnp.minimum(at, x.shape[1] - 1)[:, None], axis=1)[:, 0]
            for x, at in ((accepted.path, step), (accepted.page_table, column))
        )
        found.append((place, jnp.where(fills, page, jnp.iinfo(jnp.int32).max)))
    return found


def row_of_token(batch: ForwardBatch):
    """`i32[T]`: of a ragged batch, the place in the batch of each packed token's row; `B` for padding."""
    num_rows = batch.rows.shape[0] - batch.num_tails
    t = jnp.arange(batch.input_ids.shape[0] - batch.num_tails, dtype=jnp.int32)
    index = jnp.searchsorted(jnp.cumsum(batch.extend_lens[:num_rows]), t, side="right").astype(jnp.int32)
    index = jnp.where(index < num_rows, index, batch.rows.shape[0])
    tails = num_rows + jnp.arange(batch.num_tails, dtype=jnp.int32)
    return jnp.concatenate([index, jnp.where(batch.extend_lens[num_rows:] > 0, tails, batch.rows.shape[0])])


def parents(ancestors):
    """`i32[B, W]`: the node before each node of a tree, of the bits of its path; of the root, 0. Along a path, indices ascend."""
    width = ancestors.shape[1]
    above = ancestors & ~(jnp.uint32(1) << jnp.arange(width, dtype=jnp.uint32))
    return jnp.maximum(31 - lax.clz(above).astype(jnp.int32), 0)


def convolve(window, x, weight, bias=None):
    """One step of a causal depthwise convolution, and SiLU.

    Args:
      window: [K - 1, C], its last inputs, oldest first.
      x: [C], the next one.
      weight: f32[K, C].
      bias: f32[C] or None.
    Returns: the window that follows, and f32[C].
    """
    whole = jnp.concatenate([window, x.astype(window.dtype)[None]])
    out = jnp.sum(whole.astype(jnp.float32) * weight, axis=0)
    return whole[1:], jax.nn.silu(out if bias is None else out + bias)


def _where(chosen, ours, others):
    """Row by row, `ours` where `chosen: bool[B]`."""
    return jnp.where(chosen.reshape(-1, *[1] * (ours.ndim - 1)), ours, others)
