"""Modules of make_vision.py."""
