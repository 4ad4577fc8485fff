"""Rows at which drafting is trained to begin, and what is told of the drafts that begin there."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.training.loss import Batch, mean_accept_len, shift


class Starts(NamedTuple):
    """`A` starts of each of `B` sequences."""

    batch: Batch
    rows: Any  # i32[B, A], ascending
    counts: Any  # f32[B, A], 1 for starts that count

    def at(self, x, ahead: int):
        """`x[b, t + ahead]` of the starts `t`; 0 past the end."""
        index = self.rows.reshape(*self.rows.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(shift(x, ahead), index, axis=1)


def draw_starts(batch: Batch, max_starts: int | None) -> Starts:
    """Starts drawn from the rows that count, anew for every batch, as many of each sequence; None: all rows. Where a sequence has too few, its last row stands
    for those that miss, and does not count twice."""
    num, length = batch.weight.shape
    count = length if max_starts is None else max(1, min(length, max_starts // num))
    order = jnp.where(batch.weight > 0, jax.random.uniform(batch_key(batch), (num, length)), 2.0)
    chosen = jnp.argsort(order, axis=1)[:, :count]
    usable = jnp.take_along_axis(order, chosen, axis=1) < 2.0
    rows = jnp.sort(jnp.where(usable, chosen, length - 1), axis=1).astype(jnp.int32)
    again = jnp.pad(rows[:, 1:] == rows[:, :-1], ((0, 0), (1, 0)))
    weight = jnp.take_along_axis(batch.weight, rows, axis=1)
    return Starts(batch, rows, jnp.where(again, 0.0, weight))


def batch_key(batch: Batch) -> Any:
    """A key of what a batch holds: the same for the same text."""
    return jax.random.key(jnp.sum(batch.tokens, dtype=jnp.int32).astype(jnp.uint32))


class Tally:
    """Figures of drafts by place, added up place after place.

    Args:
        starts: where the drafts begin.
        known: i32[B, T + 1], draft ids of the text; -1 where there are none.
        certain: tokens of a verify that are emitted whatever was drafted.
    """

    def __init__(self, starts: Starts, known, *, certain: int = 1):
        self._starts, self._known = starts, known
        self._figures: dict[str, list[Any]] = {"loss": [], "agree": []}
        self._run = jnp.ones(starts.rows.shape)
        self._accept_len = certain * self._run

    def usable(self, place: int):
        """f32[B, A], 1 where a start's token at this place is there to be foreseen."""
        return self._counted(place) * (self._label(place) >= 0)

    def mean(self, x, place: int):
        """Mean of `x: f32[B, A]` over the usable starts."""
        weight = self.usable(place)
        return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1.0)

    def add(self, place: int, logits, loss, **others):
        """Takes in a place: f32[B, A, Vd] logits, f32[B, A] losses and other figures. Returns the mean loss."""
        for name, value in {"loss": loss, **others}.items():
            self._figures.setdefault(name, []).append(self.mean(value, place))
        hit, counted = (jnp.argmax(logits, axis=-1) == self._label(place)).astype(jnp.float32), self._counted(place)
        self._figures["agree"].append(jnp.sum(hit * counted) / jnp.maximum(jnp.sum(counted), 1.0))
        self._run = self._run * hit * counted
        self._accept_len = self._accept_len + self._run
        return self._figures["loss"][-1]

    def metrics(self) -> dict[str, Any]:
        """As of `draft_loss`."""
        starts, num_places = self._starts, len(self._figures["loss"])
        num, length = starts.batch.weight.shape
        whole = starts.counts * starts.at(starts.batch.weight, num_places)
        flat = (starts.rows + jnp.arange(num)[:, None] * length).reshape(-1)
        lens, verifies = mean_accept_len(self._accept_len.reshape(-1), whole.reshape(-1), flat, starts.batch.weight)
        figures = {name: jnp.stack(values) for name, values in self._figures.items()}
        return jax.tree.map(jax.lax.stop_gradient, figures | {"accept_len": lens, "verifies": verifies})

    def _counted(self, place: int):
        return self._starts.counts * self._starts.at(self._starts.batch.weight, 1 + place)

    def _label(self, place: int):
        return self._starts.at(self._known[:, 1:], 1 + place)
