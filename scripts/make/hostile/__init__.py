"""What make_hostile.py is made of, one module per kind of file."""
