"""Holds the engines, all behind one protocol (engine.py)."""
