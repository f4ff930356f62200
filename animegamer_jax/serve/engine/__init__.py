"""Turns of many players, played in batches.

engine        takes the requests that wait, plays them, saves the turns
turn_request  a turn that a player asked for
fair_queue    those that wait: clients take turns
"""
