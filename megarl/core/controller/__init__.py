"""`megarl rollout`: the controller, which turns prompts into batches for the learner and decides what it does next.

controller.py    the parts, wired; changes; the end
conversation.py  what the learner asks, and when it is answered       link.py       its requests and replies, over ZeroMQ
decision.py      what the learner is told to do next, pure            publications.py which version is where
servers.py       who is up; health                                    membership.py their states, pure
tickets.py       admit, sample, grade, write down
drawing.py       the draw of a run: mixture.py of tasks, pure         curriculum.py which prompt is drawn, pure
evaluations.py   which versions are scored, on a server that is held
places.py        who may send a request to which server now           sampler.py    one rollout over many requests
interruption.py  thinking budget and phrase, pure                     client.py     one SGLang server over HTTP
routing.py       the experts a server chose, as they are recorded
parity.py        which rollouts both sides score, when, and what follows
ledger.py        the journal behind the event loop                    journal.py    the journal's files: one writer, readers
records.py       what it records      state.py  their fold            frames.py     how records lie in a file
group_index.py   where its groups lie, 16 bytes each
compute.py       devices held x wall time                             status.py     how busy the servers are
task_metrics.py  what a row of metrics says of each task
show.py          `megarl rollouts show`
"""
