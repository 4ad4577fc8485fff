"""Stop strings end a request where plain decoding would: at the earliest match, across tokens and runs, whatever was verified behind it."""

import functools
import itertools

import pytest
import tokenizers
from engine.kit import ACCEPT, CONTEXT, VOCAB, assert_idle, build, markov, markov_continuation, oracle_worker
from tokenizers import decoders, models

from jspec import SamplingParams
from jspec.models.tokenizer import Tokenizer

TEXTS = [f"{chr(97 + i // 8)}{chr(65 + i % 8)}" for i in range(VOCAB)]
"""Two characters a token."""


@functools.cache
def letters() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({text: i for i, text in enumerate(TEXTS)}, unk_token=TEXTS[0]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend=backend)


@functools.cache
def engine(max_running: int = 1, overlap: bool = True):
    built = build(markov(), worker=oracle_worker(), max_running=max_running, overlap=overlap)
    built.tokenizer = letters()
    return built


def ended_by(tokens, stops):
    """(tokens, text) of plain decoding that looks for the strings after each token."""
    for length in range(1, len(tokens) + 1):
        text = "".join(TEXTS[t] for t in tokens[:length])
        if places := [text.find(stop) for stop in stops if stop in text]:
            return tokens[:length], text[: min(places)]
    return tokens, "".join(TEXTS[t] for t in tokens)


@pytest.mark.parametrize("accept", ACCEPT)
@pytest.mark.parametrize("overlap", [True, False])
def test_b22_b23_b24_a_string_at_every_offset_of_a_run(accept, overlap):
    """B22, B23, B24 (sglang issue 31599, vllm pull request 47616): a token's text, the seam of two tokens, and three tokens, at every place, under caps:
    ids, text, reason, accept lengths and the stream end together."""
    start = ACCEPT[accept][4]
    first = markov_continuation(start, 16)
    chosen = engine(overlap=overlap)
    for place in range(1, 13):
        around = [TEXTS[t] for t in first[place - 1 : place + 2]]
        for stop in (around[1], around[0][1] + around[1][0], "".join(around)):
            for cap in (1, place, place + 1, place + 2, 14):
                want, text = ended_by(first[:cap], [stop])
                stopped = text != "".join(TEXTS[t] for t in first[:cap])
                chunks, pieces, output = [], [], None
                stream = letters().stream(stop=[stop])
                for emission in chosen.generate([[start]], SamplingParams(max_new_tokens=cap, stop=stop), stream=True):
                    chunks += emission.token_ids
                    pieces.append(stream.push(emission.token_ids))
                    output = emission.output
                assert (output.token_ids, output.text) == (want, text), (place, stop, cap)
                assert output.finish_reason == ("stop" if stopped else "length")
                assert chunks == want and len(want) == 1 + sum(output.accept_lens)
                assert "".join(pieces) + stream.flush() == text and stop not in text
    assert_idle(chosen)
    assert not chosen._contents[0]._text_stops._texts  # nothing is kept of a request that ended


def test_the_earliest_of_several_wins_and_neighbours_do_not_notice():
    """Strings of which the later-listed occurs first; a stop token before and behind a string; requests without strings beside."""
    starts = [group[5] for group in ACCEPT.values()]
    first = {start: markov_continuation(start, 20) for start in starts}
    prompts, params, wants = [], [], []
    for start, (early, late) in itertools.product(starts, [(3, 7), (2, 3), (6, 12)]):
        run = first[start]
        strings = (TEXTS[run[late]], TEXTS[run[early]])
        for stop, ids in ((strings, ()), (strings[:1], (run[early],)), (strings[1:], (run[late],)), ((), ())):
            prompts.append([start])
            params.append(SamplingParams(max_new_tokens=16, stop=stop, stop_token_ids=ids))
            want, text = ended_by(run[:16], stop)
            if ids and ids[0] in want:
                want = want[: want.index(ids[0]) + 1]
                text = "".join(TEXTS[t] for t in want)
            wants.append((want, text))
    outputs = engine(4).generate(prompts, params)
    assert [(output.token_ids, output.text) for output in outputs] == wants


def test_a_string_under_ignore_eos_and_one_never_met():
    start = ACCEPT["all"][1]
    first = markov_continuation(start, 12)
    params = SamplingParams(max_new_tokens=12, stop=(TEXTS[first[5]],), stop_token_ids=(first[2],), ignore_eos=True)
    (output,) = engine().generate([[start]], params)
    assert output.token_ids == first[:6] and output.finish_reason == "stop"
    (output,) = engine().generate([[start]], SamplingParams(max_new_tokens=12, stop="zZ"))
    assert output.token_ids == first and output.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "error", "words"),
    [
        ("", ValueError, "stop=('',) holds an empty string, which every text holds"),
        (3, TypeError, "stop=3 must be a string or a sequence of strings"),
        ((3,), TypeError, "stop=(3,) must be a string or a sequence of strings"),
    ],
)
def test_what_is_no_stop_string(stop, error, words):
    with pytest.raises(error) as found:
        SamplingParams(stop=stop)
    assert words in str(found.value)


def test_without_a_tokenizer_there_is_no_text_to_look_at():
    bare = build(markov(), "plain", context_len=CONTEXT)
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer"):
        bare.submit([1], SamplingParams(stop="x"))
    assert not bare.has_work
