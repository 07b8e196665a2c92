"""`covprop demo`: the classifier of digits behind a noisy sensor."""

import importlib
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from covprop.cli.answers import Answer
from covprop.cli.refusals import Refusal


def answer(report: Path, as_json: bool) -> Answer:
    """The demo tells as it goes; with --json it tells that to standard error."""
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        found: dict[str, Any] = _demo().main(report)
    return Answer(found, (), as_json)


def _demo() -> Any:
    """The module, which needs the extra `demo`."""
    try:
        return importlib.import_module("covprop.demo")
    except ModuleNotFoundError as error:
        raise Refusal(
            f"the demo needs {error.name}; install it with "
            "pip install '.[demo]' in covprop's folder"
        ) from error
