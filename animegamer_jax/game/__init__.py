"""One turn and the whole game.

rollout        a turn as one function, and the sliding window: read this first
player         a bundle's networks, compiled once, playing turn by turn
saved_game     a game on disk: turns, meters, clips; representation_file: a shot representation
instructions   instructions of players: read, checked, composed
pictures       a player's own picture as the turn before the first
"""
