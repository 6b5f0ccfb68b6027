"""Patches: every set of changed words comes back, in every code, and damaged ones are refused or change the result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, build_manifest, entries_by_bucket
from asyncrlhf.transport.sparse import (
    BITMAP,
    MOST_LINKS,
    WORDS,
    Chain,
    Faster,
    Head,
    Link,
    Patch,
    apply,
    changed_words,
    changes_by_layer,
    needed,
    next_parts,
    pack,
    word_size,
)


def pair(word: int, places: np.ndarray, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two buckets of ``total`` words that differ at ``places``."""
    old = torch.from_numpy(np.random.default_rng(0).integers(0, 256, total * word, dtype=np.uint8))
    new = old.clone()
    words = new.view(WORDS[word])
    words[torch.from_numpy(places)] = ~words[torch.from_numpy(places)]
    return old, new


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("share", [0.0005, 0.004, 0.03, 0.3])
def test_what_changed_comes_back(word: int, share: float) -> None:
    total = 1 << 16
    places = np.flatnonzero(np.random.default_rng(1).random(total) < share)
    old, new = pair(word, places, total)
    found = changed_words(old, new, word)
    assert found.tolist() == places.tolist()
    patch = pack(found, new, word, base=7)
    assert patch is not None and patch.head.nbytes == len(patch.payload) < 0.5 * len(new)
    apply(patch.head, patch.payload, old)
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("places", "code"),
    [
        (np.arange(0, 40_000, 254), 8),  # gaps of 253, below the number that stands for more to come
        (np.arange(0, 40_000, 255), 8),
        (np.arange(0, 40_000, 256), 16),  # each gap of 255 would take two bytes, too
        (np.array([0, 65_535]), 16),
        (np.array([65_535, 131_071, 199_999]), 16),
        (np.array([199_999]), 32),
        (np.flatnonzero(np.arange(200_000) % 5 == 0), BITMAP),
        (np.array([0]), 8),
    ],
)
def test_gaps_at_the_borders_of_a_code_come_back(places: np.ndarray, code: int) -> None:
    old, new = pair(2, places, 200_000)
    patch = pack(changed_words(old, new, 2), new, 2, base=0)
    assert patch is not None
    assert patch.head.nbytes <= pack_size(places, code)
    apply(patch.head, patch.payload, old)
    assert torch.equal(old, new)


