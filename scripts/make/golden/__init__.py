"""Modules of make_golden.py: configs, tokenizers, weights and the capture of reference numbers."""
