"""Whether two decodings of a prompt are the same, token for token, and how near the choice was where they are not."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspec.models.target import TargetModel
from jspec.state.batches import ForwardBatch, ForwardMode

NEAR_TIE = 1e-4
"""Two logits nearer than this may change places when a matrix product has another shape. Such a difference is counted and printed, never hidden."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token of a prompt on which two decodings disagree."""

    prompt: int
    position: int  # in the output
    plain_token: int | None  # None: that decoding had ended
    token: int | None
    logit_gap: float | None  # between the two tokens, by one forward over all that came before

    @property
    def near_tie(self) -> bool:
        return self.logit_gap is not None and self.logit_gap <= NEAR_TIE


def next_logits(target: TargetModel, tokens: Sequence[int], *, page_size: int = 64) -> jax.Array:
    """f32[V], logits of the token after `tokens`, from one forward over all of them."""
    length = len(tokens)
    num_pages = -(-length // page_size)
    positions = jnp.arange(length, dtype=jnp.int32)
    batch = ForwardBatch(
        input_ids=jnp.asarray(tokens, jnp.int32),
        positions=positions,
        slots=positions + page_size,  # page 0 is the sink
        rows=jnp.ones(1, jnp.int32),
        prefix_lens=jnp.zeros(1, jnp.int32),
        extend_lens=jnp.full(1, length, jnp.int32),
        page_table=jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None],
        forward_mode=ForwardMode.EXTEND,
        query_len=None,
    )

    @jax.jit
    def forward(params, batch, kv_pages):
        out = target.forward(params, batch, kv_pages, recurrent=target.init_recurrent(2, 0, page_size))
        return target.logits(params, out.hidden[-1:])[0]

    return forward(target.params, batch, target.init_kv(num_pages, page_size))


def first_difference(
    target: TargetModel, prompt: int, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """Where `other` leaves `plain`, two outputs of the same prompt; None if they are the same."""
    if list(plain) == list(other):
        return None
    shorter = min(len(plain), len(other))
    position = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
    if position == shorter:
        ended = (plain[position] if len(plain) > shorter else None, other[position] if len(other) > shorter else None)
        return Difference(prompt=prompt, position=position, plain_token=ended[0], token=ended[1], logit_gap=None)
    logits = next_logits(target, [*prompt_ids, *plain[:position]])
    return Difference(
        prompt=prompt,
        position=position,
        plain_token=plain[position],
        token=other[position],
        logit_gap=abs(float(logits[plain[position]] - logits[other[position]])),
    )
