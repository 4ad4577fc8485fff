"""How the commands say what is wrong."""

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import typer


def print_error(message: object) -> None:
    """One line on standard error."""
    typer.echo("error: " + " ".join(str(message).split()), err=True)


def _refuse(message: object) -> NoReturn:
    print_error(message)
    raise typer.Exit(2)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """What the user got wrong becomes one line and exit code 2."""
    try:
        yield
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}" if error.filename else error)
    except (TypeError, ValueError) as error:
        _refuse(error)
