"""Asynchronous RL post-training of language models, with the single trajectory as the unit of asynchrony."""

__version__ = "0.1.0"
