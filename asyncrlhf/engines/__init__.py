"""Generation engines: fake and hf."""
