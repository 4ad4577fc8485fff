"""Pure transitions on host state. Those that run every iteration take NumPy arrays in the engine and traced arrays under `jit`."""

from jspec.scheduler.adapt import Depth, DepthRules, initial_depths, observe, slot_of
from jspec.scheduler.admit import admit, chunk_len, pages_to_finish, preempt, submit
from jspec.scheduler.extend import prepare_extend, share_prefix
from jspec.scheduler.finish import Aborted, abort, retire, settle_oldest
from jspec.scheduler.plan import Planned, launchable, plan, plan_decode, plan_prefill, plan_ranks
from jspec.scheduler.prefix_cache import cache_prefix, evict, evictable, match_prefix, touch
from jspec.scheduler.release import release
from jspec.scheduler.reserve import Reserved, max_new_pages, pages_short, reserve
from jspec.scheduler.retract import Left, enqueue, leave, make_room, retract
from jspec.scheduler.route import outstanding_tokens, route
from jspec.scheduler.settle import Settled, settle

__all__ = [
    "Aborted",
    "Depth",
    "DepthRules",
    "Left",
    "Planned",
    "Reserved",
    "Settled",
    "abort",
    "admit",
    "cache_prefix",
    "chunk_len",
    "enqueue",
    "evict",
    "evictable",
    "initial_depths",
    "launchable",
    "leave",
    "make_room",
    "match_prefix",
    "max_new_pages",
    "observe",
    "outstanding_tokens",
    "pages_short",
    "pages_to_finish",
    "plan",
    "plan_decode",
    "plan_prefill",
    "plan_ranks",
    "preempt",
    "prepare_extend",
    "release",
    "reserve",
    "retire",
    "retract",
    "route",
    "settle",
    "settle_oldest",
    "share_prefix",
    "slot_of",
    "submit",
    "touch",
]
