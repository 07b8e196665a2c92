"""2,000 random cases, the same in every run; `python -m tests.fuzz 100000` runs more by hand."""

import pytest

from tests.fuzz.cases import run

CASES, CHUNK = 2000, 50
SEED = 15


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_random_cases_have_no_violation(start: int) -> None:
    found = [
        f"case {number} ({one.check}): {one.detail}\n"
        f"again: python -m tests.fuzz 1 --seed {SEED} --start {number}\n{one.program}"
        for number in range(start, start + CHUNK)
        for one in run(SEED, number)
    ]
    assert not found, "\n\n".join(found)
