"""Episodes: rollouts in which sampled turns alternate with observed text, such as the results of tools. The room holds
what one episode is made of: the conversation as tokens (``conversation.py``), the chat template around a turn
(``turn_frames.py``), the tokens of observed text (``observed_tokens.py``) and the reading of a reply
(``replies.py``); its environment (``environment.py``, ``tools.py``, ``world.py``); one episode from its reset to its
end (``driver.py``) and its packed row (``row.py``), and many at a time (``worker.py``). Agents of the user's own have a
room inside (``agents/``).
"""

DOORS = ("agents.harness", "conversation", "driver", "episode_config", "worker", "world")
