"""Episodes: rollouts in which sampled turns alternate with observed text, such as the results of tools. The room holds
what one episode is made of: the conversation as tokens (``conversation.py``), the chat template around a turn
(``turn_frames.py``), the tokens of observed text (``observed_tokens.py``) and the reading of a reply
(``replies.py``); the
environments (``environment.py``, ``tools.py``, ``world.py``), one episode (``driver.py``), its row (``row.py``) and
many episodes (``worker.py``). Agents of the user's own have a room inside (``agents/``).
"""

DOORS = ("agents.harness", "conversation", "driver", "environment", "episode_config", "worker", "world")
