"""Environments and tools of other packages as ours: games of TextArena (``games.py``), environments of OpenEnv servers
(``openenv.py``), tools of MCP servers (``mcp_tools.py``), and which of them a setting names (``named.py``)."""

DOORS = ("mcp_tools", "named")
