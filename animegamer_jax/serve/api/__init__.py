"""What clients can do, and two ways to ask for it.

actions        everything that changes a game, for all interfaces
models         what the API answers and accepts; answers makes it
info           what the server plays: words, sizes, prepared first shots
routes         the API over HTTP: JSON, files; streams: server-sent events
gradio_api     the end points of gradio_client
"""
