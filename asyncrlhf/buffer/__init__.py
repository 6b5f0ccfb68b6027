"""How stale a token may be: the gate that admits rollouts, the bounded buffer that chooses batches, and the ledger
that knows the state of every rollout.
"""

DOORS = ("admission", "async_config", "checks", "held", "ledger", "replay")
