"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example(index, capsys):
    exec(compile(EXAMPLES[index], f"README example {index}", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed
    if "count_up" in EXAMPLES[index]:
        assert "[4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4] [5, 5]" in printed
