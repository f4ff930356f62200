"""`animegamer serve`: a web page and an API, for the games of many players.

command      options, and the server until it is stopped
page, view   the page and the API in Gradio; pieces of HTML and thumbnails
engine       requests for turns, played in batches
game_store   the games by id; archive: a game as a zip
"""
