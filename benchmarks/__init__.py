"""Lockstep beside what a user would take instead, and beside the limit, in one run (docs/performance.md)."""
