"""`animegamer play`: a game in the terminal.

command    options, and the checks before a game starts
terminal   the prompt, the turns and their progress
film_command, openings_command, calibrate   a game as a film, first shots, steps to skip
"""
