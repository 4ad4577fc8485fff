"""Speculative decoding for TPUs in JAX: immutable scheduler state, pure transitions, one verify ahead of the host."""

from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Emission, Engine, RequestOutput

__version__ = "0.1.0"
__all__ = ["Emission", "Engine", "EngineConfig", "RequestOutput", "SamplingParams"]
