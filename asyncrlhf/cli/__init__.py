"""The ``asyncrlhf`` command: each subcommand parses its words here and calls the room that does the work."""

DOORS = ("beside", "main", "stages", "sweep")
