"""Tests what happens when a rank dies, stops, skips a step or brings another model: `make faults`."""
