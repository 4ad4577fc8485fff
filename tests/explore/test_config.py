"""What can be explored, and what is refused."""

import dataclasses
import re

import pytest
from explore.kit import config

from jspec.explore import ExploreRequest


@pytest.mark.parametrize(
    ("requests", "settings", "message"),
    [
        ((), {}, "requests=() must hold at least one"),
        (["1+1"] * 9, {}, "requests has 9 entries, at most 8"),
        (["2+2"], {"rows": 0}, "rows=0 must be a whole number from 1 to 8"),
        (["2+2"], {"rows": True}, "rows=True must be a whole number"),
        (["2+2"], {"pages": 0}, "pages=0 must be"),
        (["2+2"], {"page_size": 0}, "page_size=0 must be"),
        (["2+2"], {"verify_width": 9}, "verify_width=9 must be"),
        (["2+2"], {"verify_width": 3, "alloc_len": 2}, "alloc_len=2 must be a whole number from 3"),
        (["2+2"], {"depth": 4}, "depth=4 must be a whole number from 0 to 3"),
        (["2+2"], {"depth": 1.0}, "depth=1.0 must be"),
        (["2+2"], {"max_prefill_rows": 0}, "max_prefill_rows=0 must be"),
        (["2+2"], {"lookahead": -1}, "lookahead=-1 must be"),
        (["2+2"], {"reserve_windows": -1}, "reserve_windows=-1 must be"),
        (["2+2"], {"new_token_ratio": 1.5}, "new_token_ratio=1.5 must be from 0 to 1"),
        (["2+2"], {"policy": "random"}, "policy='random' must be one of fcfs"),
        (["2+2"], {"stops": "never"}, "stops='never' must be one of token"),
        (["5+2"], {"max_prefill_tokens": 1}, "max_prefill_tokens=1 must be at least 2"),
        (["5+2"], {"max_prefill_tokens": 2, "lookahead": 1, "pages": 9}, "max_prefill_tokens=2 must be at least 3"),
        (["2+2", "9+2"], {"pages": 6}, "pages=6 cannot hold request 9+2: alone it comes to 7 pages of 2 tokens"),
        (["240+9"], {"pages": 240}, "at most 250 can be explored"),
    ],
)
def test_what_cannot_be_explored_is_refused(requests, settings, message):
    with pytest.raises(ValueError, match="^.*" + re.escape(message)):
        config(*requests, **settings)


@pytest.mark.parametrize("text", ["", "3", "3+", "3x4", "3+4,shared", "3+4,colour=1", "3+4,shared=x", "a+b"])
def test_a_request_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=r"must read like \"3\+4\""):
        ExploreRequest.parse(text)


@pytest.mark.parametrize("text", ["0+4", "3+0", "3+4,shared=4", "3+4,priority=1000"])
def test_a_request_out_of_range_is_refused(text):
    with pytest.raises(ValueError, match="must be a whole number"):
        ExploreRequest.parse(text)


@pytest.mark.parametrize("text", ["3+4", "3+4,shared=2", "3+4,priority=1", "3+4,shared=3,priority=2"])
def test_a_request_is_told_as_it_was_read(text):
    assert str(ExploreRequest.parse(text)) == text


def test_limits():
    small = config("2+4", "5+1", pages=12, verify_width=3, depth=2)
    assert small.limits.context_len == 6 and small.limits.alloc_len == 3 and small.limits.reserve_len == 9
    assert small.limits.max_prefill_tokens == 12 and small.plan_limits == small.limits
    less = dataclasses.replace(small, reserve_windows=2)
    assert less.plan_limits.reserve_len == 6 and less.limits == small.limits
