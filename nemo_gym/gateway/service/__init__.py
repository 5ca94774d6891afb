"""The gateway put together: sessions over a journal, answers by a policy behind engines.

inference.py      one call: lowered, answered once, raised, delivered
sessions.py       sessions that survive the process; live.py: one of them
backend.py        what gives answers: token_backend.py (ids in, ids out), text_backend.py (an OpenAI endpoint)
committed.py      an answer as the journal holds it
pool.py           the engines, their router, retries and health; engine_routes.py: for the trainer
config.py         all of it as configuration
"""
