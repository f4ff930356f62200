"""One turn and the whole game: rollout (read first), player, saved games."""
