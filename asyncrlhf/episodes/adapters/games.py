"""Games of TextArena for one player, or for two of whom the other moves at random."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from asyncrlhf.episodes.adapters.blocking import BlockingEnvironment
from asyncrlhf.episodes.environment import EpisodeError, Step
from asyncrlhf.episodes.replies import ParsedReply
from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import guarded
from asyncrlhf.validation import check_package, did_you_mean

MODEL = 0  # the model's number among the players
MOVE = re.compile(r"\[[^\[\]\n]{1,20}\]")  # as TextArena's games write moves
MOST_MOVES = 100  # of the other player between two of the model
_turn = threading.Lock()  # the games draw from the one generator of the module random


def game(name: str) -> Callable[[], Game]:
    """The factory of ``textarena:NAME``. Raises ConfigError for a game that cannot be played here."""
    key = f"episode.environment=textarena:{name}"
    check_package(key, "textarena", "textarena")
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        raise ConfigError(f"{key}: TextArena has no game {name!r}{did_you_mean(name, ENV_REGISTRY)}.")

    def made() -> Any:
        found = textarena.make(name)
        while isinstance(found, textarena.Wrapper):  # each would tell the whole game again at every turn
            found = found.env
        return found

    players = guarded(f"{key} cannot be started", lambda: _players(made()))
    if players is None:
        raise ConfigError(f"{key} needs more than two players; allowed: a game for one or two.")
    return lambda: Game(made(), players)


def _players(made: Any) -> int | None:
    for count in (1, 2):
        try:
            with _turn:
                made.reset(num_players=count, seed=0)
        except AssertionError:  # how the games refuse a number of players
            continue
        return count
    return None


class Game(BlockingEnvironment):
    """One game; what it tells between two moves of the model is an observation. The game's reward of the model is the
    episode's; a game that was not played to its end scores 0."""

    def __init__(self, made: Any, players: int) -> None:
        self._game, self._players = made, players
        self._state: Any = None  # of the random draws
        self._reward = 0.0

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draws within depend only on the seed of this game."""
        with _turn:
            outer = random.getstate()
            if self._state is not None:
                random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outer)

    def reset(self, row: Mapping[str, Any]) -> str | None:  # type: ignore[override]
        seed = int(row["seed"])
        with self._drawing():
            random.seed(seed)
            self._game.reset(num_players=self._players, seed=seed)
            done = self._others_move()
            if done:
                raise EpisodeError("The game ended before the model's first move.")
            return self._told()

    def step(self, reply: ParsedReply) -> Step:  # type: ignore[override]
        with self._drawing():
            done, _ = self._game.step(reply.text)
            done = done or self._others_move()
            if done:
                rewards, _ = self._game.close()
                self._reward = float((rewards or {}).get(MODEL, 0.0))
                return Step(done=True)
            return Step(self._told())

    def reward(self) -> float:  # type: ignore[override]
        return self._reward

    def _others_move(self) -> bool:
        """The other player's moves until it is the model's turn; whether the game has ended."""
        for _ in range(MOST_MOVES):
            if self._game.state.current_player_id == MODEL:
                return False
            told = self._told()
            moves = MOVE.findall(told.rpartition("Available Moves")[2]) or ["[0]"]
            done, _ = self._game.step(random.choice(moves))
            if done:
                return True
        raise EpisodeError(f"The other player moved {MOST_MOVES} times.")

    def _told(self) -> str:
        """What the game tells the player whose turn it is, without this player's own moves."""
        player, messages = self._game.get_observation()
        return "\n".join(text for by, text, _ in messages if by != player)
