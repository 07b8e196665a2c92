"""The list of cases is complete."""

from covprop.activations import DECLARATIONS
from tests.cases import CASES


def test_every_declared_activation_has_a_case():
    assert {d.name for d in DECLARATIONS} <= {case.declaration for case in CASES.values()}
