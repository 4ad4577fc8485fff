"""What a request must be to be queued. Every refusal names the field, its value and the rule."""

from collections.abc import Sequence

import numpy as np

from jspec.config import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, SamplingParams
from jspec.models.target import TargetFacts
from jspec.models.tokenizer import Tokenizer
from jspec.scheduler import pages_to_finish
from jspec.state.scheduler_state import Limits

Prompt = str | Sequence[int]


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> np.ndarray:
    """Token ids of a prompt, `i64[n]`.

    Raises:
        TypeError: text without a tokenizer, or no flat sequence of integers.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("prompt is text, but the engine has no tokenizer: pass token ids")
        prompt = tokenizer.encode(prompt)
    tokens = np.asarray(prompt)
    if tokens.size and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        raise TypeError(
            f"prompt must be text or a flat sequence of token ids, got shape {tokens.shape} of {tokens.dtype}"
        )
    return tokens.astype(np.int64).reshape(-1)


def check_request(
    tokens: np.ndarray, params: SamplingParams, *, facts: TargetFacts, limits: Limits, page_size: int, num_pages: int
) -> int:
    """Refuses what cannot run; returns the most tokens the request may emit.

    Raises:
        ValueError: empty, too long, ids outside the vocabulary, more than the KV pool holds.
    """
    vocab, context = facts.vocab_size, limits.context_len
    if not len(tokens):
        raise ValueError("prompt is empty: a request needs at least one token")
    if len(tokens) >= context:
        raise ValueError(
            f"prompt has {len(tokens)} tokens, but context_len={context} must hold it and one output token: shorten it"
        )
    if (bad := tokens[(tokens < 0) | (tokens >= vocab)]).size:
        raise ValueError(f"prompt holds token id {int(bad[0])}, outside the model's vocabulary [0, {vocab})")
    if bad_stops := [t for t in params.stop_token_ids if t >= vocab]:
        raise ValueError(f"stop_token_ids holds {bad_stops[0]}, outside the model's vocabulary [0, {vocab})")
    stops = set(params.stop_token_ids) | set(facts.eos_token_ids)
    if len(stops) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"stop_token_ids and the model's end-of-sequence ids are {len(stops)} ids, at most {MAX_STOP_TOKEN_IDS} are kept: drop some"
        )
    if bad_bias := [token for token in params.logit_bias if token >= vocab]:
        raise ValueError(f"logit_bias names token id {bad_bias[0]}, outside the model's vocabulary [0, {vocab})")
    max_new_tokens = min(params.max_new_tokens, context - len(tokens))
    need = int(pages_to_finish(np.int32(len(tokens)), np.int32(max_new_tokens), limits=limits, page_size=page_size))
    if need > num_pages:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens with max_new_tokens={params.max_new_tokens} needs {need * page_size} KV tokens, reserve included, but the "
            f"pool has {num_pages * page_size}: lower max_new_tokens, or raise kv_tokens or kv_memory_bytes"
        )
    return max_new_tokens


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell the words, at the beginning of a text and after a space, each from its last token to its first.

    Raises:
        ValueError: no tokenizer, or more or longer sequences than are kept.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ValueError(f"bad_words={tuple(words)} needs a tokenizer: give the engine one, or use logit_bias")
    found: dict[tuple[int, ...], str] = {}
    for word in words:
        bare = word.lstrip(" ")
        for spelling in (bare, " " + bare) if bare else (word,):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if not ids:
                continue
            if len(ids) > MAX_BAD_WORD_LEN:
                raise ValueError(
                    f"bad_words holds {word!r}, which is {len(ids)} tokens; at most {MAX_BAD_WORD_LEN} are kept: choose a shorter part of it"
                )
            found[ids[::-1]] = word
    if len(found) > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words are {len(found)} token sequences (each word with and without a space before it), at most {MAX_BAD_WORDS} are kept: drop some"
        )
    return tuple(found)


def check_chunks(limits: Limits, *, page_size: int) -> None:
    """Raises ValueError where a long prompt could not go on: a chunk ends at a page's end, and leaves the tokens that its draft looks ahead to."""
    least = min(limits.context_len, page_size + limits.lookahead)
    if limits.max_prefill_tokens < least:
        raise ValueError(
            f"max_prefill_tokens={limits.max_prefill_tokens} must be at least {least}: a chunk is a page of page_size={page_size} tokens or more"
            + (f", and the draft looks {limits.lookahead} tokens ahead" if limits.lookahead else "")
        )


def new_token_ratios(conservativeness: float) -> tuple[float, float]:
    """The share of their remaining tokens that running requests are expected to want, at first and at last, as SGLang sets them."""
    first = min(0.7 * conservativeness, 1.0)
    return first, 0.14 * first
