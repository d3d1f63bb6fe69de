"""Modules of train_demo.py: books, tokens, model, optimiser, training, evaluation."""
