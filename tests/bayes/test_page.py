"""The page on Bayesian networks shows what its code prints."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "bayes.md"


def test_the_example_prints_what_the_page_says() -> None:
    text = PAGE.read_text()
    code, shown = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text")
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code[0], {})
    assert printed.getvalue() == shown[0]
