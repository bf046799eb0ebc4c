"""Notices that the machine will be taken away, and lets the ranks agree on when to save and leave."""
