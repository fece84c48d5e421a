"""Measures what the documents claim: `laminar bench NAME --json`."""
