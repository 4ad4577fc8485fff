"""The text of a request while it runs: whole characters only, every piece once, stop strings where they end."""

import functools
import itertools

import numpy as np
import pytest
import tokenizers
from oracles import Run, make_result
from tokenizers import decoders, models, pre_tokenizers

from jspec import SamplingParams
from jspec.engine.logs import Request
from jspec.engine.text import RequestText, TextStops
from jspec.models.tokenizer import Tokenizer
from jspec.scheduler import retract
from jspec.state import FinishReason
from jspec.state.results import NEVER

TEXTS = [
    "plain",
    "naïve café — “quotes” … ½ €",
    "漢字とかな",
    "👩‍👩‍👧 🇨🇭 👍🏽",
    "aé漢😀" * 3,
    " ",
]


@functools.cache
def bytewise() -> Tokenizer:
    """A byte a token: a character of several bytes is cut by every end of a run but one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend=backend)


def ids(text):
    found = bytewise().encode(text)
    assert len(found) == len(text.encode()) and bytewise().decode(found) == text
    return found


def text_of(**options):
    return RequestText(bytewise().stream(**options))


def whole_characters(text, count):
    """Of the first `count` bytes of a text, those characters that are complete."""
    return text.encode()[:count].decode(errors="ignore")


def splits(rng, count):
    """A cut of `count` tokens into runs, of which some are empty."""
    cuts = sorted(rng.integers(0, count + 1, rng.integers(0, count + 1)).tolist())
    return list(itertools.pairwise([0, *cuts, count]))


# --- one request ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_is_a_part_of_a_character(text):
    """Byte by byte: what was taken is, each time, exactly the characters that are complete."""
    tokens, request, taken = ids(text), text_of(), ""
    for count, token in enumerate(tokens, 1):
        request.push([token])
        taken += request.take()
        assert taken == request.whole() == whole_characters(text, count)
    request.catch_up(tokens, ended=True)
    assert request.take() == "" and request.whole() == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(4))
def test_pieces_join_to_the_whole_however_they_come(text, seed):
    """Runs of any length, pushed or caught up with, taken at once, later, or never."""
    rng = np.random.default_rng(seed)
    tokens = ids(text)
    for _ in range(20):
        request, taken = text_of(), []
        for start, end in splits(rng, len(tokens)):
            if rng.random() < 0.5:
                request.push(tokens[start:end])
            else:
                request.catch_up(tokens[:end])
            assert request.whole() == whole_characters(text, end)
            if rng.random() < 0.5:
                taken.append(request.take())
                assert "".join(taken) == request.whole() and "\ufffd" not in taken[-1]
        request.catch_up(tokens, ended=True)
        assert "".join([*taken, request.take()]) == request.whole() == text


@pytest.mark.parametrize("missed", range(1, 8))
def test_catching_up_after_missed_pushes(missed):
    """Of nine bytes of three characters nobody pushed the first `missed`, or some in the middle: all are there once, and once only."""
    text = "漢字と"
    tokens = ids(text)
    request = text_of()
    request.catch_up(tokens[:missed])
    assert request.take() == request.whole() == whole_characters(text, missed)
    request.push(tokens[missed : missed + 1])
    request.catch_up(tokens[: missed + 1])  # all of it was pushed
    request.catch_up(tokens[: missed + 1])
    assert request.whole() == whole_characters(text, missed + 1)
    request.catch_up(tokens)
    assert request.take() == text[len(whole_characters(text, missed)) :] and request.whole() == text


def test_what_was_taken_is_not_taken_again():
    request = text_of()
    assert request.take() == request.whole() == ""
    request.push(ids("ab"))
    assert (request.take(), request.take(), request.whole()) == ("ab", "", "ab")
    request.push([])
    request.push(ids("c"))
    assert (request.whole(), request.take(), request.whole()) == ("abc", "c", "abc")


@pytest.mark.parametrize("text", ["é", "漢", "😀", "a漢"])
def test_a_character_that_is_cut_off_ends_as_a_sign(text):
    """No more bytes come: what is there is told as it is decoded, once."""
    tokens = ids(text)
    for count in range(1, len(tokens)):
        request = text_of()
        request.push(tokens[:count])
        before = request.take()
        request.catch_up(tokens[:count], ended=True)
        assert before + request.take() == request.whole() == bytewise().decode(tokens[:count])
        assert before == whole_characters(text, count)
        request.catch_up(tokens[:count], ended=True)
        assert request.take() == ""


def test_bytes_that_are_no_text():
    """Any sequence of them: the pieces join to what the tokenizer says of the whole."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 256, rng.integers(1, 12)).tolist()
        request, taken = text_of(), ""
        for _, end in splits(rng, len(tokens)):
            request.catch_up(tokens[:end])
            taken += request.take()
        request.catch_up(tokens, ended=True)
        assert taken + request.take() == request.whole() == bytewise().decode(tokens)


