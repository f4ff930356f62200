"""`animegamer play`: a game on the terminal."""