def pack_size(places: np.ndarray, code: int) -> int:
    """Bytes of a payload with this code, counted number by number."""
    marks = 25_000
    if code != BITMAP:
        gaps = np.diff(np.concatenate([[-1], places])) - 1
        marks = sum(gap // (2**code - 1) + 1 for gap in gaps.tolist()) * code // 8
    return -(-len(places) * 2 // 16) * 16 + marks


def test_zeros_of_both_signs_and_not_numbers_differ() -> None:
    old = torch.tensor([0.0, 1.0, float("nan"), 2.0], dtype=torch.bfloat16).view(torch.uint8)
    new = torch.tensor([-0.0, 1.0, float("nan"), 2.0], dtype=torch.bfloat16).view(torch.uint8)
    assert changed_words(torch.cat((old, old)), torch.cat((new, old)), 2).tolist() == [0]


def test_half_of_a_bucket_goes_whole() -> None:
    old, new = pair(4, np.arange(0, 1000, 2), 1000)
    assert pack(changed_words(old, new, 4), new, 4, base=0) is None
    assert pack(changed_words(new, new, 4), new, 4, base=0) is None  # nothing changed


@pytest.mark.parametrize("code", [BITMAP, 8, 16])
def test_a_damaged_patch_is_refused_or_changes_the_result(code: int) -> None:
    """Every bit of the payload, one by one: none goes unnoticed, and none writes beyond the bucket."""
    step = {BITMAP: 4, 8: 90, 16: 900}[code]
    old, new = pair(2, np.arange(step - 1, 4000, step), 4000)
    patch = pack(changed_words(old, new, 2), new, 2, base=0)
    assert patch is not None and patch.head.code == code
    used = patch.head.changed * 2
    gap = -(-used // 16) * 16
    for byte in [*range(used), *range(gap, patch.head.nbytes)]:
        for bit in range(8):
            payload, bucket = patch.payload.clone(), old.clone()
            payload[byte] ^= 1 << bit
            try:
                apply(patch.head, payload, bucket)
            except WeightSyncError:
                assert torch.equal(bucket, old)
            else:
                assert not torch.equal(bucket, new)


def test_a_bucket_is_compared_in_its_smallest_numbers() -> None:
    def size(*dtypes: torch.dtype) -> int:
        manifest = build_manifest({f"{i}": torch.zeros(4, dtype=d) for i, d in enumerate(dtypes)}, 1 << 20)
        return word_size(entries_by_bucket(manifest)[0])

    assert [size(torch.float32), size(torch.bfloat16), size(torch.int64), size(torch.bool)] == [4, 2, 8, 1]
    assert size(torch.float32, torch.bfloat16) == 2


def test_changes_are_counted_by_layer() -> None:
    params = {
        "model.embed.weight": torch.zeros(10), "model.layers.0.a": torch.zeros(3), "model.layers.0.b": torch.zeros(5),
        "model.layers.1.a": torch.zeros(0), "model.layers.1.b": torch.zeros(7),
    }  # fmt: skip
    manifest = build_manifest(params, 1 << 20)
    old, new = FlatBuckets(manifest), FlatBuckets(manifest)
    new.views()["model.layers.0.a"][2] = 1
    new.views()["model.layers.0.b"][:] = 1
    new.views()["model.layers.1.b"][6] = 1
    found = changes_by_layer(changed_words(old.tensors[0], new.tensors[0], 4), entries_by_bucket(manifest)[0], 4)
    assert found == {"model.embed.weight": (0, 10), "model.layers.0": (6, 8), "model.layers.1": (1, 7)}


def patch(base: int, nbytes: int = 10) -> Patch:
    return Patch(Head(base, 2, 1, 8, nbytes), torch.zeros(nbytes, dtype=torch.uint8))


def test_a_chain_ends_with_a_whole_bucket_when_it_is_long_or_large() -> None:
    chain: Chain = (Link(0, "whole"),)
    for end in range(1, 40):
        part = next_parts([chain], [end], {0: patch(end - 1)}, [1000])[0]
        if part is None:
            break
        chain = (*chain, Link(end, f"p{end}", part.head))
    assert len(chain) == 1 + MOST_LINKS
    assert next_parts([chain[:2]], [2], {0: patch(1, 480)}, [1000])[0] is not None
    assert next_parts([chain[:2]], [2], {0: patch(1, 495)}, [1000]) == {0: None}  # with the first one over a half
    assert next_parts([chain[:2]], [2], {0: patch(9)}, [1000]) == {0: None}  # of another content
    assert next_parts([chain[:2]], [1], {}, [1000]) == {}  # nothing changed
    assert next_parts([], [1], {0: patch(0)}, [1000]) == {0: None}
    assert [link.where for link in needed(chain, 6)] == ["p7", "p8"]
    assert needed(chain, 99) == needed(chain, None) == chain


def test_the_faster_way_is_found_and_the_other_tried_again() -> None:
    faster, chosen = Faster(("sparse", "whole")), []
    for turn in range(200):
        chosen.append(faster.pick())
        slow = "sparse" if turn < 100 else "whole"  # as on a link that becomes slow
        faster.tell(2.0 if chosen[-1] == slow else 1.0)
    assert chosen[:2] == ["sparse", "whole"]
    assert 0 < chosen[2:100].count("sparse") <= 5
    assert chosen[-20:].count("sparse") >= 18
    assert {Faster(("sparse",)).pick() for _ in range(60)} == {"sparse"}
