"""Pure transitions on host state. Those that run every iteration take NumPy arrays in the engine and traced arrays under `jit`."""

from jspec.scheduler.admit import admit, pages_to_finish, submit
from jspec.scheduler.extend import prepare_extend
from jspec.scheduler.finish import Aborted, abort, settle_oldest
from jspec.scheduler.plan import launchable, plan, plan_decode
from jspec.scheduler.release import release
from jspec.scheduler.reserve import Reserved, max_new_pages, reserve
from jspec.scheduler.settle import Settled, settle

__all__ = [
    "Aborted",
    "Reserved",
    "Settled",
    "abort",
    "admit",
    "launchable",
    "max_new_pages",
    "pages_to_finish",
    "plan",
    "plan_decode",
    "prepare_extend",
    "release",
    "reserve",
    "settle",
    "settle_oldest",
    "submit",
]
