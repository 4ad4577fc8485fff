"""One group of prompts, decoded once by one engine, with a clock on the decoding alone."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from jspec.config import SamplingParams
from jspec.engine import Emission, Engine, RequestOutput, Summary
from jspec.engine.meters import compiles

Watch = Callable[[int, Emission], None]
"""Told of each emission, with the number of its prompt in the group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A group of prompts, decoded."""

    token_ids: list[list[int]]
    accept_lens: list[list[int]]
    prefill_s: float  # from the first launch until every prompt has its first token
    decode_s: float  # from there until every prompt has its last
    compiles: int
    summary: Summary | None  # None of the bare loop

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first ones."""
        return sum(len(tokens) - 1 for tokens in self.token_ids)

    @property
    def steps(self) -> int:
        """Steps of the decoding: the rows run together, so the longest counts."""
        return max(len(lens) for lens in self.accept_lens)

    @property
    def tokens_per_s(self) -> float:
        """Of the decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


def run_engine(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, watch: Watch | None = None
) -> Run:
    """Decodes a group that fits the engine's rows.

    Raises:
        ValueError: the engine refuses a prompt.
    """
    engine.reset_summary()
    compiled = compiles()
    index = {engine.submit(prompt, params): i for i, prompt in enumerate(prompts)}
    outputs: dict[int, RequestOutput] = {}
    without_first = set(index)
    start = first = last = time.perf_counter()
    while engine.has_work:
        for emission in engine.step():
            if watch is not None:
                watch(index[emission.rid], emission)
            if emission.rid in without_first:
                without_first.remove(emission.rid)
                first = time.perf_counter()
            if emission.output is not None:
                outputs[index[emission.rid]] = emission.output
                last = time.perf_counter()
    return Run(
        token_ids=[outputs[i].token_ids for i in range(len(prompts))],
        accept_lens=[outputs[i].accept_lens for i in range(len(prompts))],
        prefill_s=first - start,
        decode_s=last - first,
        compiles=compiles() - compiled,
        summary=engine.summary(),
    )
