"""An external corpus in a file, as documents of token ids."""

import json
import pathlib
from collections.abc import Callable, Sequence

MAX_TOKENS = 1_000_000
"""Of a file: a suffix automaton takes about half a kilobyte a token while it is built, and some seconds for so many."""


def check_is_file(path: str) -> None:
    """Raises FileNotFoundError where there is no such file."""
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"corpus={path!r} is no file: give one of text lines, or a .jsonl of token ids")


def read_documents(
    path: str, *, vocab_size: int, encode: Callable[[str], Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    """The documents of a file, one a line: JSON arrays of token ids where its name ends with `.jsonl`, text elsewhere. Blank lines are passed over.

    Args:
        path: the file, in UTF-8.
        vocab_size: ids lie below.
        encode: text -> token ids; None where the model has no tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: naming the line and what is wrong with it.
    """
    check_is_file(path)
    of_ids = path.endswith(".jsonl")
    if not of_ids and encode is None:
        raise ValueError(f"corpus={path!r} is text, but there is no tokenizer: give a .jsonl of token ids")
    try:
        lines = pathlib.Path(path).read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus={path!r} is not UTF-8 ({error}): convert it") from None
    documents, total = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        ids = _ids(line, f"corpus={path!r}, line {number}") if of_ids else list(encode(line) if encode else ())
        if wrong := [token for token in ids if not 0 <= token < vocab_size]:
            raise ValueError(
                f"corpus={path!r}, line {number}: id {wrong[0]} must lie in [0, {vocab_size}), the model's vocabulary: tokenize it with this model's tokenizer"
            )
        total += len(ids)
        if total > MAX_TOKENS:
            raise ValueError(f"corpus={path!r} has more than {MAX_TOKENS} tokens, up to line {number}: cut it")
        if ids:
            documents.append(tuple(ids))
    if not documents:
        raise ValueError(f"corpus={path!r} holds no tokens: fill it, or leave corpus out")
    return tuple(documents)


def _ids(line: str, where: str) -> list[int]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error}): write an array of token ids a line") from None
    if not isinstance(found, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in found):
        raise ValueError(f"{where}: {str(found)[:40]!r} must be an array of token ids, as [1, 2, 3]")
    return found
