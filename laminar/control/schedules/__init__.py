"""Holds the schedules: who waits for whom."""
