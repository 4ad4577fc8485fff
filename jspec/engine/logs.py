"""Token content: append-only logs, one row a running request. The scheduler knows lengths only."""

import dataclasses
from typing import Any

import numpy as np

from jspec.config import SamplingParams
from jspec.engine.logprobs import TokenLogprob
from jspec.scheduler import Settled
from jspec.state.batches import ForwardMode
from jspec.state.results import GenerationBatchResult, Launched
from jspec.state.scheduler_state import Limits


@dataclasses.dataclass(kw_only=True)
class Request:
    """What the engine keeps of a request while it waits or runs."""

    rid: str
    serial: int
    prompt: np.ndarray  # i32[prompt_len]
    params: SamplingParams
    stop_ids: tuple[int, ...]  # ids that end it
    index: int = 0  # among those that were asked for by one prompt
    bad_words: tuple[
        tuple[int, ...], ...
    ] = ()  # token sequences that may not come, each from its last token to its first
    text: Any = None  # RequestText; None without a tokenizer
    logprobs: list[TokenLogprob] | None = None  # of what it has emitted, if it asked
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of the prompt so far, None for the first token
    page_keys: tuple[bytes, ...] = ()  # of the prompt, see `page_keys`
    row: int = 0  # 0 until admitted
    kept: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # output of before its last retraction
    kept_accept_lens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int16))
    cached_tokens: int = 0  # prompt tokens it found in the prefix cache
    retractions: int = 0
    submitted_at: float = 0.0  # by `time.perf_counter`
    first_token_at: float | None = None  # the same
    is_late: bool = False  # its time ran out, and it is ending

    def fill_tokens(self) -> np.ndarray:
        """What its prefill covers: the prompt, and what it had emitted."""
        return np.concatenate([self.prompt, self.kept]) if self.kept.size else self.prompt


class TokenLogs:
    """Emitted tokens and accept lengths of the rows.

    Args:
        num_rows: `R`.
        limits: for the longest output a row can have, the tail of its last run included.
        stride: `O`.
    """

    def __init__(self, num_rows: int, limits: Limits, stride: int):
        length = limits.context_len + stride
        self._tokens = np.zeros((num_rows, length), np.int32)
        self._accepts = np.zeros((num_rows, length), np.int16)
        self._num_verifies = np.zeros(num_rows, np.int32)
        self._columns = np.arange(stride)

    def open(self, row: int, request: Request) -> None:
        """A request takes this row, with what it emitted on another one."""
        self._tokens[row, : request.kept.size] = request.kept
        self._accepts[row, : request.kept_accept_lens.size] = request.kept_accept_lens
        self._num_verifies[row] = request.kept_accept_lens.size

    def keep(self, row: int, length: int, request: Request) -> None:
        """A request loses this row: its `length` tokens go with it."""
        request.kept = self._tokens[row, :length].copy()
        request.kept_accept_lens = self._accepts[row, : self._num_verifies[row]].copy()

    def append(self, launched: Launched, settled: Settled, result: GenerationBatchResult) -> None:
        """Adds a settled launch.

        Whole runs are written: what lies past a row's settled length is never read, and its next run overwrites it. The same holds for a row that is not
        live: it writes past the settled length of whoever has the row now.
        """
        rows = launched.rows
        columns = self._columns[: result.next_token_ids.shape[1]]
        self._tokens[rows[:, None], settled.start[:, None] + columns] = result.next_token_ids
        if launched.forward_mode is ForwardMode.DECODE:
            verify = self._num_verifies[rows]
            self._accepts[rows, verify] = settled.num_visible
            self._num_verifies[rows] = verify + settled.live

    def output(self, row: int, length: int) -> list[int]:
        """The first `length` emitted tokens of a row."""
        return self.output_ids(row, length).tolist()

    def output_ids(self, row: int, length: int) -> np.ndarray:
        """The same, i32[length], as a view that the next launches write behind."""
        return self._tokens[row, :length]

    def accept_lens(self, row: int) -> list[int]:
        """Visible tokens of each verify of a row."""
        return self._accepts[row, : self._num_verifies[row]].tolist()
