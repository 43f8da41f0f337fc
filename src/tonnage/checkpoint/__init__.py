"""Saved states of a run, and the model directory made from one."""
