"""Predicts runs before they are run: the real controller on a virtual clock, with parts that only cost time.

Costs come from the formulas of ``planner/``, from a run's records, or from ``measure.py``. The controller and its loops
do not know that they are simulated: a simulation is one more runtime (``cost_runtime.py``) and one more set of parts.
"""

DOORS = ("given", "measure", "plan", "plan_files", "simulate")
