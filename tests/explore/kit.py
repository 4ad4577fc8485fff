"""Small configurations that the tests explore."""

from jspec.explore import ExploreConfig, ExploreRequest


def config(*requests, **settings):
    """Requests as `ExploreRequest.parse` reads them."""
    return ExploreConfig(requests=tuple(ExploreRequest.parse(text) for text in requests), **settings)


SMALL = {
    "one request": config("2+4", rows=1, pages=5, verify_width=3),
    "without overlap": config("2+3", "3+2", depth=0, pages=8),
    "three launches ahead": config("1+3", "2+2", depth=3, pages=16, page_size=1, aborts=False),
    "chunks": config("5+2", "2+2", pages=8, max_prefill_tokens=2, rows=2),
    "chunks of a draft that looks ahead": config(
        "5+2,shared=5", "5+2,shared=5", lookahead=1, max_prefill_tokens=3, pages=8
    ),
    "apart": config("3+3", "2+3", mixed=False, pages=12, aborts=False),
    "prompts alike": config("4+3,shared=4", "4+2,shared=4", pages=9, aborts=False),
    "a prefix shared": config("4+2,shared=3", "3+2,shared=2", "4+2,shared=2", rows=1, pages=6, aborts=False),
    "priorities": config("2+3", "2+2,priority=1", rows=1, pages=6),
    "pages run short": config("1+9", "1+3", page_size=1, pages=13, aborts=False, stops="none"),
    "stop strings": config("2+3", rows=1, pages=8, verify_width=3, stops="both"),
    "logits that are not finite": config("3+3", "2+2", pages=10, failures=True, aborts=False, max_prefill_tokens=2),
    "a window wider than a run": config("2+3", "1+2", alloc_len=3, pages=10, aborts=False),
    "longest prefix first": config(
        "4+2,shared=4", "2+1", "4+1,shared=4", rows=1, pages=6, policy="longest-prefix", aborts=False
    ),
    "a careful admission": config("2+4", "2+3", "1+2", new_token_ratio=1.0, pages=9, aborts=False, stops="none"),
}
"""By what there is to see."""
