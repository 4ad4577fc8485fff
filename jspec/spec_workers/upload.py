"""How a planned batch crosses to the device: one freshly made array down a launch, one packed array back.

The host ships rows and the page-table delta, never the table, and never a buffer it will touch again: on CPU a NumPy array handed to JAX may be
shared with the device (jax issue 37830), so every upload is made anew.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.spec_workers.sampling import SAMPLING_COLUMNS, row_sampling
from jspec.state.batches import ScheduleBatch
from jspec.state.results import NEVER, GenerationBatchResult

if TYPE_CHECKING:
    from jspec.spec_workers.base import DeviceState

DECODE_COLUMNS = 4
EXTEND_COLUMNS = 4 + SAMPLING_COLUMNS
"""Of each prompt row, beside the tokens that follow a chunk and the pages."""
OUTCOME_COLUMNS = 3


class DecodeInputs(NamedTuple):
    """A DECODE batch on the device, padded to its bucket with row 0."""

    rows: Any  # i32[B]
    expected_iter: Any  # i32[B]  relay generation each row must hold
    forward_iter: Any  # i32[]   this launch
    first_page: Any  # i32[B]
    new_pages: Any  # i32[B, K]  -1 padded
    row_words: Any = ()  # i32[B, C] and i32[D], of a worker with a host side, see `HostSide`
    batch_words: Any = ()


class ExtendInputs(NamedTuple):
    """An EXTEND or MIXED batch on the device: `T` packed tokens of `B` rows, padded to its bucket, and the tails."""

    input_ids: Any  # i32[T]
    rows: Any  # i32[B]
    prefix_lens: Any  # i32[B]
    extend_lens: Any  # i32[B]
    forward_iter: Any  # i32[]
    sampling: Any  # i32[B, SAMPLING_COLUMNS], see `row_sampling`
    next_ids: Any  # i32[B, L]  prompt tokens that follow a chunk; -1 where the prompt ends, and the first token is to be sampled
    page_table: Any  # i32[B, P]
    tails: DecodeInputs  # running rows that go on by their pending token; of no rows in an EXTEND batch


class ExtendSizes(NamedTuple):
    """Static sizes of one prefill program."""

    num_tokens: int  # T
    num_rows: int  # B
    num_tails: int  # C
    lookahead: int  # L, at least 1
    table_width: int  # P: all pages of a row
    max_new_pages: int  # K, of a tail

    @property
    def upload_len(self) -> int:
        """Words of the upload."""
        prompts = self.num_rows * (EXTEND_COLUMNS + self.lookahead + self.table_width)
        return self.num_tokens + prompts + self.num_tails * (DECODE_COLUMNS + self.max_new_pages)


_NO_WORDS = (np.zeros((1, 0), np.int32), np.zeros(0, np.int32))


def pack_decode(batch: ScheduleBatch, *, bucket: int, words: tuple[Any, Any] | None = None) -> np.ndarray:
    """`i32[bucket, 4 + K]`: the whole upload of a DECODE launch. Its size knows nothing of context length.

    Args:
        words: of a worker with a host side, i32[b, C] and i32[D]: they lie behind the pages, the latter in each row.
    """
    b, end = batch.rows.shape[0], DECODE_COLUMNS + batch.new_pages.shape[1]
    of_rows, of_batch = words or _NO_WORDS
    behind = end + of_rows.shape[1]
    upload = np.zeros((bucket, behind + len(of_batch)), np.int32)
    upload[:b, end:behind] = of_rows
    upload[:, behind:] = of_batch
    upload[:, 2] = batch.forward_iter
    upload[:, DECODE_COLUMNS:end] = -1
    upload[:b, 0] = batch.rows
    upload[:b, 1] = batch.expected_iter
    upload[:b, 3] = batch.first_page
    upload[:b, DECODE_COLUMNS:end] = batch.new_pages
    return upload


def unpack_decode(upload, forward_iter=None, *, words: tuple[int, int] = (0, 0)) -> DecodeInputs:
    """The inverse of `pack_decode`, on the device. Tails are told their launch: there may be none to read it from. `words`: static, words of a row and of
    the launch."""
    forward_iter = upload[0, 2] if forward_iter is None else forward_iter
    in_rows = upload.shape[1] - sum(words)
    in_batch = in_rows + words[0]
    return DecodeInputs(
        rows=upload[:, 0],
        expected_iter=upload[:, 1],
        forward_iter=forward_iter,
        first_page=upload[:, 3],
        new_pages=upload[:, DECODE_COLUMNS:in_rows],
        row_words=upload[:, in_rows:in_batch],
        batch_words=upload[:1, in_batch:].reshape(-1),
    )


def pack_extend(
    batch: ScheduleBatch, tokens: np.ndarray, next_ids: np.ndarray, sampling: np.ndarray, sizes: ExtendSizes
) -> np.ndarray:
    """`i32[T + B * (4 + SAMPLING_COLUMNS + L + P) + C * (4 + K)]`: the whole upload of an EXTEND or MIXED launch.

    Args:
        batch: the plan; an IDLE one leaves everything empty.
        tokens: i32[sum of extend_lens], rows one after another.
        next_ids: i32[b, L], see `ExtendInputs`.
        sampling: i32[b, SAMPLING_COLUMNS], from `row_sampling`.
        sizes: of the program.
    """
    b, columns = batch.rows.shape[0], EXTEND_COLUMNS + sizes.lookahead
    upload = np.zeros(sizes.upload_len, np.int32)
    upload[: tokens.shape[0]] = tokens
    tails = upload.shape[0] - sizes.num_tails * (DECODE_COLUMNS + sizes.max_new_pages)
    table = upload[sizes.num_tokens : tails].reshape(sizes.num_rows, -1)
    if sizes.num_tails:
        part = upload[tails:].reshape(sizes.num_tails, -1)
        part[:, DECODE_COLUMNS:] = -1
        if batch.tails is not None:
            part[:] = pack_decode(batch.tails, bucket=sizes.num_tails)
    table[:, 3] = batch.forward_iter
    for i, column in enumerate((batch.rows, batch.prefix_lens, batch.extend_lens)):
        table[:b, i] = column
    table[:b, 4:EXTEND_COLUMNS] = sampling
    table[:b, EXTEND_COLUMNS:columns] = next_ids
    pages = np.maximum(batch.new_pages[:, : sizes.table_width], 0)
    table[:b, columns : columns + pages.shape[1]] = pages
    return upload


def unpack_extend(upload, *, sizes: ExtendSizes) -> ExtendInputs:
    """The inverse of `pack_extend`, on the device."""
    num_tokens, columns = sizes.num_tokens, EXTEND_COLUMNS + sizes.lookahead
    tails = upload.shape[0] - sizes.num_tails * (DECODE_COLUMNS + sizes.max_new_pages)
    table = upload[num_tokens:tails].reshape(sizes.num_rows, -1)
    tail_table = upload[tails:].reshape(sizes.num_tails, DECODE_COLUMNS + sizes.max_new_pages)
    return ExtendInputs(
        input_ids=upload[:num_tokens],
        rows=table[:, 0],
        prefix_lens=table[:, 1],
        extend_lens=table[:, 2],
        forward_iter=table[0, 3],
        sampling=table[:, 4:EXTEND_COLUMNS],
        next_ids=table[:, EXTEND_COLUMNS:columns],
        page_table=table[:, columns:],
        tails=unpack_decode(tail_table, forward_iter=table[0, 3]),
    )


def apply_decode(device: "DeviceState", inputs: DecodeInputs) -> "DeviceState":
    """The page-table delta of a DECODE launch, applied. Row 0 stays zero: padded entries write a zero there."""
    new = inputs.new_pages >= 0
    cols = inputs.first_page[:, None] + jnp.arange(inputs.new_pages.shape[1], dtype=jnp.int32)
    table = device.page_table.at[jnp.where(new, inputs.rows[:, None], 0), jnp.where(new, cols, 0)].set(
        jnp.where(new, inputs.new_pages, 0)
    )
    return dataclasses.replace(device, page_table=table)


def apply_extend(device: "DeviceState", inputs: ExtendInputs) -> "DeviceState":
    """Page table and sampling parameters of the prompts' rows, and the page-table delta of the tails. The whole table row of a prompt is set, so pages of
    the row's last owner are out of reach."""
    pages = jnp.pad(inputs.page_table, ((0, 0), (0, device.page_table.shape[1] - inputs.page_table.shape[1])))
    real = inputs.rows > 0

    idle = row_sampling([{}])  # of padding, which writes to row 0
    sampling = device.sampling_rows.at[inputs.rows].set(jnp.where(real[:, None], inputs.sampling, idle))
    table = device.page_table.at[inputs.rows].set(jnp.where(real[:, None], pages, 0))
    return apply_decode(dataclasses.replace(device, page_table=table, sampling_rows=sampling), inputs.tails)


def pack_outcome(tokens, accept_lens, new_seq_lens, status, words=None):
    """`i32[B, 3 + O]`: the whole download of a launch; behind it the words of a worker's host side, `i32[B, X]`."""
    head = jnp.stack([accept_lens, new_seq_lens, status], axis=1)
    return jnp.concatenate([head, tokens, *([] if words is None else [words])], axis=1).astype(jnp.int32)


def unpack_outcome(
    outcome: np.ndarray, num_rows: int, *, num_tails: int = 0, tails_at: int = 0
) -> GenerationBatchResult:
    """The result of the launch's real rows: of the first `num_rows`, as views of the download, and of the `num_tails` rows from `tails_at` on."""
    tails, outcome = outcome[tails_at : tails_at + num_tails], outcome[:num_rows]
    if num_tails:
        outcome = np.concatenate([outcome, tails])
        num_rows += num_tails
    return GenerationBatchResult(
        next_token_ids=outcome[:, OUTCOME_COLUMNS:],
        accept_lens=outcome[:, 0],
        new_seq_lens=outcome[:, 1],
        status=outcome[:, 2],
        stop_at=np.full(num_rows, NEVER, np.int32),
    )
