"""The web page: games of many players, turns that wait at the same time played as one batch."""
