"""Text of the requests while they run. Only the host knows text, so stop strings are found here."""

import dataclasses

from jspec.engine.logs import Request
from jspec.models.tokenizer import TokenStream
from jspec.state.results import GenerationBatchResult, RowStatus
from jspec.state.scheduler_state import SchedulerState


class RequestText:
    """The text of one request, as far as it is certain: no part of a character, and nothing that a stop string may take back."""

    def __init__(self, stream: TokenStream):
        self._stream = stream
        self._pieces: list[str] = []
        self._given = 0  # pieces that were taken
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stream.stopped

    def push(self, token_ids: list[int]) -> None:
        """The request's next tokens."""
        self._pieces.append(self._stream.push(token_ids))
        self._num_tokens += len(token_ids)

    def catch_up(self, token_ids: list[int], *, ended: bool = False) -> None:
        """All tokens of the request so far, of which some may have been pushed; `ended`: no more come."""
        self.push(token_ids[self._num_tokens :])
        if ended:
            self._pieces.append(self._stream.flush())

    def take(self) -> str:
        """Text that nobody has taken yet."""
        text, self._given = "".join(self._pieces[self._given :]), len(self._pieces)
        return text

    def whole(self) -> str:
        """All of it."""
        return "".join(self._pieces)


class TextStops:
    """The requests that have stop strings, each read token by token before its launch is settled. Others cost nothing."""

    def __init__(self):
        self._texts: dict[int, RequestText] = {}  # by serial

    def watch(self, request: Request) -> None:
        """A new request with stop strings."""
        self._texts[request.serial] = request.text

    def forget(self, serial: int) -> None:
        """A request has ended."""
        self._texts.pop(serial, None)

    def find(self, state: SchedulerState, result: GenerationBatchResult) -> GenerationBatchResult:
        """The result of the oldest launch, with where its runs completed stop strings. To be called once a launch, before it is settled."""
        if not self._texts:
            return result
        launched = state.launched[0]
        serials = state.requests.serial[launched.rows] * (state.requests.epoch[launched.rows] == launched.epochs)
        stop_at, requests = result.stop_at.copy(), state.requests
        for i, serial in enumerate(serials.tolist()):
            if (text := self._texts.get(serial)) is None or result.status[i] == RowStatus.NOT_FINITE:
                continue
            row = launched.rows[i]
            # What lies behind the request's end is none of its text.
            length = min(int(result.accept_lens[i]), int(requests.max_new_tokens[row] - requests.output_len[row]))
            for place, token in enumerate(result.next_token_ids[i, :length].tolist(), 1):
                text.push([token])
                if text.stopped:
                    stop_at[i] = place
                if text.stopped or token in requests.stop_token_ids[row]:
                    break
        return dataclasses.replace(result, stop_at=stop_at)
