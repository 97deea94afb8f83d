"""How long a test waits for what must come: long enough for any machine, however busy. No test is about it."""

PATIENCE = 3600.0
"""Seconds."""
