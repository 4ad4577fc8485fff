"""Token sequences to train on: the target's own answers, and plain text that the user gives."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.bench.prompts import encode_prompt
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine
from jspec.models.target import TargetModel
from jspec.models.tokenizer import Tokenizer
from jspec.state.dense import round_up
from jspec.training.prompts import overlaps, training_prompts

_MIN_TOKENS = 4
"""Shorter sequences hold no token to foresee."""


class TextSequence(NamedTuple):
    """Tokens to train on."""

    tokens: np.ndarray  # i32[n]
    prompt_len: int  # tokens before the answer; 0 for plain text


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What the target is asked, and how it answers."""

    num_prompts: int = 1000
    max_new_tokens: int = 128
    max_len: int = 512
    """Longest sequence, prompt and answer, in tokens; plain text is cut into chunks of this length."""
    sampled_every: int = 4
    """Every n-th answer is sampled at `temperature` instead of greedy; 0: none."""
    temperature: float = 0.7
    max_running: int = 8
    """Answers decoded at the same time."""
    seed: int = 0

    def __post_init__(self):
        for name, low in (
            ("num_prompts", 0),
            ("max_new_tokens", 1),
            ("max_len", _MIN_TOKENS),
            ("sampled_every", 0),
            ("max_running", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} must be positive: sampled_every=0 makes every answer greedy"
            )


def write_answers(
    file: pathlib.Path,
    target: TargetModel,
    tokenizer: Tokenizer,
    options: TextOptions,
    *,
    unseen: frozenset[tuple[str, ...]] = frozenset(),
    progress=None,
) -> None:
    """Let the target answer the training prompts, and append each answer to JSONL `file` as it ends; answers that the file holds are not asked again.

    Args:
        file: one object a line: the options, then number, prompt_len and tokens of each answer, in the order in which they end.
        unseen: `word_runs` of texts; a prompt that overlaps them is not asked.
        progress: wraps the answers, `progress(iterable, total=n)`.
    Raises:
        ValueError: the file was made with other options.
    """
    done = _continue(file, options)
    jobs = [job for job in _prompts(tokenizer, options, unseen) if job[0] not in done]
    if not jobs:
        return
    answers = _decode(target, tokenizer, jobs, options)
    with file.open("a", encoding="utf-8") as lines:
        for number, tokens, prompt_len in progress(answers, total=len(jobs)) if progress else answers:
            record = {"number": number, "prompt_len": prompt_len, "tokens": tokens}
            lines.write(json.dumps(record, separators=(",", ":")) + "\n")
            lines.flush()


def read_answers(
    file: pathlib.Path, tokenizer: Tokenizer, options: TextOptions, *, unseen: frozenset[tuple[str, ...]] = frozenset()
) -> list[TextSequence]:
    """The first `options.num_prompts` answers in the order of their prompts, without those that repeat a text that must stay unseen."""
    records = sorted((json.loads(line) for line in _whole_lines(file)[1:]), key=lambda record: record["number"])
    found = []
    for record in records:
        tokens = np.array(record["tokens"], np.int32)
        wanted = record["number"] < options.num_prompts and len(tokens) >= _MIN_TOKENS
        if wanted and not (unseen and overlaps(tokenizer.decode(record["tokens"]), unseen)):
            found.append(TextSequence(tokens, record["prompt_len"]))
    return found


def text_chunks(
    files: Iterable[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    options: TextOptions,
    *,
    unseen: frozenset[tuple[str, ...]] = frozenset(),
) -> list[TextSequence]:
    """Plain text files, cut into chunks of `max_len` tokens; a chunk that overlaps `unseen` is left out.

    Raises:
        OSError, ValueError: a file cannot be read, is not UTF-8, or is too short.
    """
    chunks = []
    for name in files:
        try:
            text = pathlib.Path(name).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}; convert it"
            ) from None
        tokens = np.array(tokenizer.encode(text), np.int32)
        if len(tokens) < _MIN_TOKENS:
            raise ValueError(
                f"{name}: holds {len(tokens)} tokens; a text must hold at least {_MIN_TOKENS}: leave it out"
            )
        pieces = [tokens[start : start + options.max_len] for start in range(0, len(tokens), options.max_len)]
        chunks += [
            TextSequence(piece, 0)
            for piece in pieces
            if len(piece) >= _MIN_TOKENS and not (unseen and overlaps(tokenizer.decode(piece.tolist()), unseen))
        ]
    return chunks


