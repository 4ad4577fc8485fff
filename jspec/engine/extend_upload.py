"""What an EXTEND launch brings to the device of each prompt: the tokens it computes, and how the request wants to be sampled."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec.engine.grammars import grammar_of
from jspec.engine.logs import Request
from jspec.spec_workers.sampling import row_sampling
from jspec.spec_workers.upload import ExtendSizes, pack_extend
from jspec.state.batches import ScheduleBatch


def extend_upload(
    batch: ScheduleBatch, requests: Sequence[Request], sizes: ExtendSizes, *, seed_of: Callable[[Request], int]
) -> np.ndarray:
    """The upload of `batch`.

    Args:
        batch: an EXTEND or MIXED batch; or an IDLE one, beside others.
        requests: of its prompt rows, in order.
        sizes: of its program.
        seed_of: the seed of a request.
    """
    sampling = row_sampling([_sampling(request, seed_of(request)) for request in requests])
    parts = [np.zeros(0, np.int32)]
    next_ids = np.full((len(requests), sizes.lookahead), -1, np.int32)
    for i, request in enumerate(requests):
        tokens = request.fill_tokens()
        end = int(batch.prefix_lens[i] + batch.extend_lens[i])
        parts.append(tokens[int(batch.prefix_lens[i]) : end])
        if batch.goes_on[i]:
            following = tokens[end : end + sizes.lookahead]
            next_ids[i, : len(following)] = following
    return pack_extend(batch, np.concatenate(parts), next_ids, sampling, sizes)


def _sampling(request: Request, seed: int) -> dict[str, Any]:
    """Fields of `SamplingState`."""
    p, num_prompt = request.params, len(request.prompt)
    return {
        "temperature": p.temperature,
        "top_k": p.top_k,
        "top_p": p.top_p,
        "min_p": p.min_p,
        "seed": seed,
        "prompt_len": num_prompt,
        "stop_from": num_prompt + p.min_new_tokens if p.min_new_tokens else 0,
        "stop_token_ids": request.stop_ids,
        "repetition_penalty": p.repetition_penalty,
        "presence_penalty": p.presence_penalty,
        "frequency_penalty": p.frequency_penalty,
        "bias_ids": list(p.logit_bias),
        "bias": list(p.logit_bias.values()),
        "bad_words": request.bad_words,
        "grammar": request.serial if grammar_of(p) is not None else 0,
        "num_logprobs": -1 if p.logprobs is None else p.logprobs,
        "num_prompt_logprobs": -1 if p.prompt_logprobs is None else p.prompt_logprobs,
    }
