"""The page on Bayesian networks shows what its code prints."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "bayes.md"


def test_the_examples_print_what_the_page_says() -> None:
    text = PAGE.read_text()
    code, shown = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text")
    )
    names: dict[str, object] = {}  # an example may go on where the one before it ended
    for source, expected in zip(code, shown, strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(source, names)
        assert printed.getvalue() == expected
