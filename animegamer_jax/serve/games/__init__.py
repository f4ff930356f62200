"""The games of a server.

game_store  each in a folder of its own, found by its id
archive     a game as a zip, not trusted when it comes back
pictures    small pictures of turns and of prepared first shots
hub         every open page of a game hears that it has changed
"""
