"""Admission, replay buffer and ledger."""
