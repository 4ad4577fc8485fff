"""Pure transitions on host state. Those that run every iteration take NumPy arrays in the engine and traced arrays under `jit`."""

from jspec.scheduler.adapt import Depth, DepthRules, initial_depths, observe, slot_of
from jspec.scheduler.admit import admit, pages_to_finish, submit
from jspec.scheduler.extend import prepare_extend
from jspec.scheduler.finish import Aborted, abort, settle_oldest
from jspec.scheduler.plan import launchable, plan, plan_decode
from jspec.scheduler.release import release
from jspec.scheduler.reserve import Reserved, max_new_pages, reserve
from jspec.scheduler.settle import Settled, settle

__all__ = [
    "Aborted",
    "Depth",
    "DepthRules",
    "Reserved",
    "Settled",
    "abort",
    "admit",
    "initial_depths",
    "launchable",
    "max_new_pages",
    "observe",
    "pages_to_finish",
    "plan",
    "plan_decode",
    "prepare_extend",
    "release",
    "reserve",
    "settle",
    "settle_oldest",
    "slot_of",
    "submit",
]
