"""What a rank saves and loads: nested states as safetensors, written while the next steps run."""

DOORS = ("checkpoint", "state_file", "state_writer")
