"""Carries weight versions: trainer to master relay, relay to relay, relay to replica."""
