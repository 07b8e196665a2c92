"""What a propagation will take, found before it begins, and what is said of it."""

from functools import partial
from typing import Any

import torch

from covprop.errors import TooLarge, warn_user
from covprop.flow.lineage import Lineage, free_bytes, sharers
from covprop.methods.calibration import Setting, rates_of
from covprop.methods.call import Call
from covprop.methods.plan import TYPICAL, Plan, Planner
from covprop.text_table import in_bytes, in_seconds

LONG, MARGIN = 120.0, 10
"""Seconds from which a faster way is suggested, and how far typical rates may be off."""


def planned(call: Call, method: Any) -> Plan:
    """The operations of a propagation, from the means alone."""
    lineage = Lineage(method)
    planner = Planner(call.module, follows=torch.is_grad_enabled() and not method.backward)
    lineage.watcher = planner
    with torch.no_grad():
        planner.end(call.in_flight(lambda x: planner.wrap(x, lineage)))
    free = free_bytes(call.device) // sharers(call.inputs[0].covariance)
    setting = Setting.of(method, call, planner.followed)
    return Plan(tuple(planner.steps), free, partial(rates_of, method, setting))


def check(plan: Plan, method: Any) -> None:
    """Refuse a propagation that does not fit, and name a faster way where it takes long."""
    if not plan.fits:
        largest = max(plan.steps, key=lambda step: step.peak_bytes)
        raise TooLarge(
            f"the covariances would need {in_bytes(plan.peak_bytes)} at {largest.operation} "
            f"({largest.module or 'the function'}, {largest.features:,} features), and "
            f"{in_bytes(plan.free_bytes)} are free. A batch of inputs needs batch_dims=1, and "
            "may be propagated in parts; float32 takes half of float64; wide layers between "
            "narrower ones are streamed; else take cp.Sketched(), which has no covariances on the "
            "way, or sample: cp.MonteCarlo(). The plan:\n"
            f"{plan.table_at(TYPICAL)}"
        )
    rates = plan.rates_for(LONG / MARGIN)
    if (seconds := plan.counts.seconds(rates)) > LONG:
        others = (
            "" if method.backward else "cp.Sketched(), which has no covariances on the way, or "
        )
        warn_user(
            f"cp.{type(method).__name__}() will take about {in_seconds(seconds)} here; faster are "
            f"{others}samples, cp.MonteCarlo()"
        )
