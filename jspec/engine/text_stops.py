"""Stop strings, which only the host can see: it alone knows text."""

import dataclasses

from jspec.models.tokenizer import TokenStream
from jspec.state.results import GenerationBatchResult
from jspec.state.scheduler_state import SchedulerState


class TextStops:
    """The text of the requests that have stop strings, as far as it is settled. Others cost nothing."""

    def __init__(self):
        self._streams: dict[int, TokenStream] = {}  # by serial

    def watch(self, serial: int, stream: TokenStream) -> None:
        """A new request with stop strings."""
        self._streams[serial] = stream

    def forget(self, serial: int) -> None:
        """A request has ended."""
        self._streams.pop(serial, None)

    def find(self, state: SchedulerState, result: GenerationBatchResult) -> GenerationBatchResult:
        """The result of the oldest launch, with where its runs completed stop strings. To be called once a launch, before it is settled."""
        if not self._streams:
            return result
        launched = state.launched[0]
        serials = state.requests.serial[launched.rows] * (state.requests.epoch[launched.rows] == launched.epochs)
        stop_at = result.stop_at.copy()
        for i, serial in enumerate(serials.tolist()):
            if (stream := self._streams.get(serial)) is None:
                continue
            for place, token in enumerate(result.next_token_ids[i, : result.accept_lens[i]].tolist(), 1):
                stream.push([token])
                if stream.stopped:
                    stop_at[i] = place
                    break
        return dataclasses.replace(result, stop_at=stop_at)
