"""The libraries of the stages, which the flows use too. No file here is a stage.

`artifacts/` finds or makes the artifact of a stage, `inputs/` opens models, adapters and raw rows, `chat_format/` makes
tokens and pixels of conversations, `launchers/` starts processes, `scoring/` scores answers, `pages/` and `preview/`
make the pages.
"""
