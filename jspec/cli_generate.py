"""What `jspec generate` does once its options are understood: read prompts, build an engine that holds them, decode, print."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable

import typer

from jspec.bench.fitting import fit_config
from jspec.bench.prompts import FilePrompt, check_readable, encode_prompt, read_prompt_file
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Emission, Engine, RequestOutput
from jspec.engine.meters import Meters
from jspec.models.loading import load_model
from jspec.models.tokenizer import Tokenizer
from jspec.spec_workers import check_algorithm

SUMMARY_KEYS = (
    "tokens",
    "retractions",
    "verifies",
    "accept_length",
    "tokens_per_s",
    "host_ms_per_iteration",
    "exposed_host_ms_per_iteration",
    "run_ahead",
    "compiles_after_warmup",
)


@dataclasses.dataclass
class AskedPrompt:
    """A prompt of the command line and what becomes of it before it runs."""

    rid: str
    text: str
    where: str  # "file:line", or ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    refusal: str | None = None


class InTurn:
    """Prints texts that grow side by side one after the other, in order: what is out of turn waits.

    Args:
        headings: of each text, by name, in order; None for no heading.
    """

    def __init__(self, headings: dict[tuple[str, int], str | None]):
        self._headings, self._open = headings, list(headings)
        self._waiting: dict[tuple[str, int], list[str]] = {name: [] for name in headings}
        self._closed: set[tuple[str, int]] = set()
        self._begin()

    def write(self, name: tuple[str, int], text: str) -> None:
        """More of a text."""
        self._waiting[name].append(text)
        self._print()

    def drop(self, name: tuple[str, int]) -> None:
        """There will be no such text."""
        self._open.remove(name)

    def close(self, name: tuple[str, int]) -> None:
        """The text is complete."""
        self._closed.add(name)
        self._print()

    def _begin(self) -> None:
        if self._open and (heading := self._headings[self._open[0]]) is not None:
            typer.secho(heading, bold=True)

    def _print(self) -> None:
        while self._open:
            name = self._open[0]
            typer.echo("".join(self._waiting[name]), nl=False)
            sys.stdout.flush()
            self._waiting[name].clear()
            if name not in self._closed:
                return
            typer.echo()
            self._open.pop(0)
            self._begin()


def _answer(of: Emission | RequestOutput) -> tuple[str, int]:
    return of.rid, of.index


def _heading(prompt: AskedPrompt, index: int | None) -> str:
    name = prompt.rid if index is None else f"{prompt.rid} #{index}"
    return f"--- {name}: {' '.join(prompt.text.split())[:60]}"


class Generation:
    """One run of `jspec generate`.

    Args:
        texts: prompts of the command line.
        prompt_file: more of them; see `read_prompt_file`.
        chat: see `encode_prompt`.
        config: of the engine; see `fit_config` for what is cut to the prompts' need.
        params: of every request.
        progress: as of `Engine`.
        error: prints one line about a request that was refused or failed.

    Raises:
        OSError, TypeError, ValueError: a file, the model or the configuration cannot be used. A prompt that cannot run is no such case: it is refused
            when its turn comes.
    """

    def __init__(
        self,
        texts: list[str],
        prompt_file: str | None,
        *,
        chat: bool | None,
        config: EngineConfig,
        params: SamplingParams,
        progress: Callable[..., Iterable],
        error: Callable[[str], None],
    ):
        found = [FilePrompt(text, "") for text in texts] + (read_prompt_file(prompt_file) if prompt_file else [])
        if not found:
            raise ValueError("no prompt: give --prompt or --prompt-file")
        self._prompts = [AskedPrompt(f"r{i}", prompt.text, prompt.where) for i, prompt in enumerate(found, 1)]
        self._params, self._error, self._ok = params, error, True
        check_algorithm(config)
        loaded = load_model(
            config.model,
            kernels=config.kernels,
            tensor_parallel=config.tensor_parallel,
            data_parallel=config.data_parallel,
        )
        self._tokenizer: Tokenizer = check_readable(loaded, chat)
        longest = config.context_len or loaded.target.facts.context_len
        for prompt in self._prompts:
            self._encode(prompt, chat, longest)
        able = [len(prompt.token_ids) for prompt in self._prompts if prompt.refusal is None]
        config = fit_config(config, able * params.n, max_new_tokens=params.max_new_tokens, model_context_len=longest)
        self._algorithm = config.algorithm
        self._engine = None
        if able:
            self._engine = Engine(
                config,
                target=loaded.target,
                target_name=loaded.name,
                tokenizer=loaded.tokenizer,
                progress=progress,
            )

    def run(self, *, stream: bool, as_json: bool) -> bool:
        """Decodes and prints everything, in the order of the prompts; returns whether no request was refused or failed. To be called once."""
        if self._engine is not None and self._engine.metrics_port is not None:
            typer.secho(f"metrics at http://localhost:{self._engine.metrics_port}/metrics", err=True, dim=True)
        headings = len(self._prompts) > 1 and not as_json
        unable = [p for p in self._prompts if p.refusal]  # before they are asked
        answers = [(p, i) for p in self._prompts for i in range(1 if p.refusal else self._params.n)]
        headings |= len(answers) > 1 and not as_json
        out = InTurn(
            {
                (p.rid, i): _heading(p, i if self._params.n > 1 and not p.refusal else None) if headings else None
                for p, i in answers
            }
        )
        for prompt in self._prompts:
            if (refused := self._submit(prompt)) is not None:
                for index in range(1, 1 if prompt in unable else self._params.n):
                    out.drop((prompt.rid, index))
                self._finish(out, refused, "" if not as_json else self._json(refused))
        while self._engine is not None and self._engine.has_work:
            for emission in self._engine.step():
                text = ""
                if stream and not as_json:
                    text = emission.text or ""
                elif emission.output is not None:
                    text = self._json(emission.output) if as_json else emission.output.text or ""
                if emission.output is None:
                    out.write(_answer(emission), text)
                else:
                    self._finish(out, emission.output, text)
        if self._engine is not None:
            self._engine.close()
        self._print_summary(as_json)
        return self._ok

    def _encode(self, prompt: AskedPrompt, chat: bool | None, context_len: int) -> None:
        """Token ids of a prompt, or why it is refused before anything is built for it."""
        try:
            if not prompt.text:
                raise ValueError("prompt is empty: a request needs at least one token")
            prompt.token_ids = encode_prompt(self._tokenizer, prompt.text, chat=chat)
            if len(prompt.token_ids) >= context_len:
                raise ValueError(
                    f"prompt has {len(prompt.token_ids)} tokens, but context_len={context_len} must hold it and one output token: shorten it"
                )
        except ValueError as error:
            prompt.refusal = str(error)

    def _submit(self, prompt: AskedPrompt) -> RequestOutput | None:
        """Queues a prompt, or says why not."""
        if prompt.refusal is None and self._engine is not None:
            try:
                self._engine.submit(prompt.token_ids, self._params, rid=prompt.rid)
                return None
            except (TypeError, ValueError) as error:
                prompt.refusal = str(error)
        return RequestOutput(
            rid=prompt.rid,
            prompt_token_ids=prompt.token_ids,
            token_ids=[],
            text="",
            finish_reason="refused",
            accept_lens=[],
            error=f"{prompt.where}: {prompt.refusal}" if prompt.where else prompt.refusal,
        )

    def _finish(self, out: InTurn, output: RequestOutput, text: str) -> None:
        self._ok &= output.finish_reason in ("stop", "length")
        if output.error is not None:
            self._error(f"{output.rid}: {output.error}")
        out.write(_answer(output), text)
        out.close(_answer(output))

    def _json(self, output: RequestOutput) -> str:
        record = {**dataclasses.asdict(output), "algorithm": self._algorithm}
        unasked = [key for key in ("error", "logprobs", "prompt_logprobs") if record[key] is None]
        return json.dumps({key: value for key, value in record.items() if key not in unasked})

    def _print_summary(self, as_json: bool) -> None:
        s = (self._engine or Meters()).summary()
        if as_json:
            typer.echo(json.dumps({"summary": {key: getattr(s, key) for key in SUMMARY_KEYS}}))
            return
        typer.secho(
            f"{s.tokens} tokens, {s.tokens_per_s:.1f} tokens/s; {s.verifies} verifies, accept length {s.accept_length:.2f}; "
            f"host {s.host_ms_per_iteration:.2f} ms an iteration, {s.exposed_host_ms_per_iteration:.3f} ms exposed; run-ahead {s.run_ahead:.3f}",
            err=True,
            dim=True,
        )
