"""An OpenAI-compatible HTTP endpoint over the engine, so that any agent harness can drive the policy.

    application(Served(engine, chat, "my-policy"))   # an ASGI application; `jaxagent serve MODEL` runs it

Needs the extra `serve`. `schemas.py` lists what a request may say; the rest is refused, never ignored.
"""
