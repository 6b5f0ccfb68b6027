"""A placement plan and Ray's nodes: whether it can ever fit, and which nodes each side may use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrlhf.cluster.placement import EPSILON, DeviceGroup, Plan, add_amounts
from asyncrlhf.cluster.placement import words as words_of_amounts

MANY = 10**9
LABEL = "label "  # begins the name of a resource of which a node with the label has any amount


@dataclass(frozen=True)
class Node:
    """``total`` and ``free``: amounts of CPU and GPU by name."""

    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def offers(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """``amounts`` and the node's labels as resources that never run out."""
        return {**amounts, **{f"{LABEL}{name}={value}": math.inf for name, value in self.labels.items()}}


def words(piece: Mapping[str, float]) -> str:
    """A piece as text for messages: ``1 GPU + 4 CPUs with zone=a``."""
    labels = [name.removeprefix(LABEL) for name in sorted(piece) if name.startswith(LABEL)]
    amounts = words_of_amounts({name: amount for name, amount in piece.items() if not name.startswith(LABEL)})
    return " with ".join([amounts, *([" and ".join(labels)] if labels else [])])


def this_machine(plan: Plan, gpus: int) -> Node:
    """The node of a Ray that is started here for the run. It declares as many CPUs as the parts request: a laptop with
    fewer cores shares them."""
    cpus = max(math.ceil(plan.total("CPU")) + 1, os.cpu_count() or 1)
    offer = {"CPU": float(cpus), "GPU": float(gpus)}
    return Node("this machine", offer, offer)


def shortage(plan: Plan, nodes: Sequence[Node]) -> str | None:
    """Why these nodes can never hold the plan, as one sentence; None if no reason is found.

    A reason is certain. A plan without one may still not fit, if the nodes cannot be divided into bundles of several
    sizes; then the start's time-out ends the wait.
    """
    loose = [(name, _with_labels(seat.demand(), seat.labels)) for name, seat in plan.loose.items()]
    bundles = [
        *(_with_labels(bundle, group.labels) for group in plan.groups for bundle in group.bundles),
        *(piece for _, piece in loose if piece),
    ]
    wanted, there = add_amounts(plan.bundles()), add_amounts(node.total for node in nodes)
    kinds = sorted({"CPU", *wanted})
    offer = words({kind: there.get(kind, 0.0) for kind in kinds})
    has = f"Ray has {offer} on {len(nodes)} node{'s' * (len(nodes) != 1)}"
    for name, piece in [*_pieces(plan.groups), *loose]:
        if not any(_fits(piece, node.offers(node.total)) for node in nodes):
            return f"{name} needs {words(piece)} on one node, but {has}, and no node has as much."
    for kind in kinds:
        if wanted.get(kind, 0.0) > there.get(kind, 0.0) + EPSILON:
            return f"The run needs {words(wanted)} (cluster.placement={plan.placement}), but {has}."
    for size in {tuple(sorted(bundle.items())) for bundle in bundles}:
        piece = dict(size)
        count = sum(1 for bundle in bundles if _fits(piece, bundle))
        places = sum(_times(piece, node.offers(node.total)) for node in nodes)
        if places < count:
            return (
                f"The run needs {count} times {words(piece)} (cluster.placement={plan.placement}), but only "
                f"{places} of them fit: {has}."
            )
    return None


def _pieces(groups: Sequence[DeviceGroup]) -> list[tuple[str, Mapping[str, float]]]:
    """The resources that must lie on one node, each with the name of its group."""
    return [
        (group.name, piece)
        for group in groups
        for piece in (
            _with_labels(bundle, group.labels)
            for bundle in ([add_amounts(group.bundles)] if group.strategy == "STRICT_PACK" else group.bundles)
        )
    ]


def _with_labels(bundle: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, float]:
    """What a bundle takes of a node's offers."""
    return {**bundle, **{f"{LABEL}{name}={value}": 1.0 for name, value in labels.items()}}


def keep_apart(plan: Plan, nodes: Sequence[Node]) -> dict[str, frozenset[str]]:
    """For each side the ids of the nodes that it may use; empty if the sides must share nodes.

    The learner and the reward workers get the fewest nodes that hold them, and leave the generators enough. Generators
    may use every other node, so they are not listed. Free resources are tried first.
    """
    if plan.sharing:
        return {}
    there = [side for side in ("learner", "rewards") if any(group.side == side for group in plan.groups)]
    for offers in ({n.node_id: n.offers(n.free) for n in nodes}, {n.node_id: n.offers(n.total) for n in nodes}):
        for count in range(len(there), -1, -1):
            found = _choose(plan.groups, there[:count], offers)
            if found is not None:
                return found
    return {}


def _choose(
    groups: Sequence[DeviceGroup], sides: Sequence[str], offers: Mapping[str, Mapping[str, float]]
) -> dict[str, frozenset[str]] | None:
    """Nodes for the first side such that the other sides fit on the remaining ones; None if there is no such choice."""
    if not sides:
        return {} if _pack(groups, offers) is not None else None
    own = [group for group in groups if group.side == sides[0]]
    others = [group for group in groups if group.side != sides[0]]
    # A single node first, the one that is filled best; then as many as first-fit takes.
    singles = [{n: offer} for n, offer in sorted(offers.items(), key=lambda item: _size(item[1]))]
    for candidate in [*singles, offers]:
        used = _pack(own, candidate)
        if used is None:
            continue
        rest = _choose(others, sides[1:], {n: offer for n, offer in offers.items() if n not in used})
        if rest is not None:
            return {sides[0]: used, **rest}
    return None


def _pack(groups: Sequence[DeviceGroup], offers: Mapping[str, Mapping[str, float]]) -> frozenset[str] | None:
    """The nodes that first-fit, largest first, uses for the groups; None if they do not all fit."""
    left = {node: dict(offer) for node, offer in offers.items()}
    used = set()
    for piece in sorted((piece for _, piece in _pieces(groups)), key=_size, reverse=True):
        node = next((n for n in left if _fits(piece, left[n])), None)
        if node is None:
            return None
        used.add(node)
        left[node] = {kind: amount - piece.get(kind, 0.0) for kind, amount in left[node].items()}
    return frozenset(used)


def _size(offer: Mapping[str, float]) -> tuple[float, float]:
    return offer.get("GPU", 0.0), offer.get("CPU", 0.0)


def _fits(piece: Mapping[str, float], offer: Mapping[str, float]) -> bool:
    return all(amount <= offer.get(kind, 0.0) + EPSILON for kind, amount in piece.items())


def _times(piece: Mapping[str, float], offer: Mapping[str, float]) -> int:
    """How many such pieces fit into the offer."""
    times = min(offer.get(kind, 0.0) / amount + EPSILON for kind, amount in piece.items() if amount)
    return int(min(times, MANY))
