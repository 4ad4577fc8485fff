"""Speculative decoding for TPUs in JAX: immutable scheduler state, pure transitions, one verify ahead of the host."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.config import EngineConfig, SamplingParams
    from jspec.engine import Emission, Engine, RequestOutput

__version__ = "0.1.0"
__all__ = ["Emission", "Engine", "EngineConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str):
    """Loads the engine when it is asked for: whoever imports one transition does not wait for models and kernels."""
    if name not in __all__:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(
        importlib.import_module("jspec.config" if name in ("EngineConfig", "SamplingParams") else "jspec.engine"), name
    )
