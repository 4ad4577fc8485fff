"""What a user may set: every rule, with the field and the value in the message, and the values at its edge."""

import dataclasses
import re

import numpy as np
import pytest

from jspec.config import (
    KERNEL_BACKENDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PAGE_SIZE,
    POLICIES,
    EngineConfig,
    SamplingParams,
)

INF, NAN = float("inf"), float("nan")

BAD_SAMPLING = [
    ("max_new_tokens", ValueError, [0, -1]),
    ("max_new_tokens", TypeError, [1.0, "8", None, True, [8]]),
    ("min_new_tokens", ValueError, [-1, 129]),  # max_new_tokens is 128
    ("min_new_tokens", TypeError, [1.0, "8", None, True]),
    ("stop", ValueError, ["", ("a", "")]),
    ("stop", TypeError, [3, None, (3,), ["a", None], b"a"]),
    ("timeout_s", ValueError, [0, -1.0, NAN, INF]),
    ("timeout_s", TypeError, ["1", True]),
    ("temperature", ValueError, [-0.1, -1, INF, -INF, NAN]),
    ("temperature", TypeError, ["0.5", None, True, 1j]),
    ("top_k", ValueError, [-1, 2**31]),
    ("top_k", TypeError, [1.5, "3", None, False]),
    ("top_p", ValueError, [0, 0.0, -0.5, 1.0001, INF, NAN]),
    ("top_p", TypeError, ["1", None, True]),
    ("min_p", ValueError, [-0.01, 1.01, NAN, INF]),
    ("min_p", TypeError, ["0", None, False]),
    ("repetition_penalty", ValueError, [0, 0.0, -1, -0.5, INF, -INF, NAN]),
    ("repetition_penalty", TypeError, ["1", None, True, 1j]),
    ("presence_penalty", ValueError, [INF, -INF, NAN]),
    ("presence_penalty", TypeError, ["0", None, False, 1j]),
    ("frequency_penalty", ValueError, [INF, -INF, NAN]),
    ("frequency_penalty", TypeError, ["0", None, False, 1j]),
    ("logit_bias", TypeError, [None, 3, "3", b"3", [(3, 1.0)], ((3, 1.0),), {3}]),
    ("bad_words", ValueError, ["", ("a", "")]),
    ("bad_words", TypeError, [3, None, (3,), ["a", None], b"a", {"a": 1, 2: 3}]),
    ("json_schema", TypeError, [3, True, ["a"], b"{}", ("a", "b")]),
    ("regex", TypeError, [3, True, ["a"], b"a", {"a": 1}, re.compile("a")]),
    ("ebnf", TypeError, [3, True, ["a"], b"a", {"a": 1}]),
    ("logprobs", ValueError, [-1, MAX_LOGPROBS + 1]),
    ("logprobs", TypeError, [1.0, "3", True, False]),
    ("prompt_logprobs", ValueError, [-1, MAX_LOGPROBS + 1]),
    ("prompt_logprobs", TypeError, [1.0, "3", True, False]),
    ("n", ValueError, [0, -1, 129]),
    ("n", TypeError, [None, 1.0, "2", True]),
    ("seed", ValueError, [-1, 2**32]),
    ("seed", TypeError, [1.0, "7", True]),
    ("stop_token_ids", TypeError, [3, "3", "", (1.5,), ("2",), (True,), (None,), None, 2.5]),
    ("stop_token_ids", ValueError, [(-1,), (3, -7)]),
    ("priority", ValueError, [2**31, -(2**31) - 1]),
    ("priority", TypeError, [1.0, "1", None, True]),
    ("ignore_eos", TypeError, [1, 0, "yes", None]),
]
GOOD_SAMPLING = [
    ("max_new_tokens", [1, 10**9, np.int32(5)]),
    ("min_new_tokens", [0, 1, 128, np.int32(5)]),
    ("stop", [(), ["a", "b c"], ("\n\n",)]),
    ("timeout_s", [None, 1, 0.5, np.float32(2)]),
    ("temperature", [0, 0.0, 1e-6, 5, np.float32(0.5)]),
    ("top_k", [0, 1, 2**31 - 1, np.int64(3)]),
    ("top_p", [1, 1.0, 1e-9, np.float32(0.5)]),
    ("min_p", [0, 0.0, 1, 1.0]),
    ("repetition_penalty", [1, 1.0, 1e-6, 0.5, 100, np.float32(1.2)]),
    ("presence_penalty", [0, 0.0, -2, 2.5, np.float32(-0.5)]),
    ("frequency_penalty", [0, 0.0, -2, 2.5, np.float32(-0.5)]),
    (
        "logit_bias",
        [{}, {0: 1}, {2**31 - 1: -100.0, 5: 0}, {np.int32(3): np.float32(0.5)}, dict.fromkeys(range(64), 1.0)],
    ),
    ("bad_words", [(), ["a", "b c"], ("\n\n", " "), ("a", "a")]),
    ("json_schema", [None, "{}", {}, {"type": "object"}]),
    ("regex", [None, "[a-f]+", "("]),  # whether it can be followed is for the engine to say
    ("ebnf", [None, 'root ::= "a"', "("]),
    ("logprobs", [None, 0, 1, MAX_LOGPROBS, np.int32(5)]),
    ("prompt_logprobs", [None, 0, 1, MAX_LOGPROBS, np.int32(5)]),
    ("n", [1, 2, 128, np.int32(3)]),
    ("seed", [None, 0, 2**32 - 1, np.uint32(7)]),
    ("stop_token_ids", [(), [], [0], (5, 5), range(3), np.array([4, 2])]),
    ("priority", [0, 5, -3, 2**31 - 1, -(2**31), np.int64(7)]),
    ("ignore_eos", [True, False]),
]
BAD_ENGINE = [
    ("model", TypeError, [None, 3, b"m"]),
    ("algorithm", TypeError, [None, 3]),
    ("num_draft_tokens", ValueError, [0, -1, 33]),
    ("num_draft_tokens", TypeError, [4.0, "4", True]),
    ("num_steps", ValueError, [0, -1, 32]),
    ("num_steps", TypeError, [4.0, "4", True]),
    ("topk", ValueError, [0, -1, 33]),
    ("topk", TypeError, [None, 1.0, "2", True]),
    ("draft", TypeError, [3, b"d"]),
    ("rejection_sampling", TypeError, [1, None, "yes"]),
    ("min_draft_prob", TypeError, [None, "0.5", True]),
    ("min_draft_prob", ValueError, [-0.1, 1.5, float("nan")]),
    ("lossy_threshold", TypeError, [None, "0.5", True]),
    ("lossy_threshold", ValueError, [0, 0.0, -0.1, 1.5, float("nan")]),
    ("adaptive_steps", TypeError, [3, "1:1", (1, 2), ((1, 3),), ((1.0, (1,)),), ((1, (1.5,)),)]),
    ("adaptive_steps", ValueError, [((1, ()),), ((1, (3, 1)),), ((2, (1,)),), ((1, (1,)), (1, (2,))), ((1, (-1,)),)]),
    ("ragged_verify", ValueError, ["", "dynamic", None, 3]),
    ("draft_cache", ValueError, ["", "ring", None, 3]),
    ("sps", TypeError, [3, "", b"t"]),
    ("sps", ValueError, ["table.json"]),  # ragged_verify is "static"
    ("sts", TypeError, [3, "", b"t"]),
    ("sts", ValueError, ["temperatures.json"]),
    ("corpus", TypeError, [3, "", b"c"]),
    ("corpus_share", TypeError, [1.5, "2", True]),
    ("corpus_share", ValueError, [-1, 32, 3]),  # there is no corpus
    ("page_size", ValueError, [0, -16, 257]),
    ("page_size", TypeError, [16.0, "16", None, True]),
    ("max_running", ValueError, [0, -1, 4097]),
    ("max_running", TypeError, [8.0, None, True]),
    ("context_len", ValueError, [1, 0, -5]),
    ("context_len", TypeError, [2048.0, "2048", True]),
    ("kv_tokens", ValueError, [0, -1]),
    ("kv_tokens", TypeError, [1e6, "1000", True]),
    ("kv_memory_bytes", ValueError, [0, -1]),
    ("kv_memory_bytes", TypeError, [1e9, "1G", False]),
    ("max_prefill_tokens", ValueError, [0, -1]),
    ("max_prefill_tokens", TypeError, [1.5, "2", True]),
    ("metrics_port", ValueError, [-1, 65536]),
    ("metrics_port", TypeError, [8000.0, "8000", True]),
    ("mixed_batches", TypeError, [1, 0, None, "on"]),
    ("prefix_cache", TypeError, [1, 0, None, "on"]),
    ("policy", ValueError, ["", "lru", "FCFS", "longest_prefix", None, 3, ("fcfs",)]),
    ("schedule_conservativeness", ValueError, [0, 0.0, -0.5, INF, -INF, NAN]),
    ("schedule_conservativeness", TypeError, [None, "1", True, 1j]),
    ("batch_buckets", ValueError, [(), (0, 8), (-1, 8), (4, 2, 8), (8, 8), (1, 2), (1, 16)]),
    ("batch_buckets", TypeError, [(1.0, 8), ("8",), (True, 8), 8, "8"]),
    ("prefill_buckets", ValueError, [(), (0, 64), (128, 64), (64, 64)]),
    ("prefill_buckets", TypeError, [(64.0,), ("64",), (True,), 64, "64"]),
    ("overlap", TypeError, [1, 0, None, "on"]),
    ("structured_output", TypeError, [1, 0, None, "on"]),
    ("kernels", ValueError, ["cuda", "", "XLA"]),
    ("tensor_parallel", ValueError, [0, -2]),
    ("tensor_parallel", TypeError, [1.0, "2", None, True]),
    ("data_parallel", ValueError, [0, -2]),
    ("data_parallel", TypeError, [1.0, "2", None, True]),
    ("seed", ValueError, [-1, 2**32]),
    ("seed", TypeError, [None, 0.0, "0", False]),
    ("trace", TypeError, [1, b"a", "", True]),
    ("checked", TypeError, [1, None]),
    ("compilation_cache", TypeError, [1, None]),
]
GOOD_ENGINE = [
    ("model", ["", "a/b.gguf"]),
    ("algorithm", ["plain", "one that the list of workers may not know"]),
    ("num_draft_tokens", [None, 1, 32, np.int32(4)]),
    ("num_steps", [None, 1, 31]),
    ("topk", [1, 32]),
    ("draft", [None, "a/b"]),
    ("rejection_sampling", [True, False]),
    ("min_draft_prob", [0, 0.0, 0.4, 1]),
    ("lossy_threshold", [1, 1.0, 0.3, 1e-9]),
    ("adaptive_steps", [(), ((1, (3,)),), ((1, (0, 1, 3)), (8, (0,)))]),
    ("page_size", [1, MAX_PAGE_SIZE]),
    ("max_running", [1, 4096]),
    ("context_len", [None, 2, 10**6]),
    ("kv_tokens", [None, 1]),
    ("ragged_verify", ["static", "cap-accept", "compact"]),
    ("draft_cache", ["paged", "window"]),
    ("sps", [None]),
    ("sts", [None]),
    ("corpus", [None, "a/b.txt"]),
    ("corpus_share", [None]),
    ("kv_memory_bytes", [None, 1, 2**40]),
    ("max_prefill_tokens", [None, 1]),
    ("metrics_port", [None, 0, 65535, np.int32(9100)]),
    ("mixed_batches", [True, False]),
    ("prefix_cache", [True, False]),
    ("policy", POLICIES),
    ("schedule_conservativeness", [1, 1.0, 1e-6, 100, np.float32(0.3)]),
    ("batch_buckets", [None, (8,), (1, 2, 8), [3, 8]]),
    ("prefill_buckets", [None, (64,), (16, 100), [16, 100]]),
    ("overlap", [True, False]),
    ("structured_output", [True, False]),
    ("kernels", KERNEL_BACKENDS),
    ("tensor_parallel", [1, 2, np.int32(8)]),
    ("data_parallel", [1, 2, np.int32(8)]),
    ("seed", [0, 2**32 - 1]),
    ("trace", [None, "run.jspec"]),
    ("checked", [True, False]),
    ("compilation_cache", [True, False]),
]


