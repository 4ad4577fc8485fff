"""Prompt lookup: the text so far proposes its own continuation. No draft model."""

from jspec.models.target import TargetModel
from jspec.spec_workers.base import SpecWorker
from jspec.spec_workers.chain import Proposal, chain
from jspec.spec_workers.lookup import lookup


def ngram(target: TargetModel, *, num_draft_tokens: int = 8, min_ngram: int = 2, max_ngram: int = 4) -> SpecWorker:
    """Prompt lookup on the device, over the token history that the step itself keeps there: no host work, no lag.

        resolve -> look up -> verify -> accept -> PUBLISH, stash

    Args:
        target: the model.
        num_draft_tokens: `W`, the pending token and up to `W - 1` drafts.
        min_ngram, max_ngram: shortest and longest match that proposes. A single equal token proposes twice as often, but is right less: a wider verify
            costs more than that brings where it is not nearly free.

    Raises:
        ValueError: sizes that make no sense.
    """
    if num_draft_tokens < 2:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} must be at least 2: the pending token and a draft; use algorithm 'plain' for none"
        )
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram={min_ngram} and max_ngram={max_ngram} must satisfy 1 <= min_ngram <= max_ngram")

    def propose(history, lens) -> Proposal:
        return lookup(history, lens, min_ngram=min_ngram, max_ngram=max_ngram, num_drafts=num_draft_tokens - 1)

    return chain("ngram", target, propose, verify_width=num_draft_tokens, widths=(1, num_draft_tokens))
