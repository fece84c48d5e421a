"""Scores responses and answers turns: the user's code, and the rules that come with Laminar."""
