"""Prompt sources, packing, and finding pretrained checkpoints."""
