"""The built-in tasks, prompts with verifiable answers, and the user's own prompts."""

DOORS = ("build_task", "prompts", "task")
