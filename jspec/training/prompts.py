"""Instructions to train a draft on: what the target is asked, so that it writes the text that its draft learns to foresee.

No prompt of a benchmark is among them: the sentences were written for this file, and functions come from the Python standard library. `overlaps` is the
check, against any set that must stay unseen.
"""

import ast
import functools
import itertools
import json
import pathlib
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator

_WORDS = json.loads(pathlib.Path(__file__).with_name("instructions.json").read_text("utf-8"))
_SHARES = {"request": 0.40, "task": 0.15, "function": 0.38, "sum": 0.07}


def training_prompts(seed: int = 0) -> Iterator[str]:
    """An endless mix of instructions, the same for the same seed: questions and writing, sums, programs to write, functions to complete."""
    rng = random.Random(seed)
    functions = itertools.cycle(_shuffled(stdlib_functions(), rng))
    kinds, weights = list(_SHARES), list(_SHARES.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        if kind == "request":
            topic, other = rng.sample(_WORDS["topics"], 2)
            yield rng.choice(_WORDS["requests"]).format(topic=topic, other=other)
        elif kind == "task":
            language = rng.choice(_WORDS["languages"])
            yield f"Write a {language} function that {rng.choice(_WORDS['tasks'])}."
        elif kind == "sum":
            a, b = rng.randint(2, 60), rng.randint(2, 20)
            numbers = {"a": a, "b": b, "c": a + b + rng.randint(1, 200)}
            yield rng.choice(_WORDS["sums"]).format(name=rng.choice(_WORDS["names"]), **numbers)
        else:
            yield f"Complete this Python function.\n\n```python\n{next(functions)}\n```"


def _shuffled(items: tuple[str, ...], rng: random.Random) -> list[str]:
    return rng.sample(items, len(items))


@functools.cache  # it parses the whole library
def stdlib_functions(*, max_chars: int = 900) -> tuple[str, ...]:
    """Signatures with docstrings of the standard library's functions, without their bodies, in the order of the files."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            continue
        try:
            tree = ast.parse(source := file.read_text("utf-8"))
        except (SyntaxError, ValueError):
            continue  # deliberately broken files
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and len(doc) > 30:
                lines = source.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
                indent = len(lines[0]) - len(lines[0].lstrip())
                text = "\n".join(line[indent:] for line in lines)
                if len(text) <= max_chars:
                    found.append(text)
    return tuple(found)


def word_runs(texts: Iterable[str], *, num_words: int = 8) -> frozenset[tuple[str, ...]]:
    """Every run of `num_words` words of the texts, made once for many calls of `overlaps`. A shorter text is one run."""
    return frozenset(run for text in texts for run in _runs(text, num_words))


def overlaps(text: str, unseen: frozenset[tuple[str, ...]], *, num_words: int = 8) -> bool:
    """Whether `text` shares a run of words with texts that must stay unseen, given as their `word_runs` of the same `num_words`."""
    return not unseen.isdisjoint(_runs(text, num_words))


def _runs(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    if len(words) <= n:
        return {tuple(words)} if words else set()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
