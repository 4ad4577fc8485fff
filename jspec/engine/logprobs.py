"""Log-probabilities, from the bits that the device sends to what a user reads."""

import dataclasses

import numpy as np

from jspec.config import MAX_LOGPROBS


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token, before temperature, penalties and filters. Natural logarithms."""

    token_id: int
    logprob: float
    top: dict[int, float] = dataclasses.field(default_factory=dict)
    """The likeliest tokens there, most likely first; as many as were asked for."""


def read_logprobs(table: np.ndarray, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
    """Of some tokens, from `table: i32[n, COLUMNS]`; see `token_logprobs`."""
    table = np.ascontiguousarray(table)
    own = table[:, 0].view(np.float32).tolist()
    ids = table[:, 1 : 1 + num_top].tolist()
    values = np.ascontiguousarray(table[:, 1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + num_top]).view(np.float32).tolist()
    return [
        TokenLogprob(token, logprob, {k: v for k, v in zip(*top, strict=True) if k >= 0})
        for token, logprob, *top in zip(token_ids, own, ids, values, strict=True)
    ]
