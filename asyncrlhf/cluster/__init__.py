"""What hosts the parts of a run: Ray or one process, handles, placement on devices, clocks."""
