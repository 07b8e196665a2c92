"""`covprop plan`: what a propagation will take, and whether it fits."""

import dataclasses

from covprop.cli.answers import Answer
from covprop.cli.question import Question, running
from covprop.cli.refusals import ExitCode
from covprop.methods import Method
from covprop.propagate import plan


def answer(question: Question, method: Method, as_json: bool) -> Answer:
    """A row for each operation; no is the answer if memory does not suffice."""
    with running():
        planned = plan(question.module, question.x, method=method)
    told = {
        "model": question.name,
        "steps": [dataclasses.asdict(step) for step in planned.steps],
        "peak_bytes": planned.peak_bytes,
        "free_bytes": planned.free_bytes,
        "work": planned.work,
        "fits": planned.fits,
    }
    verdict = "it fits" if planned.fits else "it does not fit"
    code = ExitCode.FINE if planned.fits else ExitCode.NO
    return Answer(told, (planned.table, verdict), as_json, code)
