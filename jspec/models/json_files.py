"""JSON objects of a downloaded directory."""

import json
import pathlib
from typing import Any


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in `file`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or holds something else.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged, it is not JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} is damaged: it must hold a JSON object, it holds a {type(content).__name__}; download it again"
        )
    return content
