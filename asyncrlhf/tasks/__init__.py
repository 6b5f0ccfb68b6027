"""The built-in tasks: prompts with verifiable answers."""
