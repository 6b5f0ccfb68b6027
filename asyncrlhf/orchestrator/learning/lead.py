"""``async.pacing=just_in_time``: how far ahead of the learner groups begin, so that its batch is ready just in time.

Whenever the learner is free and asks for the batch of version v, the *need* of that moment is counted, in groups:

    need = (v - loaded version) * groups per batch  +  groups under way  +  groups that may begin but have not

With this lead exactly one batch would have been ready. The lead in force is the 0.8 quantile of the last 20 needs,
never over the staleness bound; before 8 needs are known only the bound limits, as under ``fill``.

The need follows from the latencies and the learner's rhythm. Groups begin when weights are loaded, P seconds after a
step, and the learner asks every T seconds, so a share ``sum over i >= 1 of P(latency > i T - P)`` of a batch is under
way when it asks: the tail of the whole group's latency, up to the score of its slowest sibling. Because the need is
counted at that moment, it holds for any distribution, also with rollouts that never end (a frozen replica) or that a
dead replica held. A learner that becomes faster asks earlier and finds more groups under way; five such steps in 20
raise the lead.

Groups gain nothing by beginning later than right after a load: all groups that begin before the next load have the same
version. The mean staleness equals the lead, in batches.
"""

from __future__ import annotations

import math
from collections import deque

from asyncrlhf.buffer.admission import StalenessGate
from asyncrlhf.orchestrator.state import RunState

REMEMBERED = 20  # needs
LEAST = 8  # needs before the first judgement
QUANTILE = 0.8


class Lead:
    """Sets the gate's lead each time the learner asks for a batch; does nothing under ``fill`` or a fixed schedule."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        config, gate = state.config, state.gate
        self._gate = gate if config.just_in_time and isinstance(gate, StalenessGate) else None
        self._groups = config.batch_size // config.num_generations
        self._needs: deque[int] = deque(maxlen=REMEMBERED)
        self._lead: int | None = None
        self._first = True
        self.figures: dict[str, float] = {}
        if self._gate is not None:
            self._gate.pace(None)

    def asked(self) -> None:
        """The learner is free: record the need of this moment and set the lead from the recent needs."""
        state, size = self._state, self._groups
        if self._gate is None:
            return
        behind = (state.version - state.published_version) * size
        under_way = len(state.groups)
        begun = self._gate.ahead(state.version)
        self._show((begun - under_way) / size - 1)
        # What waits to begin for longer than a batch shows busy generators, which no further lead helps.
        may_begin = min(self._gate.room(state.published_version) // state.config.num_generations, size)
        lead = state.bound * size if self._lead is None else self._lead
        # At the first ask nothing could be ready; while a shorter lead closes the gate, less is under way than will be.
        if not self._first and begun <= lead + size - behind:
            self._needs.append(behind + under_way + may_begin)
        self._first = False
        if len(self._needs) >= LEAST:
            self._set(self._quantile(QUANTILE))

    def _quantile(self, share: float) -> int:
        ordered = sorted(self._needs)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def _set(self, need: int) -> None:
        least = self._state.config.weights.publish_every * self._groups
        lead = min(max(need, least), self._state.bound * self._groups)
        if self._gate is not None and lead != self._lead:
            self._lead = lead
            self._gate.pace(lead)
            self._state.room.notify()

    def _show(self, margin: float) -> None:
        """``pacing_margin``: batches ready beyond the requested one, negative if the learner waits;
        ``pacing_margin_predicted``: the margin predicted from the needs before this one; ``pacing_lead``: in
        batches."""
        lead = self._state.bound if self._lead is None else self._lead / self._groups
        predicted = lead - self._quantile(0.5) / self._groups if self._needs else math.nan
        self.figures = {"pacing_lead": lead, "pacing_margin": margin, "pacing_margin_predicted": predicted}
