"""Parts of train_demo.py: books to tokens, the model, its optimiser, the run, its evaluation."""
