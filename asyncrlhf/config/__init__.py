"""The root of the settings, their composition by Hydra, the checks between parts, and what a resumed run may change."""

DOORS = (
    "compose", "conversion", "drift", "environment_config", "inputs", "run_config", "settings_list", "stage_config",
    "sweep_config", "unused",
)  # fmt: skip
