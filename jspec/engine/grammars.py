"""Structured output: which tokens a grammar allows, at every node of a verify.

The grammars are `llguidance`'s. What a node may be followed by is a function of the tokens before it, and those are known on the device first: the verify of
a launch may begin before the host has seen the one before it. So the device asks: a program that has a row with a grammar calls back for the masks, with the
tokens themselves, and nothing is kept waiting in between. No other program calls, and without `EngineConfig.structured_output` none is built to.
"""

import dataclasses
import json
import threading
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from jspec.config import SamplingParams
from jspec.models.target import TargetFacts
from jspec.models.tokenizer import Tokenizer


@dataclasses.dataclass
class _Open:
    """A grammar in use. `tokens`: what the matcher has consumed, the tokens that are output for good."""

    matcher: llguidance.LLMatcher
    tokens: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None


class Grammars:
    """The grammars of an engine's requests; called by its programs, from the runtime's thread.

    Args:
        tokenizer: of the model.
        vocab_size: of the model's logits.
        eos_token_ids: tokens that end a text that is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._words = -(-vocab_size // 32)
        self._only_ends = np.zeros(self._words * 32, bool)
        self._only_ends[list(eos_token_ids)] = True
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()

    def open(self, serial: int, params: SamplingParams) -> None:
        """A request wants its output to follow a grammar.

        Raises:
            ValueError: the grammar is none.
        """
        kind: Any
        kind, text = grammar_of(params) or ("", "")
        try:
            grammar = llguidance.grammar_from(kind, text)
            error = llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as problem:
            error = str(problem)
        if error:
            raise ValueError(f"{kind} is no grammar that can be followed: {error.strip()}")
        with self._lock:
            self._open[serial] = _Open(llguidance.LLMatcher(self._tokenizer, grammar))

    def close(self, serial: int) -> str | None:
        """A request has ended; what went wrong with its grammar, if anything did."""
        with self._lock:
            found = self._open.pop(serial, None)
        return found.error if found is not None else None

    def __call__(self, serials, prompt_lens, starts, before, tokens, depths, above) -> np.ndarray:
        """Bit masks of the tokens that may follow each node: `u32[B, W, ceil(V / 32)]`, all ones in rows without a grammar.

        Args:
            serials: i32[B], 0 where there is no grammar.
            prompt_lens: i32[B].
            starts, tokens, depths, above: of a `Path`.
            before: i32[B, L], the row's tokens up to the path.
        """
        each = (np.asarray(x) for x in (serials, prompt_lens, starts, before, tokens, depths, above))
        serials, prompt_lens, starts, before, tokens, depths, above = each
        masks = np.full((*tokens.shape, self._words), -1, np.int32)
        with self._lock:
            for i in np.nonzero(serials)[0].tolist():
                if (grammar := self._open.get(int(serials[i]))) is None:
                    continue  # its request ended while this launch was under way
                output = before[i, prompt_lens[i] : starts[i]].tolist()
                is_output = starts[i] + depths[i] >= prompt_lens[i]
                try:
                    self._masks(grammar, output, tokens[i], depths[i], above[i] & is_output, masks[i])
                except Exception as error:  # nothing may be raised into a running program
                    grammar.error = f"{type(error).__name__}: {error}"
                if grammar.error is not None:
                    masks[i] = np.packbits(self._only_ends, bitorder="little").view(np.int32)
        return masks.view(np.uint32)

    def _masks(self, grammar: _Open, output: list[int], tokens, depths, above, masks) -> None:
        """Fills `masks: i32[W, V / 32]` of one row."""
        matcher = grammar.matcher
        common = 0
        while common < min(len(output), len(grammar.tokens)) and output[common] == grammar.tokens[common]:
            common += 1
        if common < len(grammar.tokens):  # the request was retracted, with a step under way
            matcher.rollback(len(grammar.tokens) - common)
        wanted = output[common:]
        taken = matcher.try_consume_tokens(wanted)
        grammar.tokens = output[: common + taken]
        if taken < len(wanted) and not matcher.is_stopped():
            grammar.error = (
                f"token {wanted[taken]} was emitted, which the grammar does not allow: {matcher.get_error()}"
            )
            return
        order = np.argsort(depths, kind="stable")
        for node in range(len(tokens)):
            path = [int(tokens[j]) for j in order if above[node, j]]
            count = matcher.try_consume_tokens(path)
            # A node that the grammar does not allow is not accepted, so nothing behind it matters.
            if count == len(path):
                fill_next_token_bitmask(matcher, masks, node)
            matcher.rollback(count)
        if matcher.is_error():
            grammar.error = matcher.get_error()


def grammar_of(params: SamplingParams) -> tuple[str, str] | None:
    """Name and text of the grammar that a request asks for; None if it asks for none."""
    given: dict[str, Any] = {name: getattr(params, name) for name in ("json_schema", "regex", "ebnf")}
    for name, text in given.items():
        if text is not None:
            return name, text if isinstance(text, str) else json.dumps(text)
    return None


def check_grammar_use(tokenizer: Tokenizer | None, facts: TargetFacts) -> Tokenizer:
    """The tokenizer.

    Raises:
        ValueError: no request could follow a grammar.
    """
    if tokenizer is None:
        raise ValueError("structured_output=True needs a tokenizer: a grammar is about text")
    if not facts.eos_token_ids:
        raise ValueError("structured_output=True needs a model with an end-of-sequence token: it ends what is complete")
    return tokenizer
