"""Writes down what a run does (event log, metrics, summary, report) and shows it; decides nothing."""
