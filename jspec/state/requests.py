"""The request table: what the host knows of every running request, one row each, as a struct of arrays."""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from jspec.config import MAX_STOP_TOKEN_IDS


class FinishReason(enum.IntEnum):
    """Why a request ended, in rising precedence: where several hold, the highest is told. Codes ride in arrays; `NONE` is alive."""

    NONE = 0
    LENGTH = 1  # max_new_tokens or the context length was reached
    STOP = 2  # an end-of-sequence or stop token was emitted within the length
    ERROR = 3  # the target's logits were not finite: nothing can be emitted
    ABORT = 4  # the user ended it
    OUT_OF_PAGES = 5  # alone in the pool, and the pool cannot hold its next step


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request that holds no row: new, or retracted. Token content stays with the engine; the scheduler needs its length, and names of its pages."""

    serial: int  # submission number; names the request inside the state
    prompt_len: int  # tokens
    max_new_tokens: int  # tokens; already capped by the context length
    stop_token_ids: tuple[int, ...]  # empty when ends are ignored
    output_len: int = 0  # tokens it had emitted when it was retracted: they are prefilled with the prompt
    priority: int = 0  # higher goes first where the policy asks for it, and is retracted last
    page_keys: tuple[
        bytes, ...
    ] = ()  # of its prompt's pages, from the first on, see `PrefixCache`; (): it shares nothing

    @property
    def fill_len(self) -> int:
        """Tokens its prefill covers."""
        return self.prompt_len + self.output_len


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestTable:
    """Lengths and flags of the requests that hold a row. `R` rows; row 0 is padding and never given out."""

    serial: Any  # i32[R]    submission number; 0 = the row is free         writer: admit, release
    epoch: Any  # i32[R]    +1 at every release; a result of an older epoch changes nothing
    prompt_len: Any  # i32[R]    tokens                                          writer: admit
    output_len: (
        Any  # i32[R]    tokens settled, those after a stop included     writer: settle; admit, of a retracted request
    )
    fill_len: Any  # i32[R]    tokens its prefill covers: prompt, and output of before a retraction; decode starts when they are committed
    priority: Any  # i32[R]    writer: admit
    max_new_tokens: Any  # i32[R]    tokens                                          writer: admit
    stop_token_ids: Any  # i32[R, S] -1 padded                                       writer: admit
    to_finish: Any  # bool[R]   abort asked for; taken at the next settle        writer: abort
    last_launch: (
        Any  # i32[R]    forward_iter of the newest launch with this row; the relay generation the next one must find
    )


def init_requests(max_running: int) -> RequestTable:
    """An empty table with rows `1..max_running` free."""
    rows = max_running + 1

    def zeros():
        return np.zeros(rows, np.int32)

    return RequestTable(
        serial=zeros(),
        epoch=zeros(),
        prompt_len=zeros(),
        output_len=zeros(),
        fill_len=zeros(),
        priority=zeros(),
        max_new_tokens=zeros(),
        stop_token_ids=np.full((rows, MAX_STOP_TOKEN_IDS), -1, np.int32),
        to_finish=np.zeros(rows, bool),
        last_launch=zeros(),
    )


def seqlen(requests: RequestTable):
    """`i32[R]` prompt + output tokens the host has accepted (`Req.seqlen`)."""
    return requests.prompt_len + requests.output_len


def is_filling(requests: RequestTable, kv_committed_len):
    """`bool[R]` rows of which a part of the prompt is still to be prefilled: at most one row, for chunks go one after another."""
    return (requests.serial > 0) & (kv_committed_len < requests.fill_len)


def has_started(requests: RequestTable):
    """`bool[R]` rows whose prefill is settled: their pending token is known."""
    return (requests.serial > 0) & (seqlen(requests) > requests.fill_len)
