"""Every state that a small configuration can reach, visited by the real transitions and checked."""

from jspec.explore.config import ExploreConfig, ExploreRequest
from jspec.explore.path import Abort, Frame, Iteration, Path, Submit, replay
from jspec.explore.search import Exploration, Found, explore
from jspec.explore.violation import Violation

__all__ = [
    "Abort",
    "Exploration",
    "ExploreConfig",
    "ExploreRequest",
    "Found",
    "Frame",
    "Iteration",
    "Path",
    "Submit",
    "Violation",
    "explore",
    "replay",
]
