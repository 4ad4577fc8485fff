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


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request that holds no row yet. Token content stays with the engine; the scheduler needs its length only."""

    serial: int  # submission number; names the request inside the state
    prompt_len: int  # tokens
    max_new_tokens: int  # tokens; already capped by the context length
    stop_token_ids: tuple[int, ...]  # empty when ends are ignored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestTable:
    """Lengths and flags of the requests that hold a row. `R` rows; row 0 is padding and never given out."""

    serial: Any  # i32[R]    submission number; 0 = the row is free         writer: admit, release
    epoch: Any  # i32[R]    +1 at every release; a result of an older epoch changes nothing
    prompt_len: Any  # i32[R]    tokens                                          writer: admit
    output_len: Any  # i32[R]    tokens settled, those after a stop included     writer: settle
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
        max_new_tokens=zeros(),
        stop_token_ids=np.full((rows, MAX_STOP_TOKEN_IDS), -1, np.int32),
        to_finish=np.zeros(rows, bool),
        last_launch=zeros(),
    )


def seqlen(requests: RequestTable):
    """`i32[R]` prompt + output tokens the host has accepted (`Req.seqlen`)."""
    return requests.prompt_len + requests.output_len
