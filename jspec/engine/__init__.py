"""The impure shell around the pure core."""

from jspec.engine.engine import Engine
from jspec.engine.outputs import Emission, Emissions, RequestOutput, Summary

__all__ = ["Emission", "Emissions", "Engine", "RequestOutput", "Summary"]
