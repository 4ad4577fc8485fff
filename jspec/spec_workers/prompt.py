"""The first token of each prompt, and the next one of each tail: what every worker's prefill ends with."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jspec.models.target import TargetModel
from jspec.spec_workers.adjust import adjust_logits, chain_path
from jspec.spec_workers.base import DeviceState
from jspec.spec_workers.forward import Prefill, next_tokens
from jspec.spec_workers.logprobs import token_logprobs
from jspec.spec_workers.sampling import sample
from jspec.state.results import RowStatus


class Sampled(NamedTuple):
    """Of `B` rows, tails last, and `T` packed tokens."""

    tokens: Any  # i32[B, 1]  meaningless in the middle of a prompt
    status: Any  # i32[B]
    logprobs: Any  # i32[B, 1, COLUMNS] of these tokens, i32[T, COLUMNS] of those that follow each packed one


def sample_prompts(target: TargetModel, params, device: DeviceState, prompts: Prefill, hidden) -> Sampled:
    """Samples after the last token of each row. `hidden: [T, H]`, of the packed tokens."""
    batch, last, s = prompts.batch, prompts.last, device.sampling
    rows, positions = batch.rows, prompts.new_seq_lens[:, None]
    logits = target.logits(params, hidden[last])[:, None, :]
    path = chain_path(jnp.maximum(positions[:, 0] - 1, 0), batch.input_ids[last][:, None])
    logits = adjust_logits(device, rows, logits, path, table_width=device.page_table.shape[1])
    tokens, finite = sample(s, rows, logits, positions, ~prompts.goes_on[:, None])
    status = jnp.where(finite[:, 0], RowStatus.OK, RowStatus.NOT_FINITE)
    status = jnp.where(prompts.fresh, status, RowStatus.STALE_RELAY)

    asked = jnp.any(s.num_logprobs[rows] >= 0)
    own = token_logprobs(target, params, asked, hidden[last], tokens[:, 0])
    following = next_tokens(
        batch.input_ids, batch, last, jnp.where(prompts.goes_on, prompts.next_ids[:, 0], tokens[:, 0])
    )
    asked = jnp.any(s.num_prompt_logprobs[rows] >= 0)
    of_prompt = token_logprobs(target, params, asked, hidden, following)
    return Sampled(tokens, jnp.where(rows > 0, status, RowStatus.OK), (own[:, None], of_prompt))
