"""Environments and tools of other packages as ours: games of TextArena (``games.py``), environments of OpenEnv servers
(``openenv.py``), tools of MCP servers (``mcp_tools.py``), which of them a setting names (``named.py``), and a program
that plays tasks of verifiers (``verifiers_program.py``)."""

DOORS = ("mcp_tools", "named")
