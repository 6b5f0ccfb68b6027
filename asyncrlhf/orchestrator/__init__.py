"""The controller and what it needs: config, runtimes, checkpoints, records."""
