"""Learns: turns finished, scored trajectories into optimizer updates."""
