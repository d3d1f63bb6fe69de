"""Modules of make_hostile.py, one per kind of file."""
