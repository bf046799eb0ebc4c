"""Runs the test suites of other projects with torch's classes and with drivetrain's (make strangers)."""
