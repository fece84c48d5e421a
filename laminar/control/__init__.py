"""Decides what happens next: events in, commands out. No clock, no IO, no torch."""
