"""The networks of AnimeGamer, each a file that reads top to bottom; channels last everywhere."""
