"""Pretends: runs the control plane against a cluster that exists on a virtual clock only."""