def _prompts(tokenizer: Tokenizer, options: TextOptions, unseen: frozenset) -> Iterator[tuple[int, list[int]]]:
    """(number, tokens) of every prompt: different ones, none that overlaps `unseen`, each with room for an answer."""
    seen: set[str] = set()
    for text in training_prompts(options.seed):
        if len(seen) == options.num_prompts:
            return
        if text in seen or overlaps(text, unseen):
            continue
        number = len(seen)
        seen.add(text)
        tokens = encode_prompt(tokenizer, text)
        if len(tokens) + _MIN_TOKENS <= options.max_len:
            yield number, tokens


def _decode(
    target: TargetModel, tokenizer: Tokenizer, jobs: Sequence[tuple[int, list[int]]], options: TextOptions
) -> Iterator[tuple[int, list[int], int]]:
    """(number, prompt and answer, prompt length), as they end."""
    longest = max(len(prompt) for _, prompt in jobs) + options.max_new_tokens
    config = EngineConfig(
        algorithm="plain",
        max_running=options.max_running,
        context_len=min(options.max_len, target.facts.context_len, round_up(longest, 64)),
        batch_buckets=(options.max_running,),
    )
    engine = Engine(config, target=target, tokenizer=tokenizer)
    jobs_left = iter(jobs)
    prompt_lens: dict[str, int] = {}

    def feed() -> None:
        for number, prompt in jobs_left:
            if len(prompt) >= engine.limits.context_len:
                continue  # no room for an answer
            rid = str(number)
            prompt_lens[rid] = len(prompt)
            engine.submit(prompt, _sampling(number, options), rid=rid)
            if len(prompt_lens) >= 2 * options.max_running:  # enough to keep every row busy
                return

    feed()
    while engine.has_work:
        for emission in engine.step():
            if emission.output is not None:
                output = emission.output
                yield int(emission.rid), [*output.prompt_token_ids, *output.token_ids], prompt_lens.pop(emission.rid)
        if len(prompt_lens) < 2 * options.max_running:
            feed()


def _sampling(number: int, options: TextOptions) -> SamplingParams:
    sampled = options.sampled_every > 0 and number % options.sampled_every == options.sampled_every - 1
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature if sampled else 0.0,
        seed=(options.seed * 1_000_003 + number) % 2**32,
    )


def _continue(file: pathlib.Path, options: TextOptions) -> set[int]:
    """Numbers of the answers that the file holds; makes the file, or cuts off the line that a killed run left unfinished."""
    header = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("num_prompts", "max_running")}
    lines = _whole_lines(file) if file.exists() else []
    if not lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(header) + "\n", "utf-8")
        return set()
    found: dict[str, Any] = json.loads(lines[0])
    for name, value in header.items():
        if found.get(name) != value:
            raise ValueError(
                f"{name}={value!r}, but {file} was made with {name}={found.get(name)!r}: "
                "answers of one file must be made alike; give the same options or another work directory"
            )
    file.write_text("".join(line + "\n" for line in lines), "utf-8")
    return {json.loads(line)["number"] for line in lines[1:]}


def _whole_lines(file: pathlib.Path) -> list[str]:
    """Lines of a JSONL file, without a last one that a killed run left unfinished.

    Raises:
        ValueError: another line is damaged.
    """
    *lines, _ = file.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{file}:{number}: not valid JSON ({error}): delete this line, it will be made again"
            ) from None
    return lines
