"""A model on disk: its configuration, its tokenizer and one Orbax checkpoint a network."""
