"""From films to games: cutting, clips, annotation, games, in the order in which a film flows."""
