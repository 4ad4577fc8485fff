"""What is reported where something does not hold."""


class Violation(Exception):
    """A fact that does not hold in a state, or of a transition.

    Args:
        name: of the fact, the same wherever it fails.
        details: with values.
    """

    def __init__(self, name: str, details: str = ""):
        super().__init__(name, details)
        self.name, self.details = name, details

    def __str__(self) -> str:
        return f"{self.name}: {self.details}" if self.details else self.name


def require(holds: bool, name: str, details: str = "", **values: object) -> None:
    """Raises `Violation` unless it holds."""
    if not holds:
        shown = ", ".join(f"{key}={value}" for key, value in values.items())
        raise Violation(name, f"{details} {shown}".strip())
