"""Tokens of the requests, and the names of their pages. A request's tokens depend on their place alone, as under greedy decoding."""

import functools

import numpy as np

from jspec.explore.config import ExploreConfig
from jspec.explore.violation import require
from jspec.state.prefix_cache import page_keys

EOS = 1
"""The token that ends a request. No other is told apart from its neighbours by the scheduler."""


class Contents:
    """Prompts and outputs. Requests that share the first tokens of their prompts share nothing else; prompts that are shared to the end go on alike.

    The tokens after an end-of-sequence token in a run are those that would have been there without it.
    """

    def __init__(self, config: ExploreConfig):
        self._config = config
        # No frontier comes further, not even that of a row whose last token is unsettled.
        self._longest = config.context_len + (config.depth + 2) * config.verify_width + config.lookahead
        self._tokens = [self._sequence(index) for index in range(len(config.requests))]
        self._possible = [self._names(index) for index in range(len(config.requests))]
        self._label: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self.prompt_keys = functools.cache(self._prompt_keys)
        self.left_keys = functools.cache(self._left_keys)

    def _sequence(self, index: int) -> tuple[int, ...]:
        request = self._config.requests[index]
        stem = self._longest if request.shared == request.prompt_len else request.shared
        return tuple(10 + p if p < stem else 1000 * (index + 1) + p for p in range(self._longest))

    def tokens(self, index: int, length: int, *, eos_at: int | None = None) -> tuple[int, ...]:
        """The first tokens of a request, with an end-of-sequence token at position `eos_at`."""
        tokens = self._tokens[index][:length]
        if eos_at is None or eos_at >= length:
            return tokens
        return (*tokens[:eos_at], EOS, *tokens[eos_at + 1 :])

    def stop_token_ids(self) -> tuple[int, ...]:
        """Of every request."""
        return (EOS,) if self._config.stops in ("token", "both") else ()

    # --- pages -------------------------------------------------------------------------------------------------------

    def _prompt_keys(self, index: int) -> tuple[bytes, ...]:
        """Names of the pages of a prompt; () without a prefix cache."""
        return self._keys(self.tokens(index, self._config.requests[index].prompt_len))

    def _left_keys(self, index: int, committed: int, eos_at: int | None) -> tuple[bytes, ...]:
        """Names of what a request leaves behind that ends with so many committed positions."""
        if committed <= self._config.requests[index].prompt_len or not self._config.caches_output:
            return self.prompt_keys(index)
        return self._keys(self.tokens(index, committed, eos_at=eos_at))

    def _keys(self, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        keys = self._page_keys(tokens)
        for column, key in enumerate(keys):
            said = {names[key] for names in self._possible if key in names}
            require(said == {self._named(tokens, column)}, "a name stands for one prefix", tokens=said)
        return keys

    def _page_keys(self, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        if not self._config.prefix_cache:
            return ()
        page, ahead = self._config.page_size, self._config.lookahead
        return page_keys(np.array(tokens, np.int32), page_size=page, lookahead=ahead)

    def _named(self, tokens: tuple[int, ...], column: int) -> tuple[int, ...]:
        """What the name of a page stands for: all tokens up to its end, and those that its draft looks ahead to."""
        return tokens[: (column + 1) * self._config.page_size + self._config.lookahead]

    def _names(self, index: int) -> dict[bytes, tuple[int, ...]]:
        """All names that a page of a request may ever have, and what they stand for."""
        names: dict[bytes, tuple[int, ...]] = {}
        for eos_at in (None, *range(self._config.requests[index].prompt_len, self._longest)):
            tokens = self.tokens(index, self._longest, eos_at=eos_at)
            names.update((key, self._named(tokens, column)) for column, key in enumerate(self._page_keys(tokens)))
        return names

    def is_page_of(self, key: bytes, index: int, column: int) -> bool:
        """Whether a name stands for page `column` of a request's own tokens."""
        return self._possible[index].get(key) == self._named(self._tokens[index], column)

    def label(self, key: bytes, requests: tuple[int, ...]) -> bytes:
        """A name, or b"" if none of these requests can ever have a page of that name: then it does not matter which it is."""
        wanted = key, requests
        if wanted not in self._label:
            self._label[wanted] = key if any(key in self._possible[index] for index in requests) else b""
        return self._label[wanted]
