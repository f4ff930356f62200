"""`animegamer serve`: a web page and an API, for the games of many players.

command      options, the model and the games
server       the application until it is stopped
application  page, API and Gradio's end points on one port
page/        the page in the browser
api/         what clients can do, over HTTP and by gradio_client
engine/      turns, played in batches
games/       the games by id, as zips, as pictures; who follows them
guard/       hosts, limits, metrics
"""
