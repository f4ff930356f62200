"""One turn and the whole game.

rollout        a turn as one function, and the sliding window: read this first
player         a bundle's networks, compiled once, playing turn by turn
saved_game     a game on disk: turns, meters, clips
instructions   instructions of players: read, checked, composed
"""
