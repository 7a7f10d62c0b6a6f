"""`megarl rollout`: the controller, which turns prompts into batches for the learner and decides what it does next.

controller.py    the parts, wired; the conversation with the learner; evaluation; the end
decision.py      what the learner is told to do next, pure            link.py       its requests and replies, over ZeroMQ
servers.py       who is up; health                                    membership.py their states, pure
tickets.py       admit, sample, grade, write down                     curriculum.py which prompt is drawn, pure
places.py        who may send a request to which server now           sampler.py    one rollout over many requests
interruption.py  thinking budget and phrase, pure                     client.py     one SGLang server over HTTP
routing.py       the experts a server chose, as they are recorded
ledger.py        the journal behind the event loop                    journal.py    the journal; state.py: its fold
compute.py       devices held x wall time                             status.py     how busy the servers are
show.py          `megarl rollouts show`
"""
