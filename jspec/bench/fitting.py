"""An engine no larger than its prompts need: every size less is a program less to compile."""

import dataclasses
from collections.abc import Sequence

from jspec.config import EngineConfig

ONE_PREFILL_TOKENS = 512
"""Up to this context length all prompts are padded to one prefill program: computing the padding takes less time than compiling more programs."""


def smallest_context(prompt_lens: Sequence[int], max_new_tokens: int, model_context_len: int) -> int:
    """The shortest `context_len` that holds every prompt and its output; no longer than the model's."""
    return max(2, min(max(prompt_lens, default=1) + max_new_tokens, model_context_len))


def fit_config(
    config: EngineConfig, prompt_lens: Sequence[int], *, max_new_tokens: int, model_context_len: int
) -> EngineConfig:
    """`config` with the rows and, where it names none, the context length and the program sizes that these prompts need.

    Args:
        config: what was asked for; `context_len` and buckets that it names stay.
        prompt_lens: of all prompts that will run, in tokens.
        max_new_tokens: of each.
        model_context_len: the longest context the model was made for.
    """
    context_len = config.context_len or smallest_context(prompt_lens, max_new_tokens, model_context_len)
    max_running = max(1, min(config.max_running, len(prompt_lens)))
    longest = config.max_prefill_tokens or context_len
    one_prefill = (longest,) if longest <= ONE_PREFILL_TOKENS else None
    return dataclasses.replace(
        config,
        context_len=context_len,
        max_running=max_running,
        batch_buckets=config.batch_buckets or (max_running,),
        prefill_buckets=config.prefill_buckets or one_prefill,
    )
