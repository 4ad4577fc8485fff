"""Runs a target over shuffled pages, a few tokens a row at a time, and hands back plain NumPy per row."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.recurrence import Accepted
from jspec.models.target import TargetModel
from jspec.state.batches import ForwardBatch, ForwardMode

PAGE_SIZE = 4


@functools.cache
def compiled(target_forward, target_logits):
    # Compiling takes nearly all the time of these tests: half of it without LLVM's optimiser.
    @functools.partial(
        jax.jit, static_argnames="capture_layers", compiler_options={"xla_backend_optimization_level": 0}
    )
    def run(params, batch, kv_pages, capture_layers, recurrent=()):
        out = target_forward(params, batch, kv_pages, capture_layers=capture_layers, recurrent=recurrent)
        return target_logits(params, out.hidden), out

    return run


class PagedRows:
    """`B` rows, each with its own pages out of one shuffled pool. Rows grow with every call, as if all tokens were accepted."""

    def __init__(self, target: TargetModel, num_rows: int, pages_per_row: int = 8, seed: int = 0):
        self.target, self.lens = target, np.zeros(num_rows, np.int32)
        ids = np.random.default_rng(seed).permutation(np.arange(1, num_rows * pages_per_row + 1))
        self.page_table = ids.reshape(num_rows, pages_per_row).astype(np.int32)
        self.kv_pages = target.init_kv(num_rows * pages_per_row, PAGE_SIZE)
        self.recurrent = target.init_recurrent(num_rows + 1, num_rows * pages_per_row, PAGE_SIZE)
        self.run = compiled(target.forward, target.logits)

    def slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        return self.page_table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def forward(self, rows: Sequence[Sequence[int]], *, width: int | None = None, capture_layers: tuple[int, ...] = ()):
        """Feeds `rows[b]` to row `b`, packed (with padding after the last) or in `width` slots a row.

        Returns (logits per row f32[n, V], captured per row [n, M, H], hidden per row [n, H]).
        """
        extend = np.array([len(row) for row in rows], np.int32)
        starts = np.arange(len(rows)) * width if width else np.cumsum(extend) - extend
        size = len(rows) * width if width else int(extend.sum()) // 16 * 16 + 16
        ids, positions, slots = (np.zeros(size, np.int32) for _ in range(3))
        for b, row in enumerate(rows):
            at, where = slice(starts[b], starts[b] + extend[b]), self.lens[b] + np.arange(extend[b])
            ids[at], positions[at], slots[at] = row, where, self.slots(b, where)
        batch = ForwardBatch(
            input_ids=jnp.asarray(ids),
            positions=jnp.asarray(positions),
            slots=jnp.asarray(slots),
            rows=jnp.arange(1, len(rows) + 1, dtype=jnp.int32),
            prefix_lens=jnp.asarray(self.lens.copy()),
            extend_lens=jnp.asarray(extend),
            page_table=jnp.asarray(self.page_table),
            forward_mode=ForwardMode.TARGET_VERIFY if width else ForwardMode.EXTEND,
            query_len=width,
        )
        logits, out = self.run(self.target.params, batch, self.kv_pages, capture_layers, self.recurrent)
        self.kv_pages, self.recurrent = out.kv_pages, out.recurrent
        if width:
            path = jnp.broadcast_to(jnp.arange(width), (len(rows), width))
            accepted = Accepted(batch.rows, batch.prefix_lens, batch.extend_lens, path, batch.page_table)
            self.recurrent = self.target.commit(self.recurrent, out.intermediates, accepted)
        self.lens = self.lens + extend
        parts = [slice(start, start + n) for start, n in zip(starts, extend, strict=True)]
        return tuple([np.asarray(x, np.float32)[part] for part in parts] for x in (logits, out.captured, out.hidden))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Row 0 alone: greedy continuation of a prompt."""
        (logits,), _, _ = self.forward([prompt])
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < num_tokens:
            (logits,), _, _ = self.forward([tokens[-1:]], width=1)
            tokens.append(int(logits[-1].argmax()))
        return tokens
