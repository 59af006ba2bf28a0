"""The server of one or two models: OpenAI's chat completions, and a page that asks them side by side.

In: model directories, HTTP requests. Out: answers as JSON or event streams, votes as JSON lines.
Read first: `run_server.py`, then `chat_request.py` and `application.py`.
"""
