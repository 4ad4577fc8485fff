"""`publish`, `stash`, `resolve`: pure functions over a row-indexed pytree."""

from jspec.future_map.relay import FutureMap, Resolved, init_future_map, publish, resolve, stash

__all__ = ["FutureMap", "Resolved", "init_future_map", "publish", "resolve", "stash"]