# --- stop strings of one request ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [("字",), ("x字",), ("字と", "a"), ("ax",), ("never",)])
def test_what_a_stop_string_may_take_back_waits(stop):
    """Byte by byte: what was taken never goes beyond the text before the string, and nothing comes after it."""
    text = "漢x字とa axz"
    tokens = ids(text)
    places = [text.find(one) for one in stop if one in text]
    wanted = text[: min(places)] if places else text
    request, taken = text_of(stop=stop), ""
    for token in tokens:
        request.push([token])
        taken += request.take()
        assert wanted.startswith(taken) and taken == request.whole()
        for one in stop:
            assert not any(taken.endswith(one[:n]) for n in range(1, len(one))) or request.stopped
    request.catch_up(tokens, ended=True)
    assert taken + request.take() == request.whole() == wanted and request.stopped == bool(places)


def test_what_waited_for_a_stop_string_that_did_not_come_is_told_at_the_end():
    request = text_of(stop=("abc",))
    request.push(ids("xab"))
    assert request.take() == "x"
    request.catch_up(ids("xab"), ended=True)
    assert request.take() == "ab" and request.whole() == "xab" and not request.stopped


def test_a_stop_string_before_so_many_tokens_is_text():
    request = text_of(stop=("b",), min_new_tokens=2)
    request.push(ids("abc"))
    assert not request.stopped and request.take() == "abc"
    request.push(ids("db"))
    assert request.stopped and request.take() == "d" and request.whole() == "abcd"


# --- all that are watched -------------------------------------------------------------------------------------------------------------


def a_request(serial, stop):
    params = SamplingParams(max_new_tokens=50, stop=stop)
    text = text_of(stop=params.stop, min_new_tokens=params.min_new_tokens)
    return Request(rid=str(serial), serial=serial, prompt=np.zeros(5, np.int32), params=params, stop_ids=(), text=text)


def watched(stops, **settings):
    """A run of as many requests as there are `stops`, of 5 tokens each, those that have some watched, and the requests."""
    run = Run(**{"max_running": len(stops), "alloc_len": 8, **settings})
    texts, requests = TextStops(), {}
    for serial, stop in enumerate(stops, 1):
        run.submit(serial, 5, 50)
        requests[serial] = a_request(serial, stop)
        if stop:
            texts.watch(requests[serial])
    return run, texts, requests


def read(run, texts):
    """Where the runs of the oldest launch completed stop strings."""
    before = run.results[0]
    found = texts.find(run.state, before)
    for name in ("next_token_ids", "accept_lens", "new_seq_lens", "status"):
        assert getattr(found, name) is getattr(before, name)
    run.results[0] = found
    return found.stop_at.tolist()


