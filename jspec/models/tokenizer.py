"""Text to token ids and back: a value around `tokenizers.Tokenizer`."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers
import tokenizers.decoders


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A model's tokenizer with what a chat needs. Immutable; streams are made from it."""

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None  # jinja2; None where the model has none
    bos_token: str = ""
    eos_token: str = ""

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model wants around a plain text, a BOS for some and nothing for others."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def chat(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant begins to speak; a string is one user message.

        Raises:
          ValueError: the model has no chat template, or its template refuses the messages.
        """
        return self.encode(self.chat_text(messages), add_special_tokens=False)

    def chat_text(self, messages: str | Sequence[Mapping[str, Any]]) -> str:
        """The text that `chat` encodes."""
        if self.chat_template is None:
            raise ValueError(
                "chat_template is None: this model was not made for conversation; use encode(text) instead"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        try:
            return _compile(self.chat_template).render(
                messages=list(messages), add_generation_prompt=True, bos_token=self.bos_token, eos_token=self.eos_token
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def stream(
        self, *, skip_special_tokens: bool = True, stop: Sequence[str] = (), min_new_tokens: int = 0
    ) -> "TokenStream":
        return TokenStream(self, skip_special_tokens, stop, min_new_tokens)


class TokenStream:
    """Text of tokens that arrive a few at a time, up to a stop string.

    The pieces, `flush` included, join to exactly `Tokenizer.decode` of all tokens, cut before the first stop string that a token completes. What may turn
    out to be the beginning of one waits. One that is complete before `min_new_tokens` tokens are there is text like any other.

    Attributes:
        stopped: whether a stop string was found; what comes after it is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, stop: Sequence[str], min_new_tokens: int):
        self._tokenizer, self._skip, self._stop = tokenizer, skip_special_tokens, tuple(stop)
        self._min_new_tokens = min_new_tokens
        self._decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._decoded_chars = 0
        self._waiting = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that has become certain. A character whose bytes are not all here waits for them."""
        return "".join(map(self._one, token_ids))

    def flush(self) -> str:
        """What still waits, to be called when no more tokens come: an unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        rest = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip)[self._decoded_chars :]
        self._decoded_chars += len(rest)
        text, self._waiting = self._waiting + rest, ""
        return text

    def _one(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self._token_ids.append(token_id)
        piece = self._decoder.step(self._tokenizer.backend, token_id) or ""
        self._decoded_chars += len(piece)
        text = self._waiting + piece
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found and len(self._token_ids) > self._min_new_tokens:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        held = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    # The environment that model authors write for (Hugging Face's), sandboxed: a template comes with the weights and is not trusted.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
