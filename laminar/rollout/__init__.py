"""Generates: one worker process a replica, an engine inside it."""
