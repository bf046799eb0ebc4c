"""Connects checkpoints with the Trainers of Hugging Face and Lightning, and with the format of torch (DCP)."""
