"""Rows, prompts and their packing; the settings of model and task; the manifest of files that belong together."""

DOORS = ("branches", "checkpoint_manifest", "curriculum", "data_config", "number_formats", "packing", "rows", "sources")
