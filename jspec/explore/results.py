"""Outcomes as arrays: what the scheduler is given."""

import numpy as np

from jspec.explore.config import ExploreConfig
from jspec.explore.contents import EOS
from jspec.explore.outcomes import LOST, Outcomes
from jspec.state import GenerationBatchResult, RowStatus
from jspec.state.results import NEVER

NOT_EOS = 2
"""Any other token: the scheduler looks for the ends of requests only."""


class Results:
    """Results of launches under a configuration."""

    def __init__(self, config: ExploreConfig, outcomes: Outcomes):
        self._config, self._outcomes = config, outcomes
        self._results: dict[tuple, GenerationBatchResult] = {}

    def of_launch(self, launch: tuple[tuple[int, int], ...], code: int) -> GenerationBatchResult:
        """The result of a launch of these `(row, kind)`, without the tokens that the scheduler does not look at."""
        key = (launch, code)
        if key not in self._results:
            digits = [self._outcomes.digit(code, row) if kind != LOST else 0 for row, kind in launch]
            self._results[key] = self.of(digits, [[NOT_EOS] * self._config.verify_width] * len(launch))
        return self._results[key]

    def of(
        self, digits: list[int], tokens: list[list[int]], new_seq_lens: list[int] | None = None
    ) -> GenerationBatchResult:
        """A result in which batch row `i` has outcome `digits[i]`, and emits of `tokens[i]`. Outcome 0, of a lost row, is the worst that may come late: a
        longest run, which ends the request."""
        width, count = self._config.verify_width, len(digits)
        ids = np.zeros((count, width), np.int32)
        accept_lens, status = np.full(count, width, np.int32), np.full(count, RowStatus.OK, np.int32)
        stop_at = np.full(count, NEVER, np.int32)
        for i, digit in enumerate(digits):
            if not digit:
                ids[i] = EOS
                stop_at[i] = 1
                continue
            outcome = self._outcomes[digit]
            accept_lens[i], status[i] = outcome.accept, RowStatus.NOT_FINITE if outcome.failed else RowStatus.OK
            ids[i, : outcome.accept] = tokens[i][: outcome.accept]
            if outcome.token_stop:
                ids[i, outcome.token_stop - 1] = EOS
            if outcome.string_stop:
                stop_at[i] = outcome.string_stop
        lens = np.zeros(count, np.int32) if new_seq_lens is None else np.array(new_seq_lens, np.int32)
        return GenerationBatchResult(
            next_token_ids=ids, accept_lens=accept_lens, new_seq_lens=lens, status=status, stop_at=stop_at
        )
