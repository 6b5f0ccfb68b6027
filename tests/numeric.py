"""Equality of two ways to compute a number; `--margins` fails a test whose error uses over a third of its tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

# Another CPU adds in another order, and its rounding differs by some times ours; a third leaves it room.
LARGEST_RATIO = 1 / 3
# Absolute, for log-probs, values and scores of float32 models. Those of the tests have large weights, so that every
# token matters, which amplifies rounding a hundredfold: another order of sums moves a result by up to 1.3e-5, a wrong
# mask, position or key by more than 1e-2.
FLOAT32 = 1e-4
SHOWN = 10


@dataclass(frozen=True)
class Margin:
    """The entry of a comparison that lies furthest out: its ``ratio`` is ``error / tolerance``."""

    ratio: float
    error: float
    tolerance: float
    where: str

    def __str__(self) -> str:
        return f"error {self.error:.2g} of {self.tolerance:.2g} allowed (ratio {self.ratio:.2g}){self.where}"


_thinnest: list[Margin] = []  # of the test that runs now; at most one


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float = 1e-9,
    atol: float = 1e-12,
    of_largest: float = 0.0,
    what: str = "",
) -> None:
    """Every entry of ``actual`` is within ``atol + rtol |entry| + of_largest max |entries|`` of that of ``expected``.

    Both are tensors, arrays, floats or sequences of one shape, or mappings of such with the same keys; ``max`` is over
    all of ``expected``, in a mapping over all its values. The defaults suit float64: 1e-9 is some million roundings.
    Infinities equal themselves, and NaN equals nothing. ``what`` names what is compared in the message.
    """
    __tracebackhide__ = True
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), f"the keys differ: {sorted(actual.keys() ^ expected.keys())}"
        pairs = [(f"{what}[{key!r}]", actual[key], expected[key]) for key in expected]
    else:
        pairs = [(what, actual, expected)]
    found = [(name, *_same_kind(name, one, other)) for name, one, other in pairs]
    largest = max((float(np.abs(b).max()) for _, _, b in found if b.size and of_largest), default=0.0)
    for name, a, b in found:
        if a.size:
            with np.errstate(invalid="ignore"):
                _judge(name, a, b, atol + rtol * np.abs(b) + of_largest * largest)


def _same_kind(name: str, actual: Any, expected: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    __tracebackhide__ = True
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, f"{name} has {actual.dtype} where {expected.dtype} is expected"
    a, b = _as_float64(actual), _as_float64(expected)
    assert a.shape == b.shape, f"{name} has shape {a.shape} where {b.shape} is expected"
    return a, b


def _as_float64(values: Any) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        return values.detach().double().numpy()
    return np.asarray(values, np.float64)


def _judge(name: str, a: NDArray[np.float64], b: NDArray[np.float64], tolerance: NDArray[np.float64]) -> None:
    __tracebackhide__ = True
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(a == b, 0.0, np.abs(a - b))
        # An infinite tolerance is that of an expected infinity: what is not that infinity is wrong.
        ratio = np.where(error == 0.0, 0.0, np.where(np.isfinite(error), error / tolerance, np.inf))
    worst = np.unravel_index(ratio.argmax(), ratio.shape)
    entry = name + (str([int(i) for i in worst]) if worst else "")
    where = f"{' at ' if entry else ''}{entry}: {a[worst]:.9g} where {b[worst]:.9g} is expected"
    margin = Margin(float(ratio[worst]), float(error[worst]), float(tolerance[worst]), where)
    if margin.ratio > 1.0:
        raise AssertionError(str(margin))
    if not _thinnest or margin.ratio > _thinnest[0].ratio:
        _thinnest[:] = [margin]


# The plugin.


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"a test fails when an error of assert_close exceeds {LARGEST_RATIO:.2g} of its tolerance; shows the worst"
    parser.addoption("--margins", action="store_true", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _thinnest.clear()
    yield
    if _thinnest:
        [margin] = _thinnest
        item.user_properties.append(("margin", astuple(margin)))  # the one thing that reaches xdist's controller
        if item.config.getoption("--margins") and margin.ratio > LARGEST_RATIO:
            pytest.fail(f"thin margin: {margin}", pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not terminalreporter.config.getoption("--margins"):
        return
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if r.when == "call"]
    found = [(Margin(*dict(r.user_properties)["margin"]), r.nodeid) for r in reports if r.user_properties]
    terminalreporter.section(f"the {SHOWN} thinnest margins of {len(found)} tests")
    for margin, test in sorted(found, key=lambda pair: -pair[0].ratio)[:SHOWN]:
        terminalreporter.line(f"{margin.ratio:.3f}  error {margin.error:.2g} of {margin.tolerance:.2g}  {test}")
