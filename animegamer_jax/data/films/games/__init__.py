"""From annotated clips to games."""
