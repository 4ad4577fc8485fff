"""What an EXTEND launch brings to the device of each prompt: the tokens it computes, and how the request wants to be sampled."""

from collections.abc import Callable, Sequence

import numpy as np

from jspec.config import MAX_STOP_TOKEN_IDS
from jspec.engine.logs import Request
from jspec.spec_workers.upload import ExtendSizes, RowSampling, pack_extend
from jspec.state.batches import ScheduleBatch


def extend_upload(
    batch: ScheduleBatch, requests: Sequence[Request], sizes: ExtendSizes, *, seed_of: Callable[[Request], int]
) -> np.ndarray:
    """The upload of `batch`.

    Args:
        batch: an EXTEND or MIXED batch.
        requests: of its prompt rows, in order.
        sizes: of its program.
        seed_of: the seed of a request.
    """
    params = [request.params for request in requests]
    sampling = RowSampling(
        top_k=np.array([p.top_k for p in params], np.int32),
        seed=np.array([seed_of(request) for request in requests], np.uint32),
        temperature=np.array([p.temperature for p in params], np.float32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        stop_from=np.array([len(r.prompt) + r.params.min_new_tokens for r in requests], np.int32),
        stop_token_ids=np.array([_padded(request.stop_ids) for request in requests], np.int32),
    )
    parts = []
    next_ids = np.full((len(requests), sizes.lookahead), -1, np.int32)
    for i, request in enumerate(requests):
        tokens = request.fill_tokens()
        end = int(batch.prefix_lens[i] + batch.extend_lens[i])
        parts.append(tokens[int(batch.prefix_lens[i]) : end])
        if batch.goes_on[i]:
            following = tokens[end : end + sizes.lookahead]
            next_ids[i, : len(following)] = following
    return pack_extend(batch, np.concatenate(parts), next_ids, sampling, sizes)


def _padded(ids: tuple[int, ...]) -> tuple[int, ...]:
    return (*ids, *[-1] * (MAX_STOP_TOKEN_IDS - len(ids)))
