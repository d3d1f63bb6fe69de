"""What make_golden.py is made of: configs, tokenizers, weights and the capture of reference numbers."""