def flat(table):
    return [(*row[:-1], value) for row in table for value in row[-1]]


def shown(value):
    """How a message may write a value: a sequence whole, or the entry that is wrong."""
    whole = [str(value), repr(value)]
    if isinstance(value, (tuple, list, str)):
        whole += [text for entry in value for text in (str(entry), repr(entry))]
    return whole


def refuses(kind, field, error, value):
    with pytest.raises(error) as caught:
        kind(**{field: value})
    message = str(caught.value)
    assert type(caught.value) is error
    assert re.search(rf"\b{field}=", message), message
    assert any(f"{field}={text}" in message for text in shown(value)), message


@pytest.mark.parametrize(("field", "error", "value"), flat(BAD_SAMPLING))
def test_bad_sampling(field, error, value):
    refuses(SamplingParams, field, error, value)


@pytest.mark.parametrize(("field", "error", "value"), flat(BAD_ENGINE))
def test_bad_engine(field, error, value):
    refuses(EngineConfig, field, error, value)


@pytest.mark.parametrize(("field", "value"), flat(GOOD_SAMPLING))
def test_good_sampling(field, value):
    got = getattr(SamplingParams(**{field: value}), field)
    assert got == (tuple(value) if field in ("stop_token_ids", "stop", "bad_words") else value)
    assert not isinstance(got, list)