def test_where_each_run_completes_a_string():
    """Rows with strings and rows without, in one launch: the place of the token that completes one, across launches too, and NEVER elsewhere."""
    run, texts, requests = watched([("cd",), (), ("x", "yz"), ("é",)], depth=0)
    launches = [
        (["a", "x", "y", "a"], [NEVER] * 4),
        (["bc", "xyz", "ayx", "é"], [NEVER, NEVER, 3, 2]),
    ]
    for texts_of_runs, places in launches:
        batch = run.plan()
        run.launch(batch, [ids(text) for text in texts_of_runs])
        assert read(run, texts) == places
        _, settled = run.settle()
        for row in np.nonzero(settled.finish_reason)[0].tolist():
            texts.forget(int(batch.serials[row]))
    assert requests[3].text.whole() == "yay" and requests[4].text.whole() == "a" and requests[2].text.whole() == ""
    assert run.state.requests.serial.tolist() == [0, 1, 2, 0, 0]
    run.launch(run.plan(), [ids("de"), ids("x")])
    assert read(run, texts) == [1, NEVER] and requests[1].text.whole() == "ab" and requests[1].text.stopped


def test_nobody_is_watched_nothing_is_copied():
    """The result is the very same; so it is again when the last one that was watched has ended."""
    run, texts, requests = watched([(), ("a",)], depth=0)
    run.launch(run.plan(), [ids("a"), ids("b")])
    result = run.results[0]
    assert TextStops().find(run.state, result) is result
    assert texts.find(run.state, result) is not result and result.stop_at.tolist() == [NEVER] * 2
    texts.forget(2)
    texts.forget(2)
    assert texts.find(run.state, result) is result and requests[1].text.whole() == ""


def test_a_late_result_is_nobodys_text():
    """Request 1 ended while a launch of its row was under way: what that brings is read neither into its text nor into that of the row's next owner."""
    run, texts, requests = watched([("b",)], depth=1)
    run.launch(run.plan(), [ids("a")])
    run.launch(run.plan(), [ids("b")])
    assert read(run, texts) == [NEVER]
    run.settle()
    run.launch(run.plan(), [ids("late")])
    assert read(run, texts) == [1]
    _, settled = run.settle()
    assert settled.finish_reason.tolist() == [FinishReason.STOP] and settled.num_visible.tolist() == [1]
    texts.forget(1)
    run.submit(2, 5, 50)
    requests[2] = a_request(2, ("e",))
    texts.watch(requests[2])
    run.launch(run.plan(), [ids("x")])
    assert read(run, texts) == [NEVER]  # of the late launch
    run.settle()
    assert read(run, texts) == [NEVER]
    assert requests[1].text.whole() == "a" and requests[2].text.whole() == "x"


def test_a_retracted_request_goes_on_with_its_text():
    """It is read as it is emitted: what was settled before counts, what was under way does not, and a string may span the two."""
    run, texts, requests = watched([("abc",), ()], depth=1)
    run.launch(run.plan(), [ids("a"), ids("x")])
    run.launch(run.plan(), [ids("zz"), ids("x")])
    read(run, texts)
    run.settle()
    run.state, _ = retract(run.state, 1)
    assert read(run, texts) == [NEVER, NEVER]  # "zz" is lost
    run.settle()
    for pieces, places in ((["b"], [NEVER]), (["c", "x"], [1, NEVER])):
        run.launch(run.plan(), [ids(piece) for piece in pieces])
        assert read(run, texts) == places
        run.settle()
    assert requests[1].text.whole() == "" and requests[1].text.stopped and run.content[1][5:] == ids("abc")


def test_a_chunk_brings_no_text():
    """A launch in the middle of a prompt emits nothing: what stands in its columns is not read."""
    run, texts, requests = watched([("a",)], depth=0, page_size=4, max_prefill_tokens=4)
    run.launch(run.plan(), [[]])
    result = make_result([[]], stride=8)
    assert texts.find(run.state, result).stop_at.tolist() == [NEVER] and requests[1].text.whole() == ""
