"""Tries drivetrain on an unedited script: runs its first steps under torch and under drivetrain, and compares them."""