@pytest.mark.parametrize(("field", "value"), flat(GOOD_ENGINE))
def test_good_engine(field, value):
    got = getattr(EngineConfig(**{field: value}), field)
    assert got == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("field", ["sps", "sts"])
def test_a_file_for_a_budget(field):
    assert getattr(EngineConfig(ragged_verify="compact", **{field: "a.json"}), field) == "a.json"


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_one_string_may_be_given_as_it_is(field):
    """It is one string, not a sequence of letters."""
    assert getattr(SamplingParams(**{field: "ab"}), field) == ("ab",)


@pytest.mark.parametrize("field", ["json_schema", "regex", "ebnf"])
def test_a_grammar_that_is_none(field):
    """An empty text, or one beside another; and one whose text could not end."""
    with pytest.raises(ValueError, match=f"^{field} is empty: leave it out$"):
        SamplingParams(**{field: ""})
    with pytest.raises(ValueError, match=f"^{field} needs ignore_eos=False"):
        SamplingParams(**{field: "x"}, ignore_eos=True)
    for other in {"json_schema", "regex", "ebnf"} - {field}:
        names = " and ".join(name for name in ("json_schema", "regex", "ebnf") if name in (field, other))
        with pytest.raises(ValueError, match=f"^{names} are given, but a request follows one grammar: choose one"):
            SamplingParams(**{field: "x", other: "y"})


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        ({-1: 1.0}, ValueError, "logit_bias's token id=-1 must lie in [0, 2147483647]"),
        ({2**31: 1.0}, ValueError, "logit_bias's token id=2147483648 must lie in"),
        ({4: 1.0, 1.0: 1.0}, TypeError, "logit_bias's token id=1.0 must be an integer, got float"),
        ({"3": 1.0}, TypeError, "logit_bias's token id='3' must be an integer, got str"),
        ({True: 1.0}, TypeError, "logit_bias's token id=True must be an integer, got bool"),
        ({3: NAN}, ValueError, "logit_bias[3]=nan must be finite"),
        ({4: 0, 3: -INF}, ValueError, "logit_bias[3]=-inf must be finite"),
        ({3: "1"}, TypeError, "logit_bias[3]='1' must be a number, got str"),
        ({3: None}, TypeError, "logit_bias[3]=None must be a number"),
        ({3: True}, TypeError, "logit_bias[3]=True must be a number, got bool"),
        (dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0), ValueError, "logit_bias has 65 entries, at most 64 are kept"),
    ],
)
def test_a_bad_entry_of_a_bias(bias, error, words):
    """The message names the token, and what is wrong with it or its number."""
    with pytest.raises(error) as caught:
        SamplingParams(logit_bias=bias)
    assert type(caught.value) is error and words in str(caught.value)


