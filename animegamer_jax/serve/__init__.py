"""`animegamer serve`: a web page and an API, for the games of many players.

command      options, the model and the games
server       the page until it is stopped; guard, limits, monitor: what stands before it
page, view   the page in Gradio; pieces of HTML and thumbnails
api          the endpoints, and one line for every error
engine       requests for turns, played in batches; fair_queue: those that wait
game_store   the games by id; archive: a game as a zip
"""
