"""``weights.delta=sparse`` by every transport that has it: what changed arrives, and receivers hold whole versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport import sparse
from asyncrlhf.transport.protocol import Ticket
from tests.contract.test_transports import Link, Params, assert_same, model

TRANSPORTS = ["local", "object_store", "collective", "disk"]
Make = Callable[..., Link]


@pytest.fixture(params=TRANSPORTS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "object_store":
        request.getfixturevalue("ray_local")
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path) -> Iterator[Make]:
    made: list[Link] = []

    def build(params: Params | None = None, **settings: Any) -> Link:
        made.append(Link(kind, tmp_path / f"{len(made)}", params or model(), delta="sparse", **settings))
        made[-1].connect(["g0", "g1"], 0)
        return made[-1]

    yield build
    for link in made:
        link.close()


def changed(params: Params, rng: np.random.Generator, share: float) -> Params:
    """The parameters with other bits in ``share`` of the numbers of each tensor, at least one if it is over 0."""
    found = {}
    for name, tensor in params.items():
        new = tensor.detach().clone().contiguous()
        flat = new.view(-1)
        count = min(len(flat), max(1, round(share * len(flat)))) if share else 0
        where = torch.from_numpy(rng.choice(len(flat), count, replace=False)) if count else torch.zeros(0).long()
        values = ~flat[where] if new.dtype == torch.bool else (flat[where].float() * -1.5 + 1).to(new.dtype)
        flat[where] = values
        found[name] = new
    return found


@pytest.mark.in_turn
@pytest.mark.more_but(every=2)
def test_two_hundred_versions_are_bit_for_bit_what_was_taken(make: Make) -> None:
    """With versions that no receiver takes, new receivers, versions that return, and nothing or all changed."""
    link, rng, params = make(bucket_mb=0.004), np.random.default_rng(0), model(1.0)
    whole = sum(link.sender.manifest.bucket_bytes)
    old, sent, epoch = params, [], 0
    for version in range(1, 201):
        share = float(rng.choice([0.0, 1e-9, 0.001, 0.02, 0.2, 1.0], p=[0.1, 0.2, 0.3, 0.3, 0.05, 0.05]))
        params = old if version % 50 == 0 else changed(params, rng, share)  # a rollback every fifty
        old = params if version % 50 == 10 else old
        if version % 17 == 0:
            link.begin(version, params)  # and no receiver is asked to take it
            continue
        if version % 37 == 0:
            epoch += 1
            link.receivers.pop("g1", None)  # its process was replaced by another one
            link.connect(["g0", "g1"], epoch)
        received, stats = link.deliver(link.begin(version, params))
        for weights in received:
            assert_same(weights, params)
        sent.append((share, stats.bytes))
    few = [size for share, size in sent if 0 < share <= 0.001]
    assert np.median(few) < 0.05 * whole, "patches were not used"
    assert max(size for _, size in sent) == whole


def test_a_step_of_training_changes_few_bytes_of_bfloat16(make: Make) -> None:
    """AdamW's steps at 1e-6 on weights of the size of a language model's: less than 6 in a hundred bytes travel."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000, 128) * 0.02)
    link = make({"weight": weight}, dtype="bfloat16")
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    shares = []
    for version in range(12):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        received, stats = link.deliver(link.begin(version, {"weight": weight}))
        for weights in received:
            assert torch.equal(weights["weight"], weight.detach().bfloat16())
        shares.append(stats.bytes / weight.numel() / 2)
        if version:
            ((changes, words),) = stats.changed.values()
            assert 0 < changes < 0.03 * words and words == weight.numel()
    # Where receivers fetch, a chain of patches ends with a whole version.
    assert shares[0] == 1 and sum(share > 0.06 for share in shares[1:]) == (link.kind in ("object_store", "disk"))


def test_what_changed_and_nothing_else_is_sent(make: Make) -> None:
    link, params = make(), model(1.0)
    everything = link.deliver(link.begin(1, params))[1].bytes
    params["fp16"][1] = 7.0
    received, stats = link.deliver(link.begin(2, params))
    assert 0 < stats.bytes < 100 < everything
    assert {layer for layer, (changes, _) in stats.changed.items() if changes} == {"fp16"}
    for weights in received:
        assert_same(weights, params)
    assert link.deliver(link.begin(3, params))[1].bytes == 0
    link.connect(["g0", "g1", "g2"], 1)  # a late joiner has nothing to build upon
    params["scalar"].fill_(9.0)
    for weights in link.publish(4, params):
        assert_same(weights, params)


@pytest.mark.parametrize("part", ["values", "places"])
@pytest.mark.parametrize("code", [sparse.BITMAP, 8])
def test_a_flipped_bit_in_a_patch_is_found_and_named(
    make: Make, part: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, params = make(), model(1.0)
    link.publish(1, params)
    params = changed(params, np.random.default_rng(0), {8: 0.02, sparse.BITMAP: 0.3}[code])
    pack = sparse.pack

    def damaged(*arguments: Any) -> sparse.Patch | None:
        patch = pack(*arguments)
        if patch is None or patch.head.word != 4 or patch.head.nbytes < 200:
            return patch
        assert patch.head.code == code
        payload = patch.payload.clone()
        payload[40 if part == "values" else -20] ^= 1
        return replace(patch, payload=payload)

    monkeypatch.setattr("asyncrlhf.transport.sender.pack", damaged)
    ticket = link.begin(2, params)
    sentence = take_all(link, ticket)
    assert "version 2" in sentence and "g0" in sentence
    assert "embedding" in sentence or "Bucket 0" in sentence
    monkeypatch.undo()
    link.connect(["g0", "g1"], 1)  # no receiver keeps what is damaged
    params["scalar"].fill_(9.0)
    for weights in link.publish(3, params):
        assert_same(weights, params)


def test_a_copy_that_is_not_what_was_sent_is_found(make: Make) -> None:
    """Also in a bucket of which a patch changes something else."""
    link, params = make(), model(1.0)
    first, _ = link.publish(1, params)
    first["embedding"][3, 3] += 1
    params["embedding"][5, 5] += 1
    sentence = take_all(link, link.begin(2, params))
    assert "version 2 arrived at g0" in sentence and "embedding" in sentence


def take_all(link: Link, ticket: Ticket) -> str:
    """The error of the first receiver, and of the sender where it hears of it."""
    receiving = [link.pool.submit(link.take, name, ticket) for name in link.names]
    if link.kind == "collective":
        with pytest.raises(WeightSyncError, match="g0 answered"):
            link.sender.transfer(ticket)
    else:
        link.sender.transfer(ticket)
    return str(receiving[0].exception(timeout=90))


def test_a_receiver_that_missed_versions_follows_the_chain(
    make: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where receivers fetch: by patches, one after the other, while the whole bucket that they begin with is old."""
    if kind not in ("object_store", "disk"):
        return
    link, rng, params = make(), np.random.default_rng(0), model(1.0)
    link.publish(0, params)
    behind: Mapping[str, torch.Tensor] = {}
    for version in range(1, 30):
        params = changed(params, rng, 1e-9)
        ticket = link.begin(version, params)
        receiving = link.pool.submit(link.take, "g0", ticket)
        link.sender.transfer(ticket)
        assert_same(receiving.result(timeout=90), params)
        if version % 7 == 0:
            behind = link.take("g1", ticket)
            assert_same(behind, params)
    assert behind
    folders = len(list((Path(link.endpoint)).glob("v*-*"))) if kind == "disk" else 0
    assert folders <= 8  # g1 is behind by at most seven versions