def test_a_bias_is_the_values_own():
    """What the caller does to the mapping later changes no request; two values with other biases are not equal, and hash all the same."""
    bias = {3: 1.0}
    value = SamplingParams(logit_bias=bias)
    bias[3], bias[4] = 2.0, 5.0
    assert value.logit_bias == {3: 1.0}
    other = SamplingParams(logit_bias=bias)
    assert value != other and {value, other, SamplingParams(logit_bias={3: 1.0})} == {value, other}


def test_two_sizes_of_the_pool_are_one_too_many():
    with pytest.raises(ValueError, match="kv_tokens=64 and kv_memory_bytes=1000 both size the KV pool"):
        EngineConfig(kv_tokens=64, kv_memory_bytes=1000)


def test_batch_buckets_end_with_max_running():
    assert EngineConfig(max_running=6, batch_buckets=(2, 6)).batch_buckets == (2, 6)
    with pytest.raises(ValueError, match=r"batch_buckets=\(2, 8\) must end with max_running=6"):
        EngineConfig(max_running=6, batch_buckets=(2, 8))


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig])
def test_configurations(kind):
    """The defaults are valid; a value can be hashed, cannot be changed, and is checked anew when replaced."""
    value = kind()
    assert value == kind() and hash(value) == hash(kind())
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.seed = 3
    with pytest.raises(ValueError, match="seed=-1"):
        dataclasses.replace(value, seed=-1)
    with pytest.raises(TypeError):
        kind(3)
    with pytest.raises(TypeError):
        kind(no_such_field=1)


def test_every_field_has_a_bad_and_a_good_value():
    for kind, bad, good in ((SamplingParams, BAD_SAMPLING, GOOD_SAMPLING), (EngineConfig, BAD_ENGINE, GOOD_ENGINE)):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert {row[0] for row in bad} == {row[0] for row in good} == fields
