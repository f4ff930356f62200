"""One turn and the whole game.

rollout        a turn as one function, and the sliding window: read this first
player         a bundle's networks (`loading`), compiled once, playing turn by turn (`turn_output`)
saved_game     a game on disk; `saved/` has its turns, their tree, its files
instructions   instructions of players: read, checked, composed
pictures       a player's own picture as the turn before the first; openings: prepared first shots
rules          days, goals and an end; suggestions of what to do next; scene_words of a line
skipped_steps  denoising steps that reuse an earlier one's work
"""
