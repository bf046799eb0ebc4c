"""Builds the package for aarch64 on another machine and tests it under qemu's emulation of the processor."""
