"""Pretrained checkpoints as users have them: found by name, converted where they are not whole and plain, loaded, and
made small for comparisons before a run; copies between the host and the device that holds one.
"""

DOORS = (
    "adapter", "checkpoint_folder", "checkpoint_notes", "copies", "miniature", "offload", "plain_pass", "pretrained",
    "routes", "teacher", "vocabulary", "weight_files",
)  # fmt: skip
