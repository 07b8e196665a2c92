"""2,000 random cases, the same in every run; `python -m tests.fuzz 100000` runs more by hand."""

import pytest

from tests.fuzz.cases import run

SEED, CASES, CHUNK = 15, 2000, 50
SLOW = {
    4, 6, 11, 23, 31, 32, 108, 116, 120, 121, 125, 136, 138, 158, 163, 166, 174, 187, 188, 196,
    197, 214, 233, 258, 264, 278, 289, 304, 316, 319, 322, 325, 334, 338, 342, 360, 367, 369,
    398, 404, 409, 411, 414, 416, 419, 423, 432, 435, 436, 463, 481, 486, 487, 502, 511, 523,
    531, 536, 565, 575, 576, 589, 601, 603, 606, 614, 624, 628, 667, 673, 687, 696, 709, 722,
    743, 752, 754, 760, 777, 779, 795, 801, 810, 821, 839, 848, 860, 862, 868, 880, 909, 924,
    925, 930, 963, 996, 997, 1007, 1012, 1028, 1030, 1043, 1049, 1089, 1100, 1101, 1115, 1119,
    1129, 1140, 1146, 1151, 1172, 1176, 1186, 1192, 1195, 1198, 1200, 1208, 1227, 1229, 1262,
    1267, 1271, 1280, 1287, 1298, 1312, 1358, 1360, 1380, 1398, 1411, 1419, 1481, 1491, 1517,
    1521, 1527, 1535, 1536, 1544, 1565, 1572, 1573, 1580, 1595, 1604, 1615, 1632, 1641, 1643,
    1670, 1671, 1699, 1704, 1712, 1727, 1728, 1740, 1767, 1782, 1784, 1807, 1809, 1811, 1814,
    1826, 1827, 1840, 1874, 1885, 1891, 1902, 1925, 1931, 1940, 1944, 1945, 1956, 1964, 1979,
    1981, 1984, 2007, 2030, 2038, 2047, 2052, 2053, 2080, 2096, 2103, 2104, 2105, 2112, 2120,
    2124, 2170, 2171, 2174, 2199,
}  # fmt: skip
"""Cases that take more than 0.15 s each, over half of the time of all: left to runs by hand."""
NUMBERS = [number for number in range(CASES + len(SLOW)) if number not in SLOW][:CASES]


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_random_cases_have_no_violation(start: int) -> None:
    found = [
        f"case {number} ({one.check}): {one.detail}\n"
        f"again: python -m tests.fuzz 1 --seed {SEED} --start {number}\n{one.program}"
        for number in NUMBERS[start : start + CHUNK]
        for one in run(SEED, number)
    ]
    assert not found, "\n\n".join(found)
