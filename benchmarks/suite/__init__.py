"""Measures what the tables of the documentation show beyond `drivetrain bench`."""
