"""Ranks that die, stop, skip a step or bring another model, and what the others must do: `make faults`."""
