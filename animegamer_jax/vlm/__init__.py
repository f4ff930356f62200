"""Questions to a language model behind an endpoint."""
