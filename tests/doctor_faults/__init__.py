"""Injects 18 faults into machine, ranks and network, and checks that `drivetrain doctor` names each with its cure."""
