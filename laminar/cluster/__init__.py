"""Runs: turns reports into events and commands into calls on real processes."""
