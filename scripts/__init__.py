"""Holds the scripts behind the figures of docs/results.md."""
