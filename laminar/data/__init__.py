"""Holds payload by id (prompts, tokens, log-probs, scores) and decides nothing; order is control's."""
