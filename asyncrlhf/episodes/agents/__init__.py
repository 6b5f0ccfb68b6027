"""Agents of the user's own, which play episodes over an endpoint that speaks OpenAI's protocol: what a call asks
(``calls.py``), what it is answered (``answers.py``), the episode behind a key (``session.py``), the endpoint
(``endpoint.py``), the process of an agent (``process.py``), and one episode from the agent's start to its end
(``harness.py``).
"""

DOORS = ("harness",)
