"""OpenAI's API in front of a running Triton server: models, completions and chat completions.

A process of its own beside the server, started by `trtspec serve --openai`. Knows HTTP and what the BLS model takes and
gives; not how tokens come about.
"""
