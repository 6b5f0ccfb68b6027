"""asyncrlhf: asynchronous off-policy RLHF whose staleness is bounded, corrected and accounted for."""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"
_OF_THE_API = {
    **dict.fromkeys(("train", "evaluate", "sweep"), "asyncrlhf.api"),
    **dict.fromkeys(("Environment", "Step"), "asyncrlhf.episodes.environment"),
    **dict.fromkeys(("load_runs", "Run", "Runs", "Sweep", "Evaluation"), "asyncrlhf.report.frames"),
}
__all__ = ["__version__", *_OF_THE_API]


def __getattr__(name: str) -> _Any:
    """The Python API, loaded at its first use: every process of a run imports this package."""
    if name in _OF_THE_API:
        return getattr(_import_module(_OF_THE_API[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
