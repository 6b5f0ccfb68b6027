"""The Ray actor around one worker: it says where it runs, and runs the worker's methods by their names."""

from __future__ import annotations

from typing import Any

from asyncrlhf.actors.where import Where, where


class PartActor:
    """A class that derives from it sets ``_worker`` when it is built."""

    _worker: Any

    def ready(self) -> bool:
        """Answers once the actor is built."""
        return True

    def where(self) -> Where:
        return where()

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """The worker's answer. Arguments that were object references arrive as the objects."""
        return getattr(self._worker, method)(*arguments, **keywords)

    def close(self) -> None:
        """Close the worker, if it holds anything open."""
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()
