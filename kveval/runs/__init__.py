"""Runs: a resolved plan, a journal, rows."""
