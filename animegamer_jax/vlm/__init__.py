"""Questions to a language model behind an OpenAI-compatible endpoint.

`ask_many` asks many prompts at a time and caches the replies; read it first. `client` sends one
request, `retry` asks until an answer is valid, `messages` makes texts and pictures, `fields` reads
answers, `usage` counts tokens and costs, `options` are those of the commands.
"""
